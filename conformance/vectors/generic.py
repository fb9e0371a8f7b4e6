"""Generic and steep: inputs whose bits nobody can predict, judged by interval (and, generic, by a statistic)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.formats import format_of, round_to
from conformance.stream import Stream
from conformance.vectors.params import ATTEND, Param, boolean, number, refuse, validate
from conformance.vectors.pools import assemble, build_table, share_tokens, value_width
from conformance.vectors.vector import Facts, Vector

GENERIC_SCHEMA = {
    **ATTEND,
    "temperature": Param(number(0.0, 64.0), 1.0),
    "value_mean": Param(number(-64.0, 64.0), 0.0),
    "value_std": Param(number(0.0, 64.0), 1.0),
    "statistic": Param(boolean, False),
}

STEEP_SCHEMA = {**ATTEND, "drop": Param(number(1.0, 80.0))}


def generic(case_id: str, params: Mapping[str, Any], poison: str) -> Vector:
    """Normal q (times `temperature`), k and v (`value_mean` + `value_std` · normal), rounded to their dtypes."""
    p = validate(params, GENERIC_SCHEMA)
    table = build_table(p, Stream(case_id, "pages"))
    kv_dtype = p["kv_dtype"] or p["dtype"]
    shape = p["kv_heads"], p["head_dim"]
    keys, values = {}, {}
    for row, n in enumerate(p["kv_lens"]):
        draw = Stream(case_id, f"row {row}")
        keys[row] = draw.normal((n, *shape)) / (p["key_scale"] or 1.0)
        drawn = p["value_mean"] + p["value_std"] * draw.normal((n, p["kv_heads"], value_width(p)))
        values[row] = drawn / (p["value_scale"] or 1.0)
    share_tokens(p, keys, values)
    limit = format_of(kv_dtype).max_value
    keys, values = ({r: np.clip(x, -limit, limit) for r, x in rows.items()} for rows in (keys, values))
    query = p["temperature"] * Stream(case_id, "query").normal((table.num_tokens, p["q_heads"], p["head_dim"]))
    problem = assemble(case_id, p, table, query=query, keys=keys, values=values, poison=poison, exact=False)
    return Vector(family="generic", problem=problem, facts=Facts(statistic=p["statistic"]))


def steep(case_id: str, params: Mapping[str, Any], poison: str) -> Vector:
    """One token `drop` nats above all others, with tiny values; the others' are huge, so that they make the answer.

    The answer's relative error is then drop times the scale's, which shows a scale rounded to 16 bits even where P is
    rounded to 16 bits too. In float16 the others' weights must stay normal numbers: a drop of at most 9.
    """
    p = validate(params, STEEP_SCHEMA)
    refuse(p, "a steep vector", "share", "value_head_dim")
    table = build_table(p, Stream(case_id, "pages"))
    d, kv_heads, dtype = p["head_dim"], p["kv_heads"], p["dtype"]
    scale = float(np.float32(p["scale"])) * (p["key_scale"] or 1.0)
    query = round_to(Stream(case_id, "query").integers(8, 17, (table.num_tokens, p["q_heads"], d)) / 8.0, dtype)
    step = float(round_to(p["drop"] / (scale * 1.5 * d), p["kv_dtype"] or dtype))
    # Large enough that the answer stays a normal number, small enough that every product does.
    exponent = min(int(p["drop"] / 0.6931), int(np.log2(format_of(p["kv_dtype"] or dtype).max_value)) - 1)
    keys, values = {}, {}
    for row, n in enumerate(p["kv_lens"]):
        draw = Stream(case_id, f"row {row}")
        keys[row] = np.full((n, kv_heads, d), -step)
        values[row] = draw.integers(64, 128, (n, kv_heads, d)) * 2.0 ** (exponent - 7)
        if n:
            keys[row][0] = 0.0
            values[row][0] = 2.0 ** (exponent - 7) * np.exp2(np.floor(-1.4427 * p["drop"]) - 4)
    problem = assemble(case_id, p, table, query=query, keys=keys, values=values, poison=poison, exact=True)
    return Vector(family="steep", problem=problem)
