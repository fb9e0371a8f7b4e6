"""What a certificate says of a library that was compiled where it ran: what is refused, and how two are compared."""

import copy
from pathlib import Path

import pytest
from edited_certificates import DIGEST, resealed

from conformance import certificate, derived
from conformance.catalogue import load
from conformance.command import this_suite

ROOT = Path(__file__).parents[2]
DATA = certificate.read((ROOT / "certificates" / "reference-cpu.json").read_text("utf-8"))
BUILD = {
    "library": DIGEST,
    "sources": "0f" * 12,
    "headers": "1e" * 12,
    "units": ["handlers.cc"],
    "compiler": "c++ 12",
    "arguments": [],
    "flags": ["-O3"],
    "machine": [DATA["body"]["environment"][name] for name in ("system", "machine")] + ["avx2", "fma"],
}


def compiled(**changes):
    """A certificate of a backend that compiles its kernels, its build with the changes; None leaves a field out."""
    data = copy.deepcopy(DATA)
    build = {name: value for name, value in (BUILD | changes).items() if value is not None}
    data["body"]["backend"] |= {"factory": derived.COMPILED[0], "build": build}
    return resealed(data)


def problems(data):
    return certificate.check(data, load(), this_suite())


def test_a_certificate_that_names_its_library_is_sound():
    assert problems(compiled()) == []
    assert "; library sha256:abababababab by c++ 12; jax " in certificate.identity(compiled()["body"])


@pytest.mark.parametrize("name", derived.BUILD)
def test_one_that_leaves_out_what_bits_depend_on_is_refused(name):
    (said,) = problems(compiled(**{name: None}))
    assert said == f"backend.build has no {name}, so it does not say which library ran"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"library": "sha256:ab"}, "backend.build.library is 'sha256:ab', which is no SHA-256"),
        (
            {"machine": ["Linux", "riscv64", "i"]},
            "backend.build.machine is ['Linux', 'riscv64'], but environment.system and environment.machine gives",
        ),
    ],
)
def test_a_build_that_cannot_be_is_refused(changes, said):
    (found,) = problems(compiled(**changes))
    assert found.startswith(said)


@pytest.mark.parametrize("build", [None, "sha256:ab", []])
def test_a_backend_that_compiles_and_does_not_say_what_is_refused(build):
    data = compiled()
    data["body"]["backend"]["build"] = build
    (said,) = problems(resealed(data))
    assert said.endswith(f"but {derived.COMPILED[0]!r} runs a library that it compiles")


def test_other_builds_are_told_apart_by_what_differs():
    one, other = (compiled(**kw)["body"] for kw in ({}, {"machine": [*BUILD["machine"][:3], "avx512f"], "units": None}))
    assert derived.builds(one, one) == []
    assert derived.builds(one, other) == [
        "backend.build.machine: was fma, is avx512f",
        "backend.build.units: was ['handlers.cc'], is None",
    ]
    assert not certificate.diff(one, other), "another library is no difference by itself"
    without = copy.deepcopy(one)
    del without["backend"]["build"]
    assert len(derived.builds(without, one)) == len(BUILD)
    assert derived.builds(without, without) == []


def test_a_replay_tells_another_library_field_by_field():
    one, other = (compiled(**kw)["body"] for kw in ({}, {"machine": [*BUILD["machine"], "sve"], "compiler": "c++ 13"}))
    assert derived.here_and_there(one, other, one["suite"]) == [
        "backend.build.compiler: it says 'c++ 12', here it is 'c++ 13'",
        "backend.build.machine: it says nothing more, here it is sve",
    ]
