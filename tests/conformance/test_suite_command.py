"""`paged certify` as a user runs it: exit status, what is written, crashes, hangs, resuming. Each run is a process."""

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from conformance import certificate
from conformance.canonical import digest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certify")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE / "vendor"), str(HERE), os.environ.get("PYTHONPATH", "")]),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "ACME_FLAG": str(folder / "flag"),
        "JAX_PLATFORMS": "cpu",
    }
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "xla"))

    def certify(*arguments, tiny=True):
        where = ["--catalogue", str(HERE / "tiny")] if tiny else []
        command = [sys.executable, "-W", "error", "-m", "paged.cli", "certify", *map(str, arguments), *where]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=folder)

    certify.folder, certify.env = folder, env  # type: ignore[attr-defined]
    certify.command = [sys.executable, "-W", "error", "-m", "paged.cli", "certify"]  # type: ignore[attr-defined]
    return certify


def vice(name):
    return ("acme", "--option", f"vice={name}")


def statuses(path):
    return {e["id"]: e["status"] for e in json.loads(path.read_text())["body"]["cases"]}


@pytest.fixture(scope="module")
def good(run):
    out = run.folder / "good.json"
    done = run("acme", "-o", out, "--html", run.folder / "good.html", "--junit", run.folder / "good.xml")
    assert done.returncode == 0, done.stderr
    return done, out


def test_conformant_is_0_and_everything_is_written(run, good):
    done, out = good
    assert (
        "acme: no failure in 5 of 5 cases of level all (5 pass); not touched: levels: sharded, serving; " in done.stdout
    )
    assert "it certifies nothing: a part was run" in done.stdout
    assert "conformant" not in done.stdout + (run.folder / "good.html").read_text().partition("</style>")[2]
    body = json.loads(out.read_text())["body"]
    assert body["backend"]["distribution"] == "acme-paged 0.4.1"
    assert body["environment"]["devices"] == 8
    assert {entry["device"] for entry in body["cases"]} == {"cpu"}
    assert ET.fromstring((run.folder / "good.xml").read_text()).find("testsuite").get("tests") == "5"
    assert "acme-paged 0.4.1" in (run.folder / "good.html").read_text()


def test_the_same_run_again_has_the_same_digest(run, good):
    _, out = good
    again = run("acme", "-o", run.folder / "again.json", "--baseline", out)
    assert again.returncode == 0, again.stderr
    assert "no difference" in again.stdout
    assert json.loads((run.folder / "again.json").read_text())["digest"] == json.loads(out.read_text())["digest"]
    same = run("--diff", out, run.folder / "again.json", tiny=False)
    assert same.returncode == 0
    assert f"- {out}: acme, acme-paged 0.4.1; on cpu (cpu, 8 devices); jax " in same.stdout


def test_failed_is_1_with_small_reproducers_and_a_baseline_that_notices(run, good):
    out, repro = run.folder / "bad.json", run.folder / "repro"
    only = ("--only", "attend/[gp]*")
    done = run(*vice("scales-twice"), "-o", out, "--repro", repro, "--baseline", good[1], *only)
    assert done.returncode == 1, done.stderr
    assert statuses(out) == {"attend/generic": "fail", "attend/pair": "pass"}
    assert "attend/generic: pass -> fail" in done.stdout
    file = repro / "attend--generic.json"
    small = json.loads(file.read_text())["params"]
    assert len(small["query_lens"]) == 3  # where the vice shows
    assert small["kv_heads"] == 1
    case = run(*vice("scales-twice"), "--case", file)
    assert case.returncode == 1
    assert json.loads(case.stdout)["clause"] == "attend.2"
    assert run("acme", "--case", file).returncode == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "RuntimeError: no kernel for <three> rows"),
        ("wrong-dtype", "attend returned float32"),
        ("wrong-shape", "attend returned bfloat16(5, 4, 32), expected bfloat16(6, 4, 32)"),
        ("no-device", "no device: 'acme-no-device' runs on rocm; here is cpu"),
    ],
)
def test_error_is_2_and_says_what_was_raised(run, name, said):
    out = run.folder / f"{name}.json"
    done = run(*vice(name), "-o", out, "--only", "attend/*")
    assert done.returncode == 2, done.stderr
    entries = {e["id"]: e for e in json.loads(out.read_text())["body"]["cases"]}
    assert said in entries["attend/generic"]["diagnosis"]


