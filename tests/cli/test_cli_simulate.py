"""`paged simulate`: a whole run without jax, a trace that is saved and read again, and refusals in one line."""

import json
import os
import subprocess
import sys

import pytest

from paged import cli
from paged.control import trace as trace_module


def run(capsys, *arguments):
    status = cli.main(["simulate", "--quiet", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


MADE_UP = ["--requests", "40", "--rate", "50", "--mean-prompt", "30", "--mean-output", "6", "--step-tokens", "64"]


def test_a_run_needs_no_jax():
    code = (
        "import sys; sys.modules['jax'] = None\nfrom paged.cli import main\n"
        f"sys.exit(main(['simulate', '--num-pages', '60', *{MADE_UP!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "40 finished, 0 refused" in done.stdout
    assert "0 leaked" in done.stdout


def test_a_saved_trace_gives_the_same_run(capsys, tmp_path):
    trace, cost = tmp_path / "trace.jsonl", tmp_path / "cost.json"
    cost.write_text('{"coefficients": {"step_s": 0.01, "prefill_token_s": 0.001}}')
    options = ["--num-pages", "60", "--depth", "2", "--json", "--cost", str(cost), "--schedule", "prefill_first"]
    reports = []
    for source in ([*MADE_UP, "--save-trace", str(trace)], ["--trace", str(trace), "--step-tokens", "64"]):
        status, out, err = run(capsys, *source, *options)
        assert (status, err) == (0, "")
        reports.append(json.loads(out))
        del reports[-1]["host_s"]
    assert reports[0] == reports[1]
    assert reports[0]["cost"]["step_s"] == 0.01
    assert reports[0]["finished"] == 40
    assert trace.read_text().count("\n") == 40


def test_prefixes_are_shared_when_asked(capsys):
    options = [*MADE_UP, "--num-pages", "80", "--shared-prefix", "48", "--prefixes", "2"]
    shares = []
    for more in ([], ["--prefix-cache"]):
        status, out, _ = run(capsys, *options, *more, "--json")
        assert status == 0
        shares.append(json.loads(out)["prefix_tokens"])
    assert shares[0] is None
    assert shares[1] == 1824


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nowhere.jsonl"], "cannot read nowhere.jsonl: No such file"),
        (["--requests", "1", "--cost", "nowhere.json"], "cannot read nowhere.json: No such file"),
        (["--requests", "1", "--save-trace", "nowhere/t"], "cannot write nowhere/t: No such file"),
        (["--trace", "t", "--save-trace", "u"], "--save-trace writes a made-up trace"),
    ],
)
def test_refusals_are_one_line_and_status_2(capsys, arguments, message):
    status, out, err = run(capsys, "--num-pages", "9", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"paged simulate: {message}")
    assert err.count("\n") == 1


def test_a_wrong_line_of_a_trace_is_named(capsys, tmp_path):
    for content, message in ((b"\n{}\n", ", line 2 must be an object"), (b"\xff\n", "is not UTF-8 text")):
        path = tmp_path / "t"
        path.write_bytes(content)
        status, _, err = run(capsys, "--num-pages", "9", "--trace", str(path))
        assert status == 2
        assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --trace --requests is required"),
        (["--requests", "0"], "argument --requests: must be at least 1, got 0"),
        (["--requests", "3", "--rate", "nan"], "argument --rate: must be a number above 0, got 'nan'"),
        (["--requests", "3", "--trace", "t"], "not allowed with argument"),
    ],
)
def test_usage_errors_name_the_argument(capsys, arguments, message):
    with pytest.raises(SystemExit) as info:
        cli.main(["simulate", "--num-pages", "9", *arguments])
    assert info.value.code == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_run_says_so_and_leaves_no_part_of_a_trace(capsys, monkeypatch, tmp_path):
    trace, lines = tmp_path / "trace.jsonl", trace_module.trace_lines

    def cut(arrivals):
        yield from list(lines(arrivals))[:3]
        raise KeyboardInterrupt

    trace.write_text("an older one")
    monkeypatch.setattr(trace_module, "trace_lines", cut)
    status, out, err = run(capsys, *MADE_UP, "--num-pages", "60", "--save-trace", str(trace))
    assert (status, out, err) == (130, "", f"paged simulate: interrupted: {trace} was not written\n")
    assert trace.read_text() == "an older one"
    assert list(tmp_path.iterdir()) == [trace]


