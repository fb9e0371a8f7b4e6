"""The supervisor against workers that do anything but answer: small scripts in the worker's place, no jax in them."""

import io
import sys
import time
from pathlib import Path

import pytest

from conformance import supervisor
from conformance.case import Case
from conformance.journal import Journal
from conformance.progress import Progress
from conformance.supervisor import Job, Worker, WorkerStartError, supervise

PRELUDE = """
import json, os, sys, time
jobs = os.fdopen(os.dup(0))
reply = json.loads(jobs.readline())["reply"]
def say(**message):
    os.write(reply, json.dumps(message).encode() + b"\\n")
def answer(key, status="pass", **more):
    say(kind="result", key=key, result={"id": key, "status": status, "elements": 1, **more})
def once(what):
    if not os.path.exists(FLAG):
        open(FLAG, "w").close()
        what()
def run(at_two, between=lambda: None, last=lambda: say(kind="done")):
    say(kind="hello", introduction={"claims": {}})
    for job in json.loads(jobs.readline()):
        key = job["key"]
        say(kind="start", key=key)
        if key == "two":
            at_two()
        answer(key)
        if key == "one":
            between()
    last()
"""


@pytest.fixture
def result_of(monkeypatch, tmp_path):
    """Results of the jobs one, two and three, at the hands of a worker that is this script."""
    monkeypatch.setattr(supervisor, "ENDING_SECONDS", 0.3)

    def call(script, deadline=20.0, name="journal"):
        text = f"FLAG = {str(tmp_path / 'flag')!r}\n{PRELUDE}\n{script}"
        monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, "-c", text))
        case = Case(id="x", tier=3, level="core", generator="generic", params={}, clause=("attend.1",))
        jobs = [Job(key, case) for key in ("one", "two", "three")]
        call.said = io.StringIO()
        with Journal(tmp_path / name, "key") as journal:
            progress = Progress(3, call.said)
            call.begin = time.monotonic()
            found = supervise(Worker({}), {}, jobs, deadline=deadline, journal=journal, progress=progress)
        return {key: (r.status, r.diagnosis) for key, r in found.items()}

    return call


def only_two(found, status, *said):
    """Job two has that status and says so; the others pass."""
    assert {k: v[0] for k, v in found.items()} == {"one": "pass", "two": status, "three": "pass"}
    for text in said:
        assert text in found["two"][1]


def test_an_honest_worker_passes(result_of):
    only_two(result_of("run(lambda: None)"), "pass")


@pytest.mark.parametrize(
    ("at_two", "said"),
    [
        ("os._exit(0)", "the process died while it ran: exit status 0"),
        ("os.close(reply), time.sleep(60)", "it closed its channel and went on, so it was killed"),
        ("os.fork() and os._exit(3) or time.sleep(60)", "exit status 3"),  # its child keeps all pipes open
        (
            "os.write(reply, b'\\x1b[2J all is well\\n')",
            "the process sent what is no message: '\\\\x1b[2J all is well'",
        ),
        ("os.write(reply, b'[1]\\n')", "the process sent what is no message: '[1]'"),
        ("answer('three')", "the process answered out of turn (result of 'three')"),
        ("answer('four')", "the process answered out of turn (result of 'four')"),
        ("say(kind='start', key='two')", "the process answered out of turn (start of 'two')"),
        ("answer('two', 'conformant')", "the process sent no result"),
        ("say(kind='result', key='two')", "the process sent no result"),
        ("os.write(2, b'\\x1b[31mlast words'), os.abort()", "SIGABRT; it printed last: \\x1b[31mlast words"),
    ],
)
def test_one_job_pays_for_what_its_process_does(result_of, at_two, said):
    only_two(result_of(f"run(lambda: ({at_two}))"), "error", said)


def test_a_second_answer_makes_the_first_worthless(result_of):
    found = result_of("run(lambda: answer('two'))")
    only_two(found, "error", "the process answered out of turn (result of 'two')")
    assert "ERROR two" in result_of.said.getvalue()


def test_a_flood_on_stdout_fills_nothing_and_ends_at_the_deadline(result_of):
    script = "def flood():\n    while True: os.write(1, b'y' * 65536)\nrun(flood)"
    only_two(result_of(script, deadline=1.0), "error", "no result within 1 s")


def test_a_process_that_dies_between_two_jobs_is_started_again(result_of):
    only_two(result_of("run(lambda: None, between=lambda: once(lambda: os._exit(7)))"), "pass")
    assert "died during two (exit status 7); trying it once more" in result_of.said.getvalue()


def test_death_after_the_last_result_is_no_matter(result_of):
    only_two(result_of("run(lambda: None, last=os.abort)"), "pass")
    assert "died" not in result_of.said.getvalue()


def test_jobs_that_nobody_reads_do_not_block_the_supervisor(result_of, monkeypatch):
    monkeypatch.setattr(Job, "to_json", lambda self: {"key": self.key, "much": "x" * 300_000})
    found = result_of("say(kind='hello', introduction={})\ntime.sleep(60)", deadline=0.5)
    assert {v[0] for v in found.values()} == {"error"}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("say(kind='refused', message='not\\x1b built', verdict='not certifiable')", "no more: not\\x1b built"),
        ("say(kind='hello', introduction={'claims': {'head_dims': [8]}})", "is another one: its claims changed"),
    ],
)
def test_a_backend_that_is_another_one_when_made_again_ends_the_run_and_keeps_results(result_of, second, said):
    script = f"again = os.path.exists(FLAG)\nif again: {second}\nelse: run(lambda: once(os.abort))"
    with pytest.raises(WorkerStartError, match="run again to go on") as error:
        result_of(script)
    assert said in str(error.value)
    only_two(result_of("run(lambda: None)"), "pass")


def test_children_do_not_outlive_the_worker(result_of, tmp_path):
    pid = tmp_path / "pid"
    child = f"open({str(pid)!r}, 'w').write(str(os.getpid())), time.sleep(60)"
    only_two(result_of(f"run(lambda: os.fork() or ({child}))"), "pass")
    deadline = time.monotonic() + 10
    while _state(pid.read_text()) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
