"""Census: all logits are 0, so the output is a histogram of the tokens that were read.

Token j of a row marks dim j mod e of the values' head with c · (1 + KV head), c a power of two, during phase j // e;
every other element is +0. The output is then mark / count for each token seen, and 0 elsewhere: a token missed, read
twice, or read under the wrong mask, and a wrong count of tokens, all show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.formats import cell
from conformance.stream import Stream
from conformance.vectors.params import ATTEND, Param, integer, refuse, validate
from conformance.vectors.pools import assemble, build_table, live_tokens, value_width, visible_range
from conformance.vectors.vector import Facts, Vector
from paged.common.errors import InvalidInputError

SCHEMA = {**ATTEND, "phase": Param(integer(0, 255), 0)}

TIE_MARGIN = 2.0**-18
"""Relative error that float32 arithmetic is granted: a quotient this close to a rounding tie may go either way."""


def census(case_id: str, params: Mapping[str, Any], poison: str) -> Vector:
    """See the module. Sinks must be zero (each counts as one more token) or absent."""
    p = validate(params, SCHEMA)
    if p["sinks"] == "random":
        raise InvalidInputError("params.sinks must be 'zero' for a census: any other logit spoils the count.")
    refuse(p, "a census", "share")
    table = build_table(p, Stream(case_id, "pages"))
    d, e, kv_heads, value_scale = p["head_dim"], value_width(p), p["kv_heads"], p["value_scale"] or 1.0
    keys, values, marks = {}, {}, {}
    for row, n in enumerate(p["kv_lens"]):
        keys[row] = Stream(case_id, f"keys {row}").integers(-8, 9, (n, kv_heads, d)).astype(np.float64)
        marks[row] = 2.0 ** np.ceil(np.log2(max(n, 1))) * (1 + np.arange(kv_heads))
        values[row] = np.zeros((n, kv_heads, e))
        for j in range(p["phase"] * e, min(n, (p["phase"] + 1) * e)):
            values[row][j, :, j % e] = marks[row]
    query = np.zeros((table.num_tokens, p["q_heads"], d))
    problem = assemble(case_id, p, table, query=query, keys=keys, values=values, poison=poison, exact=True)

    group = p["q_heads"] // kv_heads
    answer, counts = np.zeros((*query.shape[:2], e)), np.zeros(table.num_tokens, np.int64)
    for row, token, position in live_tokens(table):
        first, end = visible_range(table, row, position, problem.spec)
        counts[token] = end - first + (p["sinks"] is not None)
        summed = values[row][first:end].sum(0)
        answer[token] = np.repeat(summed, group, axis=0) * value_scale / counts[token]
    explain = {"phase": p["phase"], "marks": marks, "counts": counts, "value_scale": value_scale, "group": group}
    return Vector(
        family="census",
        problem=problem,
        predicted=cell(answer * (1 - TIE_MARGIN), answer * (1 + TIE_MARGIN), p["dtype"]),
        facts=Facts(exact_logits=True),
        explain=explain,
    )
