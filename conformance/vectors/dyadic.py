"""Ladder and dyadic: logits that are multiples of −ln 2 under any scale, so that weights are powers of two.

ln 2 / scale, rounded to a grid of 2^-17, is carried by three coordinates of q in pieces of eight bits; the same
coordinates of k hold the integer. Every partial sum of q·k is then a multiple of 2^-17 below 2^7, which float32 holds
in any order. With a soft cap c the rung is placed at c · atanh(ln 2 / c), which the cap maps back to ln 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.formats import encode, round_to
from conformance.stream import Stream
from conformance.vectors.params import ATTEND, Param, integer, one_of, refuse, validate
from conformance.vectors.pools import assemble, build_table, live_tokens
from conformance.vectors.vector import Facts, Vector
from paged.common.errors import InvalidInputError

LN2 = 0.6931471805599453
FAR = 200
"""A rung that is out of sight: 2^-200 is 0 in float32."""
GRID = 2.0**-17

DYADIC_SCHEMA = {
    **ATTEND,
    "levels": Param(integer(1, 8), 7),
    "values": Param(one_of("one_sign", "integers", "normal"), "one_sign"),
}


def rung_pieces(p: Mapping[str, Any]) -> np.ndarray:
    """The three coordinates of q that sum to one rung."""
    scale = float(np.float32(p["scale"])) * (p["key_scale"] or 1.0)
    cap = p["soft_cap"]
    nats = LN2 if cap is None else cap * float(np.arctanh(LN2 / cap))
    target = round(nats / scale / GRID) * GRID
    pieces = []
    for _ in range(3):
        pieces.append(float(round_to(target - sum(pieces), "bfloat16")))
    if sum(pieces) != target or target > 64:
        raise InvalidInputError(f"params.scale = {p['scale']} is too small for three pieces to carry ln 2 / scale.")
    return np.array(pieces)


def ladder(case_id: str, params: Mapping[str, Any], poison: str) -> Vector:
    """Of every four tokens one sits on rung 0, two on rung 1, one out of sight; values come in ± pairs about a mean.

    The answer is (mean 0 + mean 1) / 2 exactly. The means differ, since with one mean any scale would return it; they
    never cancel, since a zero by cancellation is not exact. Under a soft cap nothing can be put out of sight, and of
    every three tokens one sits on rung 0 and two on rung 1. Decode rows only, whole numbers of such sets of pairs.
    """
    p = validate(params, ATTEND)
    refuse(p, "a ladder", "share", "value_head_dim")
    rungs = np.array([0, 1, 1] if p["soft_cap"] is not None else [0, 1, 1, FAR])
    if p["window"] is not None or p["sinks"] is not None:
        raise InvalidInputError("params.window and params.sinks must be absent from a ladder.")
    for row, (q, n) in enumerate(zip(p["query_lens"], p["kv_lens"])):
        if q > 1 or n % (2 * len(rungs)):
            raise InvalidInputError(f"ladder: row {row} needs q <= 1 and n a multiple of {2 * len(rungs)}: {q}, {n}.")
    table = build_table(p, Stream(case_id, "pages"))
    pieces = rung_pieces(p)
    d, kv_heads, group = p["head_dim"], p["kv_heads"], p["q_heads"] // p["kv_heads"]
    keys, values, means, answers = {}, {}, {}, {}
    for row, n in enumerate(p["kv_lens"]):
        draw = Stream(case_id, f"row {row}")
        rung = np.repeat(rungs, n // len(rungs))[draw.permutation(n)]
        keys[row] = np.zeros((n, kv_heads, d))
        keys[row][..., :3] = -rung[:, None, None]
        means[row] = _unequal_means(draw, (kv_heads, d))
        values[row] = draw.choice([-120.0, 120.0], (n, kv_heads, d))
        for level in (0, 1):
            at = np.flatnonzero(rung == level)
            noise = draw.integers(-20, 21, (len(at) // 2, kv_heads, d))
            values[row][at[0::2]] = means[row][level] + noise
            values[row][at[1::2]] = means[row][level] - noise
        answers[row] = np.repeat(means[row].mean(0), group, axis=0)
    query, answer = np.zeros((2, table.num_tokens, p["q_heads"], d))
    for row, token, _ in live_tokens(table):
        query[token, :, :3] = pieces
        answer[token] = answers[row]
    problem = assemble(case_id, p, table, query=query, keys=keys, values=values, poison=poison, exact=True)
    words = encode(answer * (p["value_scale"] or 1.0), p["dtype"])
    return Vector(
        family="ladder",
        problem=problem,
        predicted=(words, words),
        facts=Facts(exact_logits=True, dyadic=True),
        explain={"means": means, "group": group, "value_scale": p["value_scale"] or 1.0},
    )


def _unequal_means(draw: Stream, shape: tuple[int, ...]) -> np.ndarray:
    """(2, …) integers of one sign, one parity and different size, so that their mean is a whole number and not 0."""
    first, second = draw.integers(1, 51, (2, *shape))
    second += (first - second) % 2
    second = np.where(first == second, 3 * second, second)
    return np.stack([first, second]) * draw.choice([-1.0, 1.0], shape)


def dyadic(case_id: str, params: Mapping[str, Any], poison: str) -> Vector:
    """Certified rounding at its strongest: seven rungs, integer values; nothing is predicted, most bits are decided.

    `values`: `one_sign` 64..127 with one sign per head dim, so that nothing cancels; `integers` −64..64; `normal`.
    """
    p = validate(params, DYADIC_SCHEMA)
    refuse(p, "a dyadic vector", "share", "value_head_dim")
    table = build_table(p, Stream(case_id, "pages"))
    pieces = rung_pieces(p)
    d, kv_heads = p["head_dim"], p["kv_heads"]
    half = min((d - 4) // 2, 30)
    signs = Stream(case_id, "signs").choice([-1.0, 1.0], (kv_heads, d))
    keys, values = {}, {}
    for row, n in enumerate(p["kv_lens"]):
        draw = Stream(case_id, f"row {row}")
        rung = draw.integers(0, p["levels"], (n, kv_heads))
        rung[:1] = 0  # seen by every causal token without a window, so that the largest logit is 0
        pairs = draw.integers(-1, 2, (n, kv_heads, half))
        keys[row] = np.zeros((n, kv_heads, d))
        keys[row][..., :3] = -rung[..., None]
        keys[row][..., 4 : 4 + half], keys[row][..., 4 + half : 4 + 2 * half] = pairs, -pairs
        if p["values"] == "one_sign":
            values[row] = draw.integers(64, 128, (n, kv_heads, d)) * signs
        elif p["values"] == "integers":
            values[row] = draw.integers(-64, 65, (n, kv_heads, d)).astype(np.float64)
        else:
            values[row] = round_to(draw.normal((n, kv_heads, d)), p["kv_dtype"] or p["dtype"])
    query = np.zeros((table.num_tokens, p["q_heads"], d))
    query[..., :3] = pieces
    ones = Stream(case_id, "query").integers(-1, 2, (*query.shape[:2], half))
    query[..., 4 : 4 + half] = query[..., 4 + half : 4 + 2 * half] = ones
    problem = assemble(case_id, p, table, query=query, keys=keys, values=values, poison=poison, exact=True)
    return Vector(family="dyadic", problem=problem, facts=Facts(exact_logits=True, dyadic=True))
