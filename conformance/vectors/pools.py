"""Pools, page tables and poison: everything about a problem but the numbers in its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from conformance.case import AttendProblem
from conformance.formats import decode, encode, format_of
from conformance.stream import Stream
from paged.common import SENTINEL_PAGE, AttentionSpec, PageTable, build_page_table, pages_for
from paged.common.errors import InvalidInputError

POISONS = ("any_bits", "finite")


def poison_words(stream: Stream, shape: Sequence[int], dtype: str, poison: str) -> np.ndarray:
    """Words that must never reach an output: NaN and infinities, or only large finite numbers of both signs."""
    if poison not in POISONS:
        raise InvalidInputError(f"poison must be one of {', '.join(POISONS)}; got {poison!r}.")
    f = format_of(dtype)
    high = int(encode(min(3.0e4, f.max_value / 2), dtype))
    finite = [high, high - 1, high - 2]
    if poison == "finite":
        patterns = finite
    elif f.infinity is None:
        patterns = [f.nan, f.nan, *finite]
    else:
        patterns = [f.nan, f.nan | 1, f.infinity, f.nan]
    signed = patterns + [p | f.sign_bit for p in patterns]
    return stream.choice(np.array(signed, f.word_type), shape).astype(f.word_type)


def page_lists(params: Mapping[str, Any], stream: Stream) -> list[list[int]]:
    """Pages of every row, disjoint, in the order that `page_order` asks for, never ascending by accident alone.

    `shuffled`: any pages; `descending`: consecutive from the top; `high`: the last pages, shuffled; `strided`: every
    row's pages apart by the number of rows, as when requests grow in turn.
    """
    need = [int(n) for n in pages_for(np.asarray(params["kv_lens"], np.int64), params["page"])]
    total, usable = sum(need), params["num_pages"] - 1
    if total > usable:
        raise InvalidInputError(
            f"params.num_pages = {usable + 1} is too small: the rows need {total} pages and page 0."
        )
    order = params["page_order"]
    if order == "shuffled":
        ids = 1 + stream.permutation(usable)[:total]
    elif order == "high":
        ids = usable - stream.permutation(total)
    else:
        ids = usable - np.arange(total)
    if order == "strided":
        turns = sorted((j, r) for r, count in enumerate(need) for j in range(count))
        lists: list[list[int]] = [[] for _ in need]
        for page, (_, r) in zip(ids.tolist(), turns):
            lists[r].append(page)
        return lists
    ends = np.cumsum(need)
    return [ids[end - count : end].tolist() for end, count in zip(ends, need)]


def share_pages(params: Mapping[str, Any], lists: list[list[int]]) -> None:
    """Let rows begin with pages of other rows, as `share` asks: `[row, of, pages]`, whole pages that neither writes."""
    rows = len(lists)
    for row, of, count in params["share"] or ():
        for r in (row, of):
            before = params["kv_lens"][r] - params["query_lens"][r] if r < rows else 0
            if not 0 < count <= before // params["page"] or row == of:
                raise InvalidInputError(
                    f"params.share = [{row}, {of}, {count}]: row {r} has {before // params['page']} whole pages before "
                    "its new tokens; share at most so many, between two rows."
                )
        lists[row][:count] = lists[of][:count]


def share_tokens(params: Mapping[str, Any], *tokens: Mapping[int, np.ndarray]) -> None:
    """Give rows that share pages the tokens that lie there."""
    for row, of, count in params["share"] or ():
        for each in tokens:
            each[row][: count * params["page"]] = each[of][: count * params["page"]]


def build_table(params: Mapping[str, Any], stream: Stream) -> PageTable:
    """The step's table, padded to the rung if there is one."""
    lists = page_lists(params, stream)
    share_pages(params, lists)
    table = build_page_table(
        query_lens=list(params["query_lens"]),
        kv_lens=list(params["kv_lens"]),
        pages=lists,
        tokens_per_page=params["page"],
        num_pages=params["num_pages"],
    )
    return table if params["rung"] is None else table.pad(**params["rung"])


def spec_of(params: Mapping[str, Any]) -> AttentionSpec:
    """The options of the call."""
    return AttentionSpec(
        scale=params["scale"], causal=params["causal"], window=params["window"], soft_cap=params["soft_cap"]
    )


