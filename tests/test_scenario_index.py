"""Faults that paged-KV systems really had, by id, and where each is tested here.

A test of scenario M1 is named `test_scenario_m1_…`. An id that is not tested yet says which part of `paged` it awaits.
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

TESTED = {
    "A1": ("page id times stride wraps at 32 bits", "common reference"),
    "A2": ("page id cut to 16 bits", "common"),
    "A3": ("pool above a kernel's byte limit returns zeros", "backends common"),
    "A6": ("token index used where a page index belongs", "common"),
    "A7": ("head dim guessed as hidden size over heads", "models"),
    "B1": ("bits follow a maximal-length argument of the host", "backends reference"),
    "B2": ("a cache hit and a fresh run differ in low bits", "engine"),
    "B5": ("page numbers, row order or neighbours move bits", "reference"),
    "C1": ("whole prompt cached, no query token left", "control"),
    "C3": ("a remembered hit whose pages were evicted", "control"),
    "C5": ("adapter name and salt share one slot of the cache key", "common"),
    "C6": ("two adapters of one name and different weights hit each other's cache", "common"),
    "C7": ("a key that collides hits another prompt's page", "control"),
    "C8": ("weights change and the cache stays", "common engine"),
    "C10": ("page adopted by the cache and freed by its request", "control"),
    "C13": ("log probabilities of cached prompt tokens missing", "engine"),
    "C14": ("a prefix hit resumes at the wrong rows", "engine"),
    "C15": ("a prefix of exactly one page", "control"),
    "C16": ("an evicted page keeps its key", "control"),
    "F1": ("one byte, two fp8 encodings", "common conformance reference"),
    "F2": ("K and V scales applied on one path only", "reference"),
    "H1": ("finish and abort both free", "control"),
    "H2": ("shared pages and a window: a count dropped twice", "control"),
    "H4": ("a page reused while a dispatched step still writes it", "control"),
    "H6": ("a request larger than the pool waits for ever", "control engine"),
    "H7": ("preemption drops generated tokens", "control engine"),
    "H9": ("deferred frees, and everything is preempted", "control"),
    "H10": ("a preempted request loses its turn", "control"),
    "H11": ("can-allocate and allocate disagree", "control"),
    "H13": ("phase guessed from whether a token was generated", "control engine"),
    "H15": ("rejected draft tokens stay counted", "control"),
    "H16": ("tier counters swapped, a planned restore evicted", "control"),
    "L1": ("a full last page counted as empty", "common control reference"),
    "L3": ("two rows shorter than one page, the second comes back zero", "common control reference"),
    "L4": ("more tokens in the last page than it holds", "common"),
    "L5": ("int64 lengths read as int32", "backends common"),
    "L7": ("wrong above a kernel's largest page", "backends common reference"),
    "L8": ("a kernel that packs pairs is given pages of one token", "backends common"),
    "L10": ("pages counted by floor division", "common control"),
    "L11": ("a table width that the kernel's block does not divide", "backends"),
    "L13": ("a row of length zero", "common conformance reference"),
    "L14": ("a row without query tokens", "backends common reference"),
    "M1": ("scale applied twice", "reference"),
    "M2": ("soft cap before the scale, or after the mask", "conformance reference"),
    "M3": ("window that counts the token itself, or does not", "conformance reference"),
    "M7": ("positions of a later chunk restart at zero", "control engine models"),
    "M8": ("sink counted once per split", "reference"),
    "M9": ("sink dropped on one path", "reference"),
    "M10": ("ALiBi slope from a shard's local head", "common"),
    "M11": ("ALiBi exponent or distance off by one", "common"),
    "M13": ("merging two empty partial results gives NaN", "reference"),
    "M14": ("sign or base of the log-sum-exp in merges", "reference"),
    "M15": ("query to KV head map when the group is no power of two", "reference"),
    "M16": ("a head dim without a kernel gives numbers instead of an error", "common reference"),
    "M17": ("an option accepted and ignored", "backends common"),
    "N1": ("weight zero times NaN", "reference"),
    "N3": ("padding points at a live slot", "backends engine"),
    "N4": ("padded output rows are NaN", "reference"),
    "N6": ("a recycled page keeps its last owner's bytes", "control engine"),
    "N9": ("batch-shape numerics taken for corruption", "engine"),
    "S1": ("as many shards as KV heads, and every shard holds all", "backends common"),
    "S2": ("replicated heads counted as unique", "common"),
    "S4": ("mesh axis names not recognised, pool silently unsharded", "backends"),
    "S6": ("the sharded call site builds its own arguments", "backends"),
}
"""Id -> what went wrong, and the rooms (folders of tests/) that test it."""

AWAITED = {
    "B3": ("small buckets reduce in another order", "conformance"),
}
"""Id -> what went wrong, and the part of `paged` whose tests it awaits."""


def scenario_tests(root: Path) -> list[tuple[str, str, str]]:
    """(id, room, function name) of every function named `test_scenario_…` under `root`."""
    found = []
    for path in sorted(root.rglob("test_*.py")):
        room = path.relative_to(root).parts[0] if path.parent != root else ""
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_scenario_"):
                match = re.match(r"test_scenario_([a-z]+\d+)_\w", node.name)
                found.append((match.group(1).upper() if match else "", room, node.name))
    return found


def faults(tests: list[tuple[str, str, str]]) -> list[str]:
    known = {**TESTED, **AWAITED}
    out = [f"{name} names no scenario; say test_scenario_<id>_<words>." for found, _, name in tests if not found]
    out += [f"{name}: there is no scenario {found}." for found, _, name in tests if found and found not in known]
    out += [f"{name}: {found} is listed as awaited; move it to TESTED." for found, _, name in tests if found in AWAITED]
    for scenario, (words, rooms) in TESTED.items():
        missing = set(rooms.split()) - {room for found, room, _ in tests if found == scenario}
        out += [f"scenario {scenario} ({words}) has no test under tests/{room}." for room in sorted(missing)]
    return out


def test_every_scenario_is_tested_where_the_index_says():
    assert faults(scenario_tests(TESTS)) == []


def test_an_id_is_tested_or_awaited_and_not_both():
    assert not TESTED.keys() & AWAITED.keys()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_scenario_z9_unknown", "test_scenario_z9_unknown: there is no scenario Z9."),
        ("test_scenario_b3_early", "test_scenario_b3_early: B3 is listed as awaited; move it to TESTED."),
        ("test_scenario_m1", "test_scenario_m1 names no scenario; say test_scenario_<id>_<words>."),
        ("test_scenario_scale_applied_twice", "names no scenario"),
    ],
)
def test_a_planted_wrong_name_is_found(tmp_path, name, words):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "test_planted.py").write_text(f"class TestIt:\n    def {name}(self):\n        pass\n")
    assert any(words in fault for fault in faults(scenario_tests(tmp_path)))


def test_a_missing_test_and_a_test_in_the_wrong_room_are_found():
    complaint = "scenario S1 (as many shards as KV heads, and every shard holds all) has no test under tests/common."
    tests = scenario_tests(TESTS)
    assert complaint not in faults(tests)
    assert complaint in faults([test for test in tests if test[0] != "S1"])
    assert complaint in faults([(found, "engine", name) for found, _, name in tests])