def test_a_hang_costs_one_case_and_a_crash_another(run):
    out = run.folder / "hangs.json"
    done = run(*vice("hangs"), "-o", out, "--deadline", "10", "--only", "attend/[gp]*")
    assert done.returncode == 2, done.stderr
    assert statuses(out) == {"attend/generic": "error", "attend/pair": "pass"}
    assert "no result within 10 s" in done.stderr
    done = run(*vice("dies"), "-o", out, "--only", "attend/[gp]*")
    assert done.returncode == 2, done.stderr
    assert statuses(out) == {"attend/generic": "error", "attend/pair": "pass"}
    assert "killed by SIGABRT" in done.stderr
    assert "about to die" in json.loads(out.read_text())["body"]["cases"][0]["diagnosis"]


def test_a_process_that_dies_once_is_given_another_try(run):
    out = run.folder / "once.json"
    done = run(*vice("dies-once"), "-o", out, "--only", "attend/*")
    assert done.returncode == 0, done.stderr
    assert "trying it once more" in done.stderr


def test_not_certifiable_is_3_and_an_unknown_name_2(run):
    unbuilt = run("acme-unbuilt")
    assert unbuilt.returncode == 3
    assert "the kernels are not built. Run acme-build." in unbuilt.stderr
    unknown = run("nobody")
    assert unknown.returncode == 2
    assert "known: acme, acme-unbuilt" in unknown.stderr
    little = run(*vice("claims-little"), "--only", "attend/*")
    assert little.returncode == 2  # a part of a level is never 3
    device = run("acme", "--device", "tpu:0")
    assert device.returncode == 2
    assert "no device 'tpu:0'" in device.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a backend"),
        (["acme", "--check", "x.json"], "takes no backend"),
        (["--check", "x.json", "--diff", "a", "b"], "different things"),
        (["acme", "--list"], "--list takes no backend"),
        (["acme", "--json"], "--json is the form of --list"),
        (["acme", "--option", "vice"], "NAME=VALUE"),
        (["acme", "--only", "zzz"], "no case"),
        (["acme", "-o", "/nowhere/cert.json"], "folder does not exist"),
        (["acme", "--case", "missing.json"], "missing.json"),
        (["--check", "missing.json"], "missing.json"),
    ],
)
def test_wrong_use_is_2_and_one_line(run, arguments, said):
    done = run(*arguments, tiny=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_check_and_replay_tell_a_sound_certificate_from_an_edited_one(run):
    out = run.folder / "shipped.json"
    done = run("acme", "-o", out, "--only", "scrub/bf16*", tiny=False)
    assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    data["body"]["suite"]["tree"] = "clean"
    data["body"]["digests"]["suite"] = digest(data["body"]["suite"])
    sound = certificate.seal(data["body"], {})
    out.write_text(json.dumps(sound))
    checked = run("--check", out, tiny=False)
    assert checked.returncode == 3, checked.stdout
    assert "it certifies nothing: a part of the level was run" in checked.stdout
    assert "sound; acme: no failure in 2 of" in checked.stdout
    replayed = run("--replay", "2", out, tiny=False)
    assert (replayed.returncode, replayed.stdout) == (0, "replayed 2 cases, 0 differ\n"), replayed.stderr
    moved = json.loads(json.dumps(sound))
    moved["body"]["environment"]["xla_flags"] = "--none"
    out.write_text(json.dumps(moved))
    elsewhere = run("--replay", "1", out, tiny=False)
    assert elsewhere.returncode == 3, elsewhere.stderr
    assert "environment.xla_flags: it says '--none', here it is ''" in elsewhere.stdout
    moved["body"]["claims"]["max_page_id"] = 5
    out.write_text(json.dumps(moved))
    assert run("--replay", "1", out, tiny=False).returncode == 1
    entry = sound["body"]["cases"][0]
    entry["output"] = "sha256:" + "0" * 64
    out.write_text(json.dumps(sound))
    edited = run("--check", out, tiny=False)
    assert edited.returncode == 1
    assert f"case {entry['id']!r} was edited" in edited.stdout
    assert run("--replay", "9", out, tiny=False).returncode == 1


def test_waivers_turn_a_known_failure_into_waived_and_must_not_outlive_it(run, good):
    file = run.folder / "waivers.toml"
    waiver = '[[waiver]]\ncase = "attend/gen*"\nreason = "known"\nissue = "https://example.org/1"\nuntil = "99"\n'
    file.write_text(waiver)
    out = run.folder / "waived.json"
    done = run(*vice("scales-twice"), "-o", out, "--waivers", file, "--only", "attend/[gp]*")
    assert done.returncode == 0, done.stdout + done.stderr
    assert statuses(out) == {"attend/generic": "waived", "attend/pair": "pass"}
    passing = run("acme", "--waivers", file, "--only", "attend/[gp]*")
    assert passing.returncode == 1
    assert "waiver 'attend/gen*' is passing" in passing.stdout


def test_a_run_that_was_killed_is_resumed(run):
    command = [
        *run.command,
        *vice("naps"),
        "--catalogue",
        str(HERE / "tiny"),
        "--only",
        "[am]*/[ap]*",
        "--deadline",
        "60",
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=run.env, cwd=run.folder
    )
    journals = run.folder / "cache" / "paged" / "journals"
    try:
        until(lambda: any('"result"' in p.read_text() and "acme" in p.name for p in journals.glob("acme-*.jsonl")))
    finally:
        process.kill()
        process.wait()
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, env=run.env, cwd=run.folder)
    assert again.returncode == 0, again.stderr
    assert "resuming: " in again.stderr