def owned_slots(problem: AttendProblem) -> np.ndarray:
    """(layers × pages, tokens per page) bool: slots that hold a token of some row, in the layer attended to."""
    table = problem.table
    owned = np.zeros((problem.num_layers * table.num_pages, table.tokens_per_page), bool)
    for row in range(table.num_rows):
        page, offset = slots_of(table, row)
        owned[problem.layer * table.num_pages + page, offset] = True
    return owned


def slots_of(table: PageTable, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Page and offset of each token of a row, in order."""
    j = np.arange(int(table.kv_lens[row]))
    return table.pages_of(row)[j // table.tokens_per_page].astype(np.int64), j % table.tokens_per_page


def live_tokens(table: PageTable) -> list[tuple[int, int, int]]:
    """(row, token, position) of every token that sees something."""
    positions = table.positions()
    out = []
    for row in range(table.num_rows):
        tokens = range(int(table.query_offsets[row]), int(table.query_offsets[row + 1]))
        out += [(row, token, int(positions[token])) for token in tokens if positions[token] >= 0]
    return out


def visible_range(table: PageTable, row: int, position: int, spec: AttentionSpec) -> tuple[int, int]:
    """First visible position and one past the last, of a token at `position`."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    return first, position + 1 if spec.causal else int(table.kv_lens[row])


def assemble(
    case_id: str,
    params: Mapping[str, Any],
    table: PageTable,
    *,
    query: np.ndarray,
    keys: Mapping[int, np.ndarray],
    values: Mapping[int, np.ndarray],
    poison: str,
    exact: bool,
) -> AttendProblem:
    """The problem whose row r holds `keys[r]`, `values[r]` (n, k, d) float64, everything else being poison.

    The sentinel pages hold finite poison always, as do the queries of tokens that belong to no row. With `exact`, a
    number that the dtype cannot hold is an error of the generator and is refused.
    """
    dtype, kv_dtype = params["dtype"], params["kv_dtype"] or params["dtype"]
    shape = params["layers"] * params["num_pages"], params["page"], params["kv_heads"]
    pools = []
    for name, rows, width in (("keys", keys, params["head_dim"]), ("values", values, value_width(params))):
        pool = poison_words(Stream(case_id, f"poison {name}"), (*shape, width), kv_dtype, poison)
        sentinels = pool[SENTINEL_PAGE :: params["num_pages"]]
        sentinels[...] = poison_words(Stream(case_id, f"sentinel {name}"), sentinels.shape, kv_dtype, "finite")
        for row, tokens in rows.items():
            page, offset = slots_of(table, row)
            pool[params["layer"] * params["num_pages"] + page, offset] = _encode(tokens, kv_dtype, name, exact)
        pools.append(pool)
    words = poison_words(Stream(case_id, "poison query"), query.shape, dtype, "finite")
    live = [token for _, token, _ in live_tokens(table)]
    words[live] = _encode(query[live], dtype, "query", exact)
    return AttendProblem(
        dtype=dtype,
        kv_dtype=kv_dtype,
        table=table,
        spec=spec_of(params),
        query=words,
        keys=pools[0],
        values=pools[1],
        num_layers=params["layers"],
        layer=params["layer"],
        sinks=sinks_of(case_id, params),
        key_scale=params["key_scale"],
        value_scale=params["value_scale"],
    )


def value_width(params: Mapping[str, Any]) -> int:
    """Elements of a value's head."""
    return params["value_head_dim"] or params["head_dim"]


def sinks_of(case_id: str, params: Mapping[str, Any]) -> np.ndarray | None:
    """The sinks of the case: multiples of 1/64 in −4 .. 4, or zeros."""
    if params["sinks"] is None:
        return None
    if params["sinks"] == "zero":
        return np.zeros(params["q_heads"], np.float32)
    return (Stream(case_id, "sinks").integers(-256, 257, params["q_heads"]) / 64.0).astype(np.float32)


def _encode(x: np.ndarray, dtype: str, name: str, exact: bool) -> np.ndarray:
    words = encode(x, dtype)
    if exact and not np.array_equal(decode(words, dtype), x):
        bad = np.asarray(x)[decode(words, dtype) != x]
        raise InvalidInputError(f"{name} of this vector need {bad.flat[0]!r}, which {dtype} does not hold.")
    return words
