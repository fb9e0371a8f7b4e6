"""Movers: raw bit patterns through append, scrub and copy_pages. Nothing is computed, so every word is predicted.

Signalling NaNs are left out: storing them quiets them on some platforms, and no clause promises otherwise for a typed
pool. Quiet NaNs with payloads, infinities, −0 and subnormals are in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from conformance.case import MoveProblem
from conformance.formats import format_of, quiet
from conformance.stream import Stream
from conformance.vectors.params import MOVE, ROWS, Param, integer, one_of, validate
from conformance.vectors.pools import build_table, value_width
from conformance.vectors.vector import Vector
from paged.common.errors import InvalidInputError

APPEND_SCHEMA = {
    **MOVE,
    "tokens": Param(integer(1, 4096)),
    "padding": Param(one_of("none", "interleaved", "tail", "all"), "interleaved"),
}
STEP_SCHEMA = {**MOVE, **ROWS}
PAGES_SCHEMA = {
    **MOVE,
    "pages": Param(integer(0, 4096)),
    "padding": Param(one_of("none", "interleaved"), "interleaved"),
}


def fill_words(stream: Stream, shape: Sequence[int], dtype: str, fill: str) -> np.ndarray:
    """Random words without signalling NaNs; with `special`, mostly zeros of both signs, infinities and NaNs."""
    f = format_of(dtype)
    words = quiet((stream.words(shape) & np.uint64((1 << f.bits) - 1)).astype(f.word_type), dtype)
    if fill == "bits":
        return words
    top = [f.nan] if f.infinity is None else [f.infinity, f.nan, f.nan | 1]
    special = np.array([0, 1, 2, f.max_word, *top], f.word_type)
    signed = np.concatenate([special, special | np.array(f.sign_bit, f.word_type)])
    return np.where(stream.integers(0, 8, shape) == 0, words, stream.choice(signed, shape)).astype(f.word_type)


def append_slots(case_id: str, params: Mapping[str, Any], poison: str) -> Vector:
    """Tokens to slots all over the pool, borders of pages and of the layer included, −1 = padding in between."""
    p = validate(params, APPEND_SCHEMA)
    size, draw = p["page"], Stream(case_id, "slots")
    inside = size * (p["num_pages"] - 1)
    borders = np.unique([size, 2 * size - 1, size * p["num_pages"] - 1])
    others = np.setdiff1d(np.arange(size, size * p["num_pages"]), borders)
    slots = np.concatenate([borders, others[draw.permutation(len(others))]])[: p["tokens"]]
    if len(slots) < p["tokens"]:
        raise InvalidInputError(f"params.tokens = {p['tokens']} exceeds the {inside} slots outside the sentinel page.")
    slots = slots[draw.permutation(len(slots))].astype(np.int32)
    pads = draw.integers(0, 3, len(slots)) == 0
    if p["padding"] == "interleaved":
        slots[pads] = -1
        slots[0] = -1  # the first token is the one whose index a dropped mask writes as 0
    elif p["padding"] == "tail":
        slots[len(slots) - len(slots) // 3 :] = -1
    elif p["padding"] == "all":
        slots[:] = -1
    return _append(case_id, p, slots, None)


def append_step(case_id: str, params: Mapping[str, Any], poison: str) -> Vector:
    """The tokens of one step of a table: rows that grow across page borders, padding at the end."""
    p = validate(params, STEP_SCHEMA)
    table = build_table(p, Stream(case_id, "pages"))
    return _append(case_id, p, table.write_slots.copy(), table)


def _append(case_id: str, p: Mapping[str, Any], slots: np.ndarray, table: Any) -> Vector:
    pools, new = _pools(case_id, p), {}
    after = {name: pool.copy() for name, pool in pools.items()}
    live = slots >= 0
    row = p["layer"] * p["num_pages"] + slots[live] // p["page"]
    for name in pools:
        shape = (len(slots), *pools[name].shape[2:])
        new[name] = fill_words(Stream(case_id, f"new {name}"), shape, p["dtype"], p["fill"])
        after[name][row, slots[live] % p["page"]] = new[name][live]
    return _move(
        "append",
        p,
        pools,
        after,
        layer=p["layer"],
        new_keys=new["keys"],
        new_values=new["values"],
        slots=slots,
        table=table,
    )


def scrub(case_id: str, params: Mapping[str, Any], poison: str) -> Vector:
    """Pages of all layers set to +0; negative entries are padding."""
    p = validate(params, PAGES_SCHEMA)
    pools, (pages,) = _pools(case_id, p), _pick(case_id, p, 1)
    after = {name: pool.copy() for name, pool in pools.items()}
    for pool in after.values():
        pool[pages[pages >= 0]] = 0
    return _move("scrub", p, pools, after, pages=pages)


def copy_pages(case_id: str, params: Mapping[str, Any], poison: str) -> Vector:
    """Pages copied, all read before any is written: sources that are also targets, a swap among them."""
    p = validate(params, PAGES_SCHEMA)
    source, target = _pick(case_id, p, 2)
    live = np.flatnonzero(target >= 0)
    if len(live) > 3:
        source[live[1]], source[live[0]] = target[live[0]], target[live[1]]  # a swap
        source[live[3]] = target[live[2]]  # a chain
    pools = _pools(case_id, p)
    after = {name: pool.copy() for name, pool in pools.items()}
    for name, pool in after.items():
        pool[target[live]] = pools[name][source[live]]
    return _move("copy_pages", p, pools, after, source=source, target=target)


def _pick(case_id: str, p: Mapping[str, Any], kinds: int) -> list[np.ndarray]:
    """`kinds` lists of distinct pool rows that are no sentinel, with −1 in the same places."""
    rows = np.arange(p["layers"] * p["num_pages"])
    rows = rows[rows % p["num_pages"] != 0]
    if kinds * p["pages"] > len(rows):
        raise InvalidInputError(f"params.pages = {p['pages']} is too many for {len(rows)} pages outside the sentinels.")
    draw = Stream(case_id, "pages")
    picked = rows[draw.permutation(len(rows))][: kinds * p["pages"]].reshape(kinds, -1).astype(np.int32)
    if p["padding"] == "interleaved":
        picked[:, draw.integers(0, 4, p["pages"]) == 0] = -1
    return list(picked)


def _pools(case_id: str, p: Mapping[str, Any]) -> dict[str, np.ndarray]:
    shape = p["layers"] * p["num_pages"], p["page"], p["kv_heads"]
    widths = {"keys": p["head_dim"], "values": value_width(p)}
    return {
        name: fill_words(Stream(case_id, f"pool {name}"), (*shape, width), p["dtype"], p["fill"])
        for name, width in widths.items()
    }


def _move(operation: str, p: Mapping[str, Any], before: Any, after: Any, **arrays: Any) -> Vector:
    problem = MoveProblem(
        operation=operation,
        dtype=p["dtype"],
        num_layers=p["layers"],
        num_pages=p["num_pages"],
        keys=before["keys"],
        values=before["values"],
        expected_keys=after["keys"],
        expected_values=after["values"],
        **arrays,
    )
    return Vector(family=operation, problem=problem)
