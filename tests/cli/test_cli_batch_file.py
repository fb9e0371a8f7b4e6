"""`paged generate --input`: what a line may say, where results go, and what is left when it ends early."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paged import cli
from paged.cli import batch_file
from paged.engine import CompletionOutput, SamplingParams, Token

BASE = ["--max-requests", "2", "--ignore-eos", "--quiet", "--max-tokens", "4"]


def generate(*arguments):
    return cli.main(["generate", *BASE, *map(str, arguments)])


@pytest.fixture
def batch(tmp_path):
    def write(*lines):
        path = tmp_path / "in.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return path

    return write


def test_each_line_has_its_own_parameters_and_results_come_as_they_end(capsys, directory, batch, tmp_path):
    source = batch(
        {"prompt": "hello", "id": "first", "max_tokens": 6},
        {"prompt": [119, 104, 97], "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 0},
        {"prompt": "h" * 63, "id": 7, "max_tokens": 1},
        {"prompt": "why", "n": 2, "temperature": 1.5, "seed": 3},
    )
    out = tmp_path / "out.jsonl"
    assert generate("--model", directory, "--input", source, "--output", out) == 0
    assert capsys.readouterr() == ("", "")
    results = [json.loads(line) for line in out.read_text().splitlines()]
    # Two rows: the first two begin, the second ends first; the rest follow as rows come free.
    assert [(r["line"], r["sample"]) for r in results] == [(2, 0), (3, 0), (1, 0), (4, 0), (4, 1)]
    by_line = {(r["line"], r["sample"]): r for r in results}
    assert [by_line[key].get("id") for key in [(1, 0), (2, 0), (3, 0)]] == ["first", None, 7]
    assert [len(r["token_ids"]) for r in results] == [2, 1, 6, 4, 4]
    assert {r["finish_reason"] for r in results} == {"length"}
    assert len(by_line[2, 0]["top_logprobs"]) == 2
    assert by_line[2, 0]["prompt_logprobs"][0] is None
    assert by_line[4, 0]["seed"] == by_line[4, 1]["seed"] == 3
    assert by_line[4, 0]["token_ids"] != by_line[4, 1]["token_ids"]
    assert generate("--model", directory, "--prompt", "hello", "--json", "--max-tokens", "6") == 0
    (alone,) = json.loads(capsys.readouterr().out)["completions"]
    assert alone["token_ids"] == by_line[1, 0]["token_ids"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", 'is blank. Each line is an object, such as {"prompt": "Once"}'),
        ("{", "is not JSON (Expecting property name"),
        ([1], "must be an object with a 'prompt', got [1]"),
        ({"text": "x"}, "must be an object with a 'prompt', got {'text': 'x'}"),
        ({"prompt": ""}, ": prompt must be a text that is not empty, or token ids; got ''"),
        ({"prompt": 3}, ": prompt must be a text that is not empty, or token ids; got 3"),
        ({"prompt": [1, True]}, ": prompt must be token ids, at least one; got [1, True]"),
        ('{"prompt": "\\ud800"}', ": prompt is no text: surrogates not allowed at character 0"),
        ({"prompt": "x", "id": 1.5}, ": id must be a text or a whole number, got 1.5"),
        ({"prompt": "x", "id": "a"}, ": id 'a' is that of line 1, too"),
        ('{"prompt": "x", "id": "b\\ud800"}', ": id is no text: surrogates not allowed at character 1"),
        ('{"prompt": "x", "n": 2, "prompt": "y"}', ": 'prompt' is there twice. Give it once"),
        ({"prompt": "x", "temperatur": 1}, ": there is no field 'temperatur', but prompt, id, max_tokens, "),
        ({"prompt": "x", "temperature": "hot"}, ": SamplingParams.temperature must be a number, got 'hot'"),
        ('{"prompt": "x", "top_p": NaN}', ": SamplingParams.top_p must be finite, got nan"),
        ({"prompt": "x", "max_tokens": 0}, ": SamplingParams.max_tokens must be in 1..2147483647, got 0"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_starts(capsys, batch, tmp_path, line, message, own_checks_only):
    source, out = batch({"prompt": "fine", "id": "a"}, line, {"prompt": "fine"}), tmp_path / "out.jsonl"
    assert generate("--model", "never loaded", "--input", source, "--output", out) == 2
    printed, err = capsys.readouterr()
    assert printed == ""
    assert err.startswith(f"paged generate: {source}, line 2")
    assert message in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_what_does_not_go_together_and_files_that_are_not_there(capsys, directory, batch, tmp_path):
    source = batch({"prompt": "fine"})
    there = tmp_path / "there"
    there.write_text("results\n")
    for arguments, message in (
        (["--prompt", "x", "--output", "o"], "--output is for the results of --input"),
        (["--input", source, "--json"], "leave --stream and --json out"),
        (["--input", tmp_path / "no"], f"cannot read {tmp_path / 'no'}: No such file"),
        (["--input", source, "--output", there], f"{there} is there already. Remove it, or give --output another"),
        (["--input", source, "--output", tmp_path / "no" / "o"], "cannot write"),
    ):
        assert generate("--model", "never loaded", *arguments) == 2
        assert message in capsys.readouterr().err
    assert there.read_text() == "results\n"
    source.write_bytes(b'{"prompt": "\xff"}\n')
    assert generate("--model", "never loaded", "--input", source) == 2
    assert "is not UTF-8 text (invalid start byte, byte 12)" in capsys.readouterr().err
    out = tmp_path / "empty"
    assert generate("--model", "nowhere", "--input", batch({"prompt": "x"}), "--output", out) == 2
    assert not out.exists()


def test_a_request_that_can_never_fit_is_a_result_too_and_the_status_is_1(capsys, directory, batch):
    source = batch({"prompt": "h" * 40, "id": "long"}, {"prompt": "hello"})
    assert generate("--model", directory, "--tokens-per-page", 8, "--pages", 5, "--input", source) == 1
    out, err = capsys.readouterr()
    refused, done = map(json.loads, out.splitlines())
    assert (refused["id"], refused["finish_reason"], done["finish_reason"]) == ("long", "refused", "length")
    assert refused["error"].startswith("prompt 0: 40 tokens and 3 to generate need 6 pages")
    assert err == f"paged generate: refused: line 1 of {source}: {refused['error']}\n"


def test_ids_outside_the_vocabulary_tell_how_prompts_are_counted(capsys, directory, batch):
    source = batch({"prompt": "a"}, {"prompt": [1, 999]})
    assert generate("--model", directory, "--input", source) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paged generate: prompt 1.tokens must be in 0..")
    assert f"prompt i is line i + 1 of {source}" in err


def test_json_is_ascii_where_the_stream_has_nothing_else():
    assert batch_file.as_json({"a": "\u00e9\u4f60"}, "latin-1") == r'{"a": "\u00e9\u4f60"}'
    for encoding in ("UTF8", "utf-8", None):
        assert batch_file.as_json({"a": "\u4f60"}, encoding) == '{"a": "\u4f60"}'


def test_a_stdout_that_lacks_a_character_ends_no_run(directory):
    code = (
        f"import sys; from paged.cli import main; sys.exit(main(['generate', '--model', {directory!r}, *sys.argv[1:]]))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    arguments = ["--quiet", "--max-tokens", "1", "--prompt", "\u4f60", "--prompt", "a"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, env=environment, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(rb"--- 0: \u4f60")


def test_scores_that_are_not_finite_are_null_and_end_no_run():
    """Of a prompt whose last logits are finite and some earlier ones are not."""
    scores = (None, Token(3, -math.inf, ((1, -0.5), (2, -math.inf))), Token(4, math.nan), Token(5, -1.5))
    output = CompletionOutput(0, 0, (1, 3, 4, 5), token_ids=(7,), logprobs=(-0.5,), prompt_logprobs=scores)
    line = batch_file.Line(1, None, [1, 3, 4, 5], SamplingParams())
    stream = io.StringIO()
    batch_file.Results(stream, [line]).put(output)
    assert [token and token["logprob"] for token in json.loads(stream.getvalue())["prompt_logprobs"]] == [
        None,
        None,
        None,
        -1.5,
    ]
    assert json.loads(stream.getvalue())["prompt_logprobs"][1]["top"] == [[1, -0.5], [2, None]]
    assert json.loads(stream.getvalue())["logprobs"] == [-0.5]


def test_what_had_ended_survives_and_the_rest_is_told(capsys, monkeypatch, directory, batch, tmp_path):
    from paged.engine import DeviceRunner

    collect, calls = DeviceRunner.collect, []

    def stopping(self, ticket):
        calls.append(ticket)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return collect(self, ticket)

    monkeypatch.setattr(DeviceRunner, "collect", stopping)
    source, out = batch({"prompt": "a", "max_tokens": 2}, {"prompt": "b"}, {"prompt": "c"}), tmp_path / "out.jsonl"
    assert generate("--model", directory, "--input", source, "--output", out) == 143
    (result,) = map(json.loads, out.read_text().splitlines())
    assert (result["line"], len(result["token_ids"])) == (1, 2)
    assert capsys.readouterr().err == (
        "paged generate: terminated: 1 of 3 completions are done (prompt 0: 2 tokens), 2 are not: 1 had begun, 3 "
        f"tokens in all (prompt 1: 3 tokens), and 1 had no token yet (prompt 2); 1 completions are in {out}; prompt i "
        f"is line i + 1 of {source}\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full is needed")
def test_a_full_disk_is_one_line_and_says_what_was_written(capsys, directory, batch):
    source = batch({"prompt": "a", "max_tokens": 1}, {"prompt": "b"})
    assert generate("--model", directory, "--input", source, "--output", "/dev/full") == 2
    assert capsys.readouterr().err == (
        "paged generate: cannot write the result of line 1: No space left on device. 0 results were written; 1 of 2 "
        "completions are done (prompt 0: 1 tokens), 1 are not: 1 had begun, 1 tokens in all (prompt 1: 1 tokens), and "
        f"0 had no token yet (none); prompt i is line i + 1 of {source}\n"
    )
