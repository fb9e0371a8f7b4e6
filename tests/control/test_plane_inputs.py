"""Wrong input to the control plane: one error that names what is wrong, and nothing changed."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from plane_helpers import make_layout, make_plane, never, open_with, snapshot

from paged.common import InvalidInputError, PagedError, StaleHandleError
from paged.control import ControlPlane, FixedShape, Handle, Slice

pytestmark = pytest.mark.usefixtures("own_checks_only")


SHAPE: dict[str, Any] = dict.fromkeys(("rows", "tokens", "listed_pages", "max_query_len", "max_kv_len"), 1)


class Impostor(NamedTuple):
    """Looks like a handle, and its row would be the last one."""

    row: int = -1
    epoch: int = 0


def first_two(plane: ControlPlane) -> tuple[Handle, Handle]:
    return open_with(plane, 6), open_with(plane, 1)


# Requests of 6 and 1 tokens, one that was released, and one whose row then went to a request of 1 token.
A, B, C, D = "a", "b", "c", "d"
WRONG_SLICES = {
    "gap": ([(B, 1, 1), (A, 7, 1)], r"slice 1 \(request at row 0, epoch 0\): start=7 leaves a gap: .* length is 6\."),
    "overlap": ([(A, 5, 2)], r"slice 0 \(request at row 0, epoch 0\): start=5 overlaps what is cached: .* length is 6"),
    "twice": ([(A, 6, 1), (B, 1, 1), (A, 6, 1)], r"slice 2 \(.* row 0, epoch 0\) names the request of slice 0 again"),
    "twice in a row": ([(A, 6, 1), (A, 7, 1)], r"slice 1 \(.* row 0, epoch 0\) names the request of slice 0 again"),
    "no tokens": ([(A, 6, 0)], r"slice 0 \(.*\)\.num_tokens must be in 1\.\..*, got 0"),
    "negative tokens": ([(A, 6, -1)], r"num_tokens must be in 1\.\..*, got -1"),
    "negative start": ([(A, -1, 1)], r"slice 0 \(.*\)\.start must be in 0\.\..*, got -1"),
    "past the capacity": ([(A, 6, 15)], r"start=6 \+ num_tokens=15 is past a request's 20 tokens"),
    "huge": ([(A, 6, 2**63 - 1)], r"num_tokens must be in"),
    "huger": ([(A, 6, 2**70)], r"num_tokens must be in"),
    "float": ([(B, 1, 1), (A, 6, 1.0)], r"slice 1 \(.*\)\.num_tokens must be an int, got 1\.0 of type float"),
    "text": ([(A, "6", 1)], r"slice 0 \(.*\)\.start must be an int, got '6' of type str"),
    "none": ([(A, None, 1)], r"start must be an int, got None"),
    "array": ([(A, np.array([6, 6]), 1)], r"start must be an int, got array"),
    "no handle": ([(0, 6, 1)], r"slice 0 must be a Slice\(handle, start, num_tokens\), got \(0, 6, 1\)"),
    "impostor": ([(Impostor(), 0, 1)], r"slice 0 must be a Slice\(handle, start, num_tokens\), got \(Impostor"),
    "impostor of an open row": (
        [(Impostor(-1, 1), 1, 1)],
        r"slice 0 must be a Slice\(handle, start, num_tokens\), got",
    ),
    "short": ([(A, 6)], r"slice 0 must be a Slice"),
    "short second": ([(A, 6, 1), (B, 1)], r"slice 1 must be a Slice"),
    "long": ([(A, 6, 1, 1)], r"slice 0 must be a Slice"),
    "not a tuple": ([7], r"slice 0 must be a Slice\(handle, start, num_tokens\), got 7"),
    "not a sequence": (7, r"slices must be a sequence of Slice, got 7"),
    "nothing": (None, r"slices must be a sequence of Slice, got None"),
    "stale": ([(A, 6, 1), (C, 2, 1)], r"handle of row 2, epoch 0 is stale"),
    "stale at the length of the row": ([(A, 6, 1), (C, 0, 1)], r"handle of row 2, epoch 0 is stale"),
    "stale over a new request": ([(A, 6, 1), (D, 1, 1)], r"handle of row 3, epoch 0 is stale: .* at epoch 1"),
    "other plane": ([(Handle(9, 0), 0, 1)], r"Handle\(row=9, epoch=0\) is no handle of this map of 4 rows"),
    "wide epoch": ([(Handle(0, 2**62), 0, 1)], r"handle of row 0, epoch 4611686018427387904 is stale"),
}


@pytest.mark.parametrize("method", ["prepare", "reserve", "build", "pages_needed", "fits"])
@pytest.mark.parametrize("fault", WRONG_SLICES)
def test_wrong_slices(fault, method):
    plane = make_plane(max_pages_per_request=5)
    a, b = first_two(plane)
    c, d = open_with(plane, 2), open_with(plane, 2)
    plane.release(d)
    open_with(plane, 1)
    plane.release(c)
    slices, text = WRONG_SLICES[fault]
    if isinstance(slices, list):
        names = {"a": a, "b": b, "c": c, "d": d}
        slices = [
            (names.get(s[0], s[0]) if isinstance(s[0], str) else s[0], *s[1:]) if isinstance(s, tuple) else s
            for s in slices
        ]
    if fault == "not a sequence" and method == "fits":
        assert plane.fits(slices)  # an int asks for a new request of that many tokens
        return
    plane.reserve([Slice(a, 6, 1), Slice(b, 1, 1)])  # and the reader remembers these handles
    before = snapshot(plane)
    call: Any = getattr(plane, method)
    with pytest.raises(PagedError, match=text) as error:
        call(slices, never) if method == "prepare" else call(slices)
    assert isinstance(error.value, (InvalidInputError, StaleHandleError))
    assert snapshot(plane) == before
    plane.verify()


def test_numpy_ints_are_ints():
    plane = make_plane()
    a = plane.open()
    assert plane.prepare([Slice(a, np.int64(0), np.int32(3))], never) is not None  # type: ignore[arg-type]
    assert plane.length(a) == 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p, a: p.truncate(a, 7), r"ControlPlane.truncate.length must be in 0\.\.6, got 7"),
        (lambda p, a: p.truncate(a, -1), r"ControlPlane.truncate.length must be in 0\.\.6, got -1"),
        (lambda p, a: p.truncate(a, 2.0), r"ControlPlane.truncate.length must be an int, got 2\.0"),
        (lambda p, a: p.fits(-1), r"ControlPlane.fits.request must be in 0\.\..*, got -1"),
        (lambda p, a: p.fits(True), r"ControlPlane.fits.request must be an int, got True"),
        (lambda p, a: p.fits(1.5), r"slices must be a sequence of Slice, got 1\.5"),
        (lambda p, a: p.prepare([], None), r"ControlPlane.prepare.scrub must be callable with page ids, got None"),
        (lambda p, a: p.prepare([], never, 3), r"ControlPlane.prepare.copy must be callable with page ids, got 3"),
        (lambda p, a: p.dispatch([1]), r"ControlPlane.dispatch.table must be a PageTable, got \[1\]"),
        (lambda p, a: p.confirm([13]), r"PageAllocator.confirm.pages must be in 1\.\.12: entry 0 has 13"),
        (lambda p, a: p.confirm(["x"]), r"PageAllocator.confirm.pages must"),
        (lambda p, a: p.retire("x"), r"retire.step must be an int, got 'x'"),
    ],
)
def test_wrong_arguments(call, text):
    plane = make_plane()
    a, _ = first_two(plane)
    plane.dispatch(plane.prepare([Slice(a, 6, 1)], never)) if "retire" in text else None
    before = snapshot(plane)
    with pytest.raises(InvalidInputError, match=text):
        call(plane, a)
    assert snapshot(plane) == before


@pytest.mark.parametrize("use", ["length", "pages_of", "fork", "release", "truncate"])
@pytest.mark.parametrize("handle", [Handle(2, 0), Handle(0, 1), Handle(4, 0), Impostor(), None, 0])
def test_wrong_handles(use, handle):
    plane = make_plane()
    first_two(plane)
    before = snapshot(plane)
    method: Any = getattr(plane, use)
    with pytest.raises(StaleHandleError, match=r"row|handle of this map"):
        method(handle, 0) if use == "truncate" else method(handle)
    assert snapshot(plane) == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_requests": 0}, r"PageMap.max_requests must be in 1\.\..*, got 0"),
        ({"max_requests": 2.0}, r"PageMap.max_requests must be an int, got 2\.0"),
        ({"max_pages_per_request": 0}, r"PageMap.max_pages_per_request must be in 1\.\..*, got 0"),
        ({"shapes": 7}, r"ControlPlane.shapes must be .*, got 7"),
        ({"shapes": FixedShape}, r"ControlPlane.shapes must be"),
        ({"poison_freed": True}, r"ControlPlane.poison_freed must be callable with page ids, got True"),
        ({"layout": None}, r"ControlPlane.layout must be a StorageLayout, got None"),
    ],
)
def test_wrong_construction(arguments, text):
    given: dict[str, Any] = {"layout": make_layout(), "max_requests": 4, **arguments}
    with pytest.raises(InvalidInputError, match=text):
        ControlPlane(given.pop("layout"), **given)


def test_wrong_shapes():
    for field in SHAPE:
        for value in (-1, 1.0, None, True):
            with pytest.raises(InvalidInputError, match=rf"FixedShape.{field} must be .*, got {value}"):
                FixedShape(**{**SHAPE, field: value})


def test_a_plane_smaller_than_a_row_of_its_map_says_its_real_capacity():
    assert make_plane(num_pages=4, max_pages_per_request=9).capacity_tokens == 12
    assert make_plane(num_pages=40, max_pages_per_request=9).capacity_tokens == 36
    assert make_plane(num_pages=4).capacity_tokens == 12
