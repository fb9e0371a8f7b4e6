"""Address: one logit is 0, every other at most −160 nats, so one token's value is read back verbatim.

A key spells its position in ±a bits, each repeated; a second part of the head holds the constant that brings the logit
of the matching token to exactly 0. A value spells where it lives: page, slot, KV head, row, layer, each digit plus one
so that nothing is 0, followed by the head dim's own number. A wrong output says which token was read instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.formats import encode, format_of
from conformance.stream import Stream
from conformance.vectors.params import ATTEND, validate
from conformance.vectors.pools import (
    assemble,
    build_table,
    live_tokens,
    share_tokens,
    slots_of,
    spec_of,
    value_width,
    visible_range,
)
from conformance.vectors.vector import Facts, Vector
from paged.common.errors import InvalidInputError

GAP = 160.0
"""Nats between the token that is read and any other: exp(−160) is 0 in float32."""


def address(case_id: str, params: Mapping[str, Any], poison: str) -> Vector:
    """See the module. Takes no sinks: their weight would not be 0."""
    p = validate(params, ATTEND)
    if p["sinks"] is not None:
        raise InvalidInputError("params.sinks must be absent from an address vector.")
    table = build_table(p, Stream(case_id, "pages"))
    d, kv_heads, heads = p["head_dim"], p["kv_heads"], p["q_heads"]
    longest = max(p["kv_lens"], default=1)
    width = max(4, int(longest - 1).bit_length())
    repeats = d // (2 * width)
    if repeats == 0:
        raise InvalidInputError(f"params.head_dim = {d} cannot address {longest} tokens: it takes {2 * width}.")
    used = width * repeats
    scale = float(np.float32(p["scale"])) * (p["key_scale"] or 1.0)
    amplitude = 2.0 ** np.ceil(np.log2(np.sqrt(GAP / (2 * repeats * scale))))
    fields, base = digit_fields(p), digit_base(p["kv_dtype"] or p["dtype"])
    _refuse_leak(p, longest, base)

    code, keys, values = {}, {}, {}
    for row, n in enumerate(p["kv_lens"]):
        bits = (np.arange(n)[:, None] >> np.arange(width)) & 1
        code[row] = np.repeat(1.0 - 2.0 * bits, repeats, axis=-1) * amplitude
        keys[row] = np.zeros((n, kv_heads, d))
        keys[row][:, :, :used] = code[row][:, None]
        keys[row][:, :, used : 2 * used] = amplitude
        page, slot = slots_of(table, row)
        place = {"page": page, "slot": slot, "row": np.full(n, row), "layer": np.full(n, p["layer"])}
        values[row] = np.stack(
            [spell({**place, "head": np.full(n, head)}, fields, base, value_width(p)) for head in range(kv_heads)],
            axis=1,
        )
    share_tokens(p, keys, values)

    draws = Stream(case_id, "targets").words((table.num_tokens, heads))
    query, answer = (np.zeros((table.num_tokens, heads, width)) for width in (d, value_width(p)))
    target = np.full((table.num_tokens, heads), -1)
    spec = spec_of(p)
    for row, token, position in live_tokens(table):
        first, end = visible_range(table, row, position, spec)
        border = (end - 1) // p["page"] * p["page"]
        for head in range(heads):
            anywhere = first + int(draws[token, head] % np.uint64(end - first))
            # Most faults show at the edges: newest, oldest visible, first and last slot around a page border, middle.
            edges = (end - 1, first, border, border - 1, (first + end - 1) // 2, anywhere)
            j = min(max(edges[(token + head) % len(edges)], first), end - 1)
            target[token, head] = j
            query[token, head, :used] = code[row][j]
            query[token, head, used : 2 * used] = -amplitude
            answer[token, head] = values[row][j, head // (heads // kv_heads)]
    problem = assemble(case_id, p, table, query=query, keys=keys, values=values, poison=poison, exact=True)
    words = encode(answer * (p["value_scale"] or 1.0), p["dtype"])
    return Vector(
        family="address",
        problem=problem,
        predicted=(words, words),
        facts=Facts(exact_logits=True),
        explain={"fields": fields, "base": base, "target": target, "value_scale": p["value_scale"] or 1.0},
    )


def digit_base(kv_dtype: str) -> int:
    """Digits 1 .. base are exact in the pool's dtype."""
    return min(128, 1 << (format_of(kv_dtype).fraction_bits + 1)) - (kv_dtype.startswith("float8"))


def digit_fields(p: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """(name, digits) of what a value spells, in order; refuses what has no room."""
    base = digit_base(p["kv_dtype"] or p["dtype"])
    limits = {
        "page": p["num_pages"],
        "slot": p["page"],
        "head": p["kv_heads"],
        "row": len(p["kv_lens"]),
        "layer": p["layers"],
    }
    fields, room = [], value_width(p)
    for name, limit in limits.items():
        digits = 1
        while base**digits < limit:
            digits += 1
        if digits > room:
            raise InvalidInputError(f"the values' head dim {value_width(p)} has no room to spell {name} below {limit}.")
        fields.append((name, digits))
        room -= digits
    return tuple(fields)


def spell(place: Mapping[str, np.ndarray], fields: tuple[tuple[str, int], ...], base: int, d: int) -> np.ndarray:
    """Values (n, d) of tokens at `place`: digits plus one, lowest first, then the number of the head dim."""
    columns = [place[name] // base**i % base + 1 for name, digits in fields for i in range(digits)]
    n = len(place["page"])
    columns += [np.full(n, 1 + i % base) for i in range(len(columns), d)]
    return np.stack(columns, axis=-1).astype(np.float64)


def read_back(vector: np.ndarray, fields: tuple[tuple[str, int], ...], base: int) -> dict[str, int] | None:
    """The place that one output (d,) spells, or None if it spells none."""
    digits = np.asarray(vector)
    if not np.all(np.isfinite(digits)) or np.any(digits != np.rint(digits)) or np.any(digits < 1):
        return None
    if np.any(digits > base):
        return None
    place, at = {}, 0
    for name, count in fields:
        place[name] = int(sum((int(digits[at + i]) - 1) * base**i for i in range(count)))
        at += count
    rest = 1 + np.arange(at, len(digits)) % base
    return place if np.array_equal(digits[at:], rest) else None


def _refuse_leak(p: Mapping[str, Any], longest: int, base: int) -> None:
    """Under a soft cap the other logits stop at −cap: what leaks must stay within the slack of the final rounding."""
    if p["soft_cap"] is None:
        return
    leak = longest * base * np.exp(-p["soft_cap"])
    if leak > format_of(p["dtype"]).unit_roundoff / 16:
        raise InvalidInputError(
            f"params.soft_cap = {p['soft_cap']} leaks {leak:.1e} of other tokens into an address of {p['dtype']}. "
            f"Use a larger cap."
        )
