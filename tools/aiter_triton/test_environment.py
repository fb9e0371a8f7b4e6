"""What is installed, what the executor says of itself, and the command that a person runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from aiter_triton import command, emulator, findings, matrix, patches, provenance, targets
from conformance.kits.findings import FINDINGS
from paged.backends.aiter.contract import TARGETS

FOLDER = Path(__file__).parent


def run(*arguments):
    return subprocess.run([sys.executable, str(FOLDER), *arguments], capture_output=True, text=True, timeout=300)


def test_the_environment_is_the_pinned_one_and_the_vendor_sources_are_as_shipped():
    assert [line for line in command.pinned() if line[1] != line[2]] == []
    assert provenance.changed() == []


def test_a_changed_source_of_the_vendor_is_seen(monkeypatch, tmp_path):
    for module in provenance.MODULES:
        copy = tmp_path / f"{module}.py"
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((provenance.vendor_folder() / f"{module}.py").read_bytes())
    (tmp_path / "rope.py").write_text("# another")
    monkeypatch.setattr(provenance, "vendor_folder", lambda: tmp_path)
    assert provenance.changed() == ["rope"]


def test_the_description_names_no_architecture_and_every_target(executor):
    said = executor.describe()
    assert set(said["targets"]) == set(TARGETS) == set(targets.HANDLERS)
    assert not re.search("gfx[0-9]", json.dumps(said))
    assert said["as_shipped"]
    assert said["patches"]
    assert all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in said["sources"].values())


def test_findings_and_the_kit_list_the_same_names():
    assert tuple(findings.load()) == FINDINGS


def test_where_a_finding_lies_is_a_line_of_the_vendor_file():
    for found in findings.load().values():
        name, line = found.where.removeprefix(f"{findings.VENDOR}/").split(":")
        assert (provenance.vendor_folder() / name).read_text().splitlines()[int(line) - 1].strip(), found.name


def test_a_person_can_reproduce_a_finding():
    done = run("--finding", "append-rotates")
    assert done.returncode == 0, done.stderr
    assert 'reproduced: {"changed elements": {"keys": [1, 3], "values": []}}' in done.stdout
    assert run("--finding", "nothing").returncode == 2


def test_a_finding_that_is_not_seen_again_fails(monkeypatch, capsys):
    known = dict(findings.load())
    gone = findings.Finding(
        name="gone", what="", where="", consequence="", show=lambda: findings.Evidence(False, {"seen": 0})
    )
    monkeypatch.setattr(findings, "load", lambda: {**known, "gone": gone})
    assert command.main(["--finding", "gone"]) == 1
    assert 'NOT reproduced: {"seen": 0}' in capsys.readouterr().out


def test_the_emulator_cannot_be_turned_around(executor):
    with pytest.raises(RuntimeError, match="needs a process of its own"):
        emulator.start(bfloat16=False)


def test_bfloat16_is_rounded_to_nearest_even():
    random = np.random.default_rng(0)
    words = random.integers(0, 2**32, 100_000, np.uint64).astype(np.uint32)
    words[:1000] = (words[:1000] & 0xFFFF0000) | 0x8000  # halfway
    values = words.view(np.float32)
    with np.errstate(invalid="ignore"):
        want = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    real = ~np.isnan(values)
    np.testing.assert_array_equal(patches.narrow(values)[real], want[real])
    assert set(patches.narrow(values)[~real]) <= {patches.QUIET_NAN}
    every = np.arange(2**16, dtype=np.uint16)
    np.testing.assert_array_equal(patches.widen(every).view(np.uint32) >> 16, every)


def test_a_wrong_answer_is_outside_the_matrix_bound():
    assert matrix.Outcome("", 1.0, 2.0, "").within
    assert not matrix.Outcome("", 3.0, 2.0, "").within
    assert not matrix.Outcome("", float("nan"), 2.0, "").within
