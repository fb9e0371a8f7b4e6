"""SIGINT and SIGTERM from outside: every command says what was done and what was left, and no child outlives it."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paged import cli
from paged.backends.compilers import Compilers
from paged.cli import stopping

KINDS = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]


def start(*arguments, before="", **options):
    """The command in a process that does not ignore SIGINT, as one that a shell put into the background would."""
    code = f"import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n{before}\n"
    code += "from paged.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def children(pid):
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        found = [int(c) for at in Path(f"/proc/{pid}/task").iterdir() for c in (at / "children").read_text().split()]
    return [*found, *(grandchild for child in found for grandchild in children(child))]


def gone(pid):
    """Whether a process has ended; one that nobody has waited for yet has, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(("number", "code", "word"), KINDS)
def test_a_simulation_says_how_far_it_was(number, code, word):
    process = start("simulate", "--requests", "1000000", "--num-pages", "8000", "--rate", "60")
    assert process.stderr is not None
    assert process.stderr.readline() == "arrived: 1000/1000000\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    last = err.splitlines()[-1]
    assert last.startswith(f"paged simulate: {word}: ")
    assert " requests were finished, " in last
    assert last.endswith("steps; there is no report of a part")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
def test_a_certification_keeps_its_results_and_leaves_no_worker(tmp_path):
    import os

    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    process = start("certify", "xla", "--level", "move", "-o", str(tmp_path / "c.json"), env=env)
    deadline = time.monotonic() + 120
    journals = tmp_path / "paged" / "journals"
    while not (journals.exists() and any(path.read_text().count("\n") > 2 for path in journals.iterdir())):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    workers = children(process.pid)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143
    assert workers
    assert all(gone(pid) for pid in workers)
    last = err.splitlines()[-1]
    assert last.startswith("paged certify: terminated: ")
    (journal,) = journals.iterdir()
    assert f"results are kept in {journal}, " in last
    assert last.endswith("are left; the same command goes on from there; nothing else was written")
    assert not (tmp_path / "c.json").exists()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
@pytest.mark.parametrize(("number", "code", "word"), KINDS)
def test_a_build_for_the_cpu_ends_its_compiler_and_keeps_nothing(tmp_path, number, code, word):
    import os

    script, started, kept = tmp_path / "cxx", tmp_path / "started", tmp_path / "kept"
    text = f'*-o\\ *) mktemp; touch {started}; sleep 60;; *--version*) echo "g++ 1.0";;'
    script.write_text(f'#!/bin/sh\ncase "$*" in {text} esac\n')
    script.chmod(0o755)
    (tmp_path / "handlers.cc").touch()
    before = (
        f"import pathlib; from paged.backends.cpu import library; library.SOURCES = pathlib.Path({str(tmp_path)!r})"
    )
    env = {**os.environ, "CXX": str(script), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    process = start("build", "cpu", "--output", str(kept), before=before, env=env)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("compiling the CPU kernels with g++ 1.0 into ")
    deadline = time.monotonic() + 30
    while not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running = children(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    assert err == f"paged build: {word}: the CPU kernels were being compiled; nothing of it is kept\n"
    assert running
    while not all(gone(pid) for pid in running):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [path.name for path in kept.glob("*/*/*")] == ["lock"]
    assert not list((tmp_path / "tmp").iterdir()), "the compiler's own files"


@pytest.mark.parametrize(("number", "code", "word"), KINDS)
@pytest.mark.parametrize("command", ["build", "bench"])
def test_any_command_tells_by_its_status_and_with_what_it_noted(monkeypatch, capsys, command, number, code, word):
    import importlib

    def stopped(args):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            error.add_note("2 of 3 are kept.")
            raise

    monkeypatch.setattr(importlib.import_module(f"paged.cli.{command}"), "run", stopped)
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGTERM)
    try:
        assert cli.main([command, *(["flashinfer"] if command == "build" else [])]) == code
    finally:
        signal.signal(signal.SIGINT, before[0])
    assert signal.getsignal(signal.SIGTERM) is before[1]
    assert capsys.readouterr().err == f"paged {command}: {word}: 2 of 3 are kept\n"


def test_a_sigterm_that_is_ignored_stays_ignored_and_other_threads_are_left_alone():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stopping.terminable():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    seen = []

    def other():
        with stopping.terminable():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_compilers_end_with_their_own_children_and_none_is_started_after():
    compilers, done = Compilers(), []
    thread = threading.Thread(target=lambda: done.append(compilers.run(["sh", "-c", "sleep 60; true"])))
    thread.start()
    while not compilers._running:
        time.sleep(0.01)
    (process,) = compilers._running
    while Path("/proc/self/task").exists() and not children(process.pid):
        time.sleep(0.01)
    sleeping = children(process.pid) if Path("/proc/self/task").exists() else []
    compilers.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert done[0].returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while not all(gone(pid) for pid in sleeping):
        assert time.monotonic() < deadline
    assert compilers.run(["true"]).returncode < 0
    assert Compilers().run(["sh", "-c", "echo out; echo err >&2; exit 3"]).stdout == "out\n"
