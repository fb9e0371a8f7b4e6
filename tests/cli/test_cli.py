"""The command line itself: lazy subcommands, help without jax, errors as one line."""

import subprocess
import sys

import pytest

from paged import cli
from paged.common.errors import InvalidInputError


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_help_of_every_command_imports_neither_jax_nor_conformance():
    code = (
        "import sys; sys.modules['jax'] = None; sys.modules['conformance'] = None\n"
        "from paged.cli import COMMANDS, main\n"
        "for argv in [['--help'], *([name, '--help'] for name in COMMANDS)]:\n"
        "    try: main(argv)\n"
        "    except SystemExit as e: assert e.code == 0, argv\n"
        "print('jax' if sys.modules['jax'] else 'clean')"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("clean")


def test_no_command_and_unknown_command_are_usage_errors(capsys):
    for argv in ([], ["nothing"]):
        with pytest.raises(SystemExit) as info:
            cli.main(argv)
        assert info.value.code == 2
    assert "certify" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_status_2(monkeypatch, capsys):
    from paged.cli import certify

    def refuse(args):
        raise InvalidInputError("the reason and the next step")

    monkeypatch.setattr(certify, "run", refuse)
    assert cli.main(["certify", "reference"]) == 2
    assert capsys.readouterr().err == "paged certify: the reason and the next step\n"


def test_interruption_is_status_130(monkeypatch):
    from paged.cli import certify

    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(certify, "run", interrupt)
    assert cli.main(["certify", "reference"]) == 130