def arrivals_at_once(path, *lengths):
    """A trace whose requests are all there at the start, so that no clock decides who runs with whom."""
    lines = [{"arrival_s": 0.0, "prompt_tokens": p, "output_tokens": o} for p, o in lengths]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_measured_run_is_printed_beside_its_simulation(capsys, directory, tmp_path):
    trace = arrivals_at_once(tmp_path / "t", (20, 6), (9, 7), (1, 9), (30, 3), (5, 5))
    cost = tmp_path / "cost.json"
    options = ["--trace", trace, "--num-pages", "40", "--tokens-per-page", "8", "--step-tokens", "16"]
    options += ["--max-requests", "3", "--depth", "2", "--measure", directory, "--measure-requests", "4"]
    status, out, err = run(capsys, *options, "--write-cost", str(cost), "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    simulated, measured = report["measured"]["simulated"], report["measured"]["measured"]
    for key in (
        "finished",
        "prompt_tokens",
        "generated_tokens",
        "peak_running",
        "peak_pages",
        "leaked_pages",
        "counters",
    ):
        assert simulated[key] == measured[key]
    assert (measured["finished"], measured["generated_tokens"], measured["leaked_pages"]) == (4, 25, 0)
    assert report["measured"]["fitted_steps"] == measured["counters"]["steps"]
    assert measured["seconds"] > 0
    assert report["finished"] == 5
    assert json.loads(cost.read_text())["coefficients"] == {k: v for k, v in report["cost"].items() if k != "host_s"}
    status, out, _ = run(capsys, *options)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"measured: {directory} in float32 on ")
    assert lines[1].split() == ["simulated", "measured"]
    assert next(line.split() for line in lines if line.startswith("steps")) == ["steps", "12", "12"]
    assert "the whole trace, simulated with that cost:" in lines


def test_a_measured_run_may_share_prefixes(capsys, directory, tmp_path):
    trace = arrivals_at_once(tmp_path / "t", ([7] * 20, 3), ([7] * 20, 4), ([7] * 20, 5))
    options = ["--trace", trace, "--num-pages", "40", "--tokens-per-page", "8", "--step-tokens", "16", "--prefix-cache"]
    status, out, _ = run(capsys, *options, "--max-requests", "1", "--measure", directory, "--json")
    report = json.loads(out)
    assert status == 0
    assert [report["measured"][arm]["prefix_tokens"] for arm in ("simulated", "measured")] == [32, 32]


def test_what_belongs_to_a_measured_run_is_refused_without_one(capsys):
    status, _, err = run(capsys, "--requests", "3", "--num-pages", "9", "--write-cost", "c")
    assert (status, err) == (2, "paged simulate: --write-cost keeps what --measure fits; give --measure MODEL.\n")
    for flag, value in (("--measure-requests", "4"), ("--dtype", "float32"), ("--backend", "xla"), ("--option", "a=1")):
        status, _, err = run(capsys, "--requests", "3", "--num-pages", "9", flag, value)
        said = f"paged simulate: {flag} is of the run that --measure makes; give --measure MODEL.\n"
        assert (status, err) == (2, said)


def test_a_trace_that_cannot_be_measured_is_refused_before_a_model_is_loaded(capsys, tmp_path):
    pipe, empty = tmp_path / "pipe", tmp_path / "empty"
    os.mkfifo(pipe)
    empty.touch()
    for trace, message in ((pipe, f"twice; {pipe} is no regular file"), (empty, f"{empty} has no request to run.")):
        status, out, err = run(capsys, "--trace", str(trace), "--num-pages", "9", "--measure", "never loaded")
        assert (status, out) == (2, "")
        assert message in err
    status, out, err = run(capsys, *MADE_UP, "--num-pages", "9", "--measure", "never loaded", "--depth", "3")
    assert (status, out, err) == (2, "", "paged simulate: --measure runs at depth 1 or 2, got --depth 3.\n")
    cost, nowhere = tmp_path / "no" / "cost", tmp_path / "no"
    status, out, err = run(capsys, *MADE_UP, "--num-pages", "9", "--measure", "never loaded", "--write-cost", str(cost))
    assert (status, out, err) == (2, "", f"paged simulate: cannot write {cost}: {nowhere} is no directory.\n")


def test_too_few_steps_to_fit_a_cost_say_how_many_there_were(capsys, directory, tmp_path):
    trace = arrivals_at_once(tmp_path / "t", (5, 2))
    status, out, err = run(capsys, "--trace", trace, "--num-pages", "9", "--measure", directory)
    assert (status, out) == (2, "")
    assert err.endswith("; the first 1 requests ran 2 steps; --measure-requests takes more of them\n")
