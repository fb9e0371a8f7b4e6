"""The pytest plugin, alone and under xdist: inert, exactly one result a case, a certificate by the controller."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TEST = "conformance/test_backend.py::test_case"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    # Installed, the plugin is an entry point; in a source tree it is named.
    (folder / "pytest.ini").write_text("[pytest]\n")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "vendor"), str(HERE), str(ROOT)]),
        "JAX_PLATFORMS": "cpu",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "xla"))

    def call(*arguments, backend="acme", tiny=True):
        where = ["--conformance-catalogue", str(HERE / "tiny")] if tiny else []
        given = [] if backend is None else ["--backend", backend, *where]
        pytest_command = ["pytest", "-q", "-p", "conformance.plugin", "-c", str(folder / "pytest.ini")]
        command = [sys.executable, "-W", "error", "-m", *pytest_command, "--pyargs", "conformance", *given, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, cwd=folder)

    call.folder = folder  # type: ignore[attr-defined]
    return call


def entries(path):
    return {e["id"]: e for e in json.loads(path.read_text())["body"]["cases"]}


def test_without_a_backend_nothing_is_collected_and_no_jax_imported(run):
    arguments = ["-q", "-p", "conformance.plugin", "-c", str(run.folder / "pytest.ini"), "--pyargs", "conformance"]
    probe = f"import sys, pytest; code = pytest.main({arguments}); print(int(code), 'jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True, text=True, timeout=60, cwd=run.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.stdout.strip().endswith("5 False"), done.stdout + done.stderr


def test_alone_it_writes_the_certificate_of_the_command(run):
    path = run.folder / "alone.json"
    done = run("--certificate", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acme: no failure in 5 of 5 cases of level all" in done.stdout
    assert "5 passed" in done.stdout
    body = json.loads(path.read_text())["body"]
    assert {e["status"] for e in body["cases"]} == {"pass"}
    assert body["environment"]["devices"] == 8
    assert body["complete"] is False


def test_under_xdist_a_worker_that_dies_gives_exactly_one_error(run):
    path = run.folder / "dies.json"
    done = run("-p", "xdist", "-n", "2", "--certificate", str(path), "--conformance-option", "vice=dies",
               "--conformance-only", "attend/[gp]*")  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    found = entries(path)
    assert {i: e["status"] for i, e in found.items()} == {"attend/generic": "error", "attend/pair": "pass"}
    assert "crashed" in found["attend/generic"]["diagnosis"]


def test_under_xdist_a_hang_ends_at_the_deadline(run):
    path = run.folder / "hangs.json"
    done = run("-p", "xdist", "-n", "1", "--certificate", str(path), "--conformance-option", "vice=hangs",
               "--conformance-deadline", "10", "--conformance-only", "attend/[gp]*")  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert {i: e["status"] for i, e in entries(path).items()} == {"attend/generic": "error", "attend/pair": "pass"}


def test_no_certificate_unless_every_case_has_one_result(run):
    path = run.folder / "short.json"
    done = run("--certificate", str(path), "--deselect", f"{TEST}[attend/pair]", "-k", "not pair")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no certificate was written: case 'attend/pair' has no result" in done.stdout
    assert not path.exists()


def test_failures_carry_their_diagnosis_and_what_is_not_claimed_is_skipped_with_a_reason(run):
    done = run("--conformance-option", "vice=scales-twice", "-rs", "--conformance-only", "attend/*")
    assert done.returncode == 1
    assert "fail: " in done.stdout
    little = run("--conformance-option", "vice=claims-little", "-rs", "--conformance-only", "attend/*")
    assert little.returncode == 0
    assert "not claimed: needs head_dim:32" in little.stdout


@pytest.mark.parametrize("more", [(), ("-p", "xdist", "-n", "2")])
def test_kernels_that_do_not_compile_end_the_session_with_one_message(run, more):
    path = run.folder / "unbuilt.json"
    done = run(*more, "--conformance-option", "vice=build-fails", "--certificate", str(path))
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("acme: the kernels do not compile with acme-cc") == 1, done.stdout
    assert not path.exists()
