"""The reference against the oracle, bit for bit: `PYTHONPATH=. python tools/reference_against_oracle.py 1000000`.

Two programs that share no code answer the same problems. The oracle bounds its own error; where rounding its value
minus and plus the bound gives one word, the element is decided and the reference must return that word, otherwise one
of the two. Prints for every dtype and family how many elements there were, decided, undecided, and wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from conformance import oracle
from conformance.case import AttendProblem
from conformance.formats import encode, format_of, ordinal
from paged.backends.metadata import table_arrays
from paged.backends.protocol import AttentionExtras, KvArrays, Rung
from paged.common import AttentionSpec, build_page_table
from paged.reference.backend import make_backend

BACKEND = make_backend()
DTYPES = ("bfloat16", "float16", "float32")
PLAIN = AttentionSpec(scale=0.125)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Shapes and options of problems that differ in their numbers only, so that one compilation serves all."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (64, 64)
    size: int = 16
    spec: AttentionSpec = PLAIN
    logit_spread: float = 1.0
    value_mean: float = 0.0
    value_spread: float = 1.0
    sinks: bool = False
    kv_dtype: str | None = None
    key_scale: float | None = None
    value_scale: float | None = None


FAMILIES = {
    "generic": Family(query_lens=(40, 1, 7), kv_lens=(100, 300, 64)),
    "decode, page 1": Family(query_lens=(1,) * 24, kv_lens=tuple(range(5, 605, 25)), size=1),
    "window, cap, sinks": Family(
        query_lens=(50, 3),
        kv_lens=(50, 200),
        heads=(6, 2),
        dims=(80, 96),
        spec=AttentionSpec(scale=80**-0.5, window=33, soft_cap=5.0),
        sinks=True,
    ),
    "peaked": Family(query_lens=(48,), kv_lens=(400,), logit_spread=12.0, dims=(128, 128)),
    "not causal": Family(
        query_lens=(20, 20), kv_lens=(33, 90), heads=(4, 4), dims=(32, 128), spec=AttentionSpec(scale=0.3, causal=False)
    ),
    "mean 1": Family(query_lens=(48,), kv_lens=(512,), value_mean=1.0, value_spread=0.25),
    "fp8 pages": Family(
        query_lens=(30, 1), kv_lens=(80, 200), kv_dtype="float8_e4m3fn", key_scale=0.3, value_scale=1.7
    ),
}


@dataclasses.dataclass(frozen=True)
class Count:
    """Elements of outputs and LSEs together."""

    elements: int = 0
    undecided: int = 0
    wrong: int = 0

    def __str__(self) -> str:
        return f"{self.elements:9} elements {self.undecided:4} undecided {self.wrong} wrong"

    def __add__(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))


def problem_of(family: Family, dtype: str, seed: int) -> AttendProblem:
    """Normal draws; every slot that no row owns is NaN."""
    random = np.random.default_rng([seed, *family.query_lens])
    kv_dtype = family.kv_dtype or dtype
    need = [-(-n // family.size) for n in family.kv_lens]
    order = (1 + random.permutation(sum(need))).tolist()
    table = build_page_table(
        query_lens=list(family.query_lens),
        kv_lens=list(family.kv_lens),
        pages=[[order.pop() for _ in range(n)] for n in need],
        tokens_per_page=family.size,
        num_pages=1 + sum(need),
    )

    def pool(width: int, mean: float, spread: float) -> np.ndarray:
        shape = (table.num_pages, family.size, family.heads[1], width)
        words = encode(mean + spread * random.standard_normal(shape), kv_dtype)
        owned = np.zeros(shape[:2], bool)
        for row, n in enumerate(family.kv_lens):
            at = np.arange(n)
            owned[table.pages_of(row)[at // family.size], at % family.size] = True
        return np.where(owned[:, :, None, None], words, np.array(format_of(kv_dtype).nan, words.dtype))

    query = family.logit_spread * random.standard_normal((table.num_tokens, family.heads[0], family.dims[0]))
    return AttendProblem(
        dtype=dtype,
        kv_dtype=kv_dtype,
        table=table,
        spec=family.spec,
        query=encode(query, dtype),
        keys=pool(family.dims[0], 0.0, 1.0),
        values=pool(family.dims[1], family.value_mean, family.value_spread),
        sinks=random.standard_normal(family.heads[0]).astype(np.float32) if family.sinks else None,
        key_scale=family.key_scale,
        value_scale=family.value_scale,
    )


def reference_words(problem: AttendProblem) -> tuple[np.ndarray, np.ndarray]:
    """Words of the reference's output, and its float32 LSE."""
    rung = Rung.of(problem.table)
    scalar = lambda x: None if x is None else jnp.float32(x)  # noqa: E731
    extras = AttentionExtras(
        sinks=None if problem.sinks is None else jnp.asarray(problem.sinks),
        key_scale=scalar(problem.key_scale),
        value_scale=scalar(problem.value_scale),
    )
    pool = KvArrays(jnp.asarray(problem.keys), jnp.asarray(problem.values), words_of=problem.kv_dtype)
    query = jax.lax.bitcast_convert_type(jnp.asarray(problem.query), jnp.dtype(problem.dtype))
    arrays = BACKEND.plan_arrays(rung, table_arrays(problem.table))
    out, lse = BACKEND.attend(query, pool, 0, rung, arrays, problem.spec, extras)
    return np.asarray(out).view(problem.query.dtype), np.asarray(lse)


def compare(problem: AttendProblem) -> Count:
    """Outputs and LSEs of the reference held against the oracle's intervals."""
    answer = oracle.attend(problem)
    out, lse = reference_words(problem)
    return _within(out, answer.output, answer.output_error, problem.dtype) + _within(
        lse.view(np.uint32), answer.lse, answer.lse_error, "float32"
    )


def _within(words: np.ndarray, value: np.ndarray, error: np.ndarray, dtype: str) -> Count:
    low, high, got = (ordinal(w, dtype) for w in (encode(value - error, dtype), encode(value + error, dtype), words))
    wrong = (got < low) | (got > high) | (words == format_of(dtype).sign_bit)
    return Count(words.size, int(np.count_nonzero(low != high)), int(np.count_nonzero(wrong)))


def counts(dtype: str, elements: int) -> Iterator[tuple[str, Count]]:
    """Every family in turn until `elements` were compared."""
    total, share = 0, -(-elements // len(FAMILIES))
    for name, family in FAMILIES.items():
        count = Count()
        while count.elements < share:
            count += compare(problem_of(family, dtype, seed=total))
            total += 1
        yield name, count


def main() -> int:
    """1 if the reference was wrong anywhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("elements", type=int, nargs="?", default=1_000_000, help="output elements for each dtype")
    options = parser.parse_args()
    wrong = 0
    for dtype in DTYPES:
        total = Count()
        for name, count in counts(dtype, options.elements):
            print(
                f"{dtype:9} {name:20} {count.elements:9} elements {count.undecided:4} undecided {count.wrong} wrong",
                flush=True,
            )
            total += count
        print(
            f"{dtype:9} {'all':20} {total.elements:9} elements {total.undecided:4} undecided {total.wrong} wrong",
            flush=True,
        )
        wrong += total.wrong
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
