"""What a native certificate says of the vendor's stack, from trees and files made for the test."""

import json
import shutil
import subprocess

import pytest

from conformance.executors.cpu_handlers import DEFAULT_DIRECTORY, build
from conformance.executors.native import make_executor
from conformance.kits import run
from conformance.kits.aiter import process, stack
from conformance.runner import Session
from paged.backends.aiter import AiterBackend, machine, probe, targets
from paged.backends.aiter.contract import TARGETS


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A source tree of jax-aiter as a build leaves it, and a machine with one GPU."""
    monkeypatch.setattr(targets, "_provided", {})
    root = tmp_path / "tree"
    built = root / "build" / "jax_aiter_build"
    built.mkdir(parents=True)
    (built / "append_kv_ja.so").write_bytes(b"a library")
    name = "pa_ragged_" + 32 * "a"
    (built / "pa_dispatch_generated.h").write_text(f'#define LIST X("{name}", {name})\n')
    (root / "Makefile.kv").write_text("BP_FILTER := *_nlogits*_nsink*\nBP_DEFINES := -DA=1 -DB=2\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(root), *identity, *command], check=True)
    (root / "Makefile.kv").write_text((root / "Makefile.kv").read_text() + "# changed\n")
    monkeypatch.setenv(probe.ROOT_VARIABLE, str(root))
    monkeypatch.setenv("HSA_ENABLE_SDMA", "0")
    node = tmp_path / "nodes" / "1"
    node.mkdir(parents=True)
    (node / "properties").write_text("gfx_target_version 90500\nsimd_count 1024\ncu_count 256\nname 3\n")
    found = (machine.architectures(tmp_path / "nodes"), machine.nodes(tmp_path / "nodes"))
    monkeypatch.setattr(machine, "architectures", lambda: found[0])
    monkeypatch.setattr(machine, "nodes", lambda: found[1])
    monkeypatch.setattr(machine, "rocm_version", lambda: "7.2.1")
    return root


def test_the_stack_is_described_whole(tree):
    said = make_executor().describe()
    json.dumps(said)
    assert said["architectures"] == ["gfx950"]
    assert said["rocm"] == "7.2.1"
    assert said["known_failures"] == ["causal-prefill-rocm7.2-gfx950"]
    assert said["nodes"] == [{"simd_count": "1024", "cu_count": "256", "gfx_target_version": "90500"}]
    assert said["variables"]["HSA_ENABLE_SDMA"] == "0"
    assert said["packages"].keys() >= {"jax", "jaxlib"}
    assert said["runtimes"] == {}
    assert said["route"] == "paged-kv"


def test_where_the_libraries_come_from(tree):
    found = stack.origin(tree)
    assert len(found["commit"]) == 40
    assert found["dirty"] is True
    assert found["filter"] == "*_nlogits*_nsink*"
    assert found["defines"] == "-DA=1 -DB=2"
    assert found["kernels"] == ["pa_ragged_" + 32 * "a"]
    assert stack.origin(None) == {"root": None}
    assert probe._library("AppendKvJA", tree) == tree / "build" / "jax_aiter_build" / "append_kv_ja.so"
    assert probe._library("PagedPrefillJA", tree) is None


def test_files_that_cannot_be_read_are_said_to_be(tmp_path):
    assert stack.digest_of(tmp_path / "none") == "unreadable: No such file or directory"
    assert stack.mapped("x", tmp_path / "none") == {}
    assert stack._git(tmp_path, "rev-parse", "HEAD") is None
    assert isinstance(stack.partitions(), dict)


def native(backend, check):
    return run.Context(check, Session(backend), make_executor())


def test_installed_libraries_are_asked_what_they_decode(tree, monkeypatch):
    """The four files of a build, here copies of the handlers that serve on CPU."""
    built = build([DEFAULT_DIRECTORY / "broken.cc"], DEFAULT_DIRECTORY)
    monkeypatch.setattr(probe, "_registry", lambda: (None, ""))
    backend = AiterBackend(lower_only=True)
    lacking = run.run("aiter", native(backend, "kit/abi/decoded"))
    assert "no library of AppendKvJA, PagedAttentionJA, PagedPrefillJA was found" in lacking.diagnosis
    for target in TARGETS.values():
        shutil.copy(built, tree / "build" / "jax_aiter_build" / target.library)
    found = {name: probe._library(name, tree) for name in TARGETS}
    reports = {name: probe.TargetReport(name, False, library=path) for name, path in found.items()}
    monkeypatch.setattr(process, "probe", lambda: probe.Report("rocm", reports))
    decoded = run.run("aiter", native(backend, "kit/abi/decoded"))
    assert decoded.status == "pass", decoded.diagnosis
    assert decoded.details["contracts"] == {name: t.contract_id for name, t in TARGETS.items()}


def test_a_native_run_off_the_device_fails_by_name(tree):
    backend = AiterBackend(lower_only=True)
    said = {i: run.run("aiter", native(backend, f"kit/{i}")) for i in ("audit/device", "audit/targets", "alias-probe")}
    assert {result.status for result in said.values()} == {"fail"}
    assert said["audit/device"].diagnosis == "the cases run on cpu; start jax with the ROCm plugin."
    assert "not registered for rocm. Build:" in said["audit/targets"].diagnosis
    assert "kv_alias_probe_ja.so is not built. Build:" in said["alias-probe"].diagnosis
    runtime = run.run("aiter", native(backend, "kit/audit/runtime"))
    assert runtime.diagnosis.startswith("0 HIP runtimes are mapped, 1 expected: none")