def until(ready):
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)


def test_what_a_backend_compiles_is_compiled_before_any_deadline_and_named(run, monkeypatch):
    for letter in "ab":
        monkeypatch.setitem(run.env, "ACME_LIBRARY", letter * 64)
        out = run.folder / f"library-{letter}.json"
        baseline = () if letter == "a" else ("--baseline", run.folder / "library-a.json")
        done = run(*vice("library"), "-o", out, "--only", "scrub/*", "--deadline", "3", *baseline, tiny=False)
        assert done.returncode == 0, done.stderr  # of 3 seconds a case has, 4 were for the library
        build = json.loads(out.read_text())["body"]["backend"]["build"]
        assert build == {"library": f"sha256:{letter * 64}", "compiler": "acme-cc 1", "machine": ["a", "b"]}
    said = f"another build: backend.build.library: was 'sha256:{'a' * 64}', is 'sha256:{'b' * 64}'\nno difference\n"
    assert done.stdout.endswith(said)
    differs = run("--diff", run.folder / "library-a.json", out, tiny=False)
    assert differs.returncode == 0
    assert differs.stdout.endswith(said)
    assert "; library sha256:bbbbbbbbbbbb by acme-cc 1; " in differs.stdout
    replayed = run(*vice("library"), "--replay", "1", run.folder / "library-a.json", tiny=False)
    assert replayed.returncode == 3, replayed.stderr
    assert f"backend.build.library: it says 'sha256:{'a' * 64}', here it is 'sha256:bbb" in replayed.stdout
    assert run(*vice("library"), "--replay", "1", out, tiny=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("build-fails", "acme: error: the kernels do not compile with acme-cc: <expected ';'>\n"),
        ("says-nonsense", "must return a mapping that JSON can hold, or None: it is a object.\n"),
    ],
)
def test_a_backend_that_cannot_be_prepared_is_2_and_one_message(run, name, said):
    done = run(*vice(name), "-o", run.folder / "unprepared.json")
    assert done.returncode == 2
    assert done.stderr.endswith(said)
    assert done.stderr.count("\n") == 1
    assert not (run.folder / "unprepared.json").exists()
