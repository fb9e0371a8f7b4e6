"""Kernels broken on purpose, behind the same targets: each is caught, and named for the clause that it breaks.

XLA keeps the first handler of a name, so what a handler calls is replaced, not the handler.
"""

import itertools

import pytest
import torch

from aiter_triton import kernels, targets
from conformance.catalogue import load

TABLE_OF, APPEND, ATTEND, ROW_LENGTHS = kernels.table_of, kernels.append, kernels.attend, targets.row_lengths


def pages_backwards(offsets, ids, size):
    table, starts = TABLE_OF(offsets, ids, size), offsets.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        table[row, : end - start] = table[row, : end - start].flip(0)
    return table


def pages_of_the_first_row(offsets, ids, size):
    table = TABLE_OF(offsets, ids, size)
    return table[:1].expand(table.shape).contiguous()


def length_moved(by):
    return lambda *given: (ROW_LENGTHS(*given) + by).clamp(min=1)


def slots_moved(key, value, key_pool, value_pool, slots):
    APPEND(key, value, key_pool, value_pool, torch.where(slots >= 0, slots + 1, slots))


def padding_written(key, value, key_pool, value_pool, slots):
    APPEND(key, value, key_pool, value_pool, torch.where(slots >= 0, slots, 16))


def changed(**changes):
    def attend(query, key_pool, value_pool, out, **options):
        ATTEND(query, key_pool, value_pool, out, **{**options, **{k: f(options[k]) for k, f in changes.items()}})

    return attend


def keys_for_values(query, key_pool, value_pool, out, **options):
    ATTEND(query, key_pool, key_pool, out, **options)


WRONG = [
    ("pages in the wrong order", kernels, "table_of", pages_backwards, "attend/address/bf16/d128/mixed", "pages.3"),
    ("every row's pages", kernels, "table_of", pages_of_the_first_row, "attend/address/bf16/d128/mixed", "attend.12"),
    # The kernel takes a query's position from the row's length, so a wrong length moves the causal mask as well.
    ("a token short", targets, "row_lengths", length_moved(-1), "attend/census/bf16/d128/mixed", "attend.3"),
    ("a token more", targets, "row_lengths", length_moved(1), "attend/census/bf16/d128/mixed", "attend.3"),
    ("a token short, decode", targets, "row_lengths", length_moved(-1), "attend/census/bf16/d128/decode", "pages.3"),
    ("a token more, decode", targets, "row_lengths", length_moved(1), "attend/census/bf16/d128/decode", "attend.7"),
    ("the next slot", kernels, "append", slots_moved, "append/bf16/d128/step-mixed", "append.3"),
    ("padding written", kernels, "append", padding_written, "append/bf16/d128/step-mixed", "append.2"),
    ("keys rotated", kernels, "append", kernels.store, "append/bf16/d128/special", "append.1"),
    ("no scale", kernels, "attend", changed(scale=lambda _: 1.0), "attend/ladder/bf16/d128/decode", "attend.2"),
    (
        "a window less",
        kernels,
        "attend",
        changed(window=lambda n: n - 1),
        "attend/address/bf16/d128/window-19",
        "attend.4",
    ),
    ("K as V", kernels, "attend", keys_for_values, "attend/address/bf16/d128/mixed", "attend.1"),
]


@pytest.mark.parametrize(
    ("module", "name", "wrong", "case", "clause"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_a_broken_kernel_is_caught_and_named(session, monkeypatch, module, name, wrong, case, clause):
    monkeypatch.setattr(module, name, wrong)
    result = session.run(load().case(case))
    assert result.status == "fail", result
    assert result.clause == clause, result.diagnosis


@pytest.mark.parametrize("case", sorted({w[4] for w in WRONG}))
def test_the_honest_kernel_passes_the_same_cases(session, case):
    result = session.run(load().case(case))
    assert result.status == "pass", result.diagnosis
