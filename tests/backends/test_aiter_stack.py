"""What a native certificate says of the vendor's stack, from trees and files made for the test."""

import json
import subprocess

import pytest

from conformance.executors.native import make_executor
from conformance.kits.aiter import stack
from paged.backends.aiter import machine, probe, targets


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
