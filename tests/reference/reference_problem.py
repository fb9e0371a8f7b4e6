"""Small problems for tests of the reference: tokens first, pages second, so that one can be laid out in many ways."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged.backends.moves import pool_structs
from paged.backends.protocol import AttentionExtras, KvArrays, Rung, TableArrays
from paged.common import AttentionSpec, PageTable, StorageLayout, build_page_table
from paged.reference.attend import exact, token_rows
from paged.reference.backend import make_backend

BACKEND = make_backend()
DTYPES = ("bfloat16", "float16", "float32")


def bits(x) -> np.ndarray:
    """The words of an array of any dtype, on the host."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def table_arrays(table: PageTable) -> TableArrays:
    return TableArrays(**{f.name: jnp.asarray(getattr(table, f.name)) for f in dataclasses.fields(TableArrays)})


def filled(layout: StorageLayout, word: int) -> KvArrays:
    """A pool that holds one word everywhere."""
    structs = pool_structs(layout, BACKEND.capabilities)
    return jax.tree.map(lambda s: jnp.asarray(np.full(s.shape, word, s.dtype)), structs)


def poison(layout: StorageLayout) -> KvArrays:
    """A pool in which every element is NaN, or for int8 its largest number."""
    nans = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0, "float8_e5m2": 0x7E, "float8_e4m3fn": 0x7F}
    return filled(layout, nans.get(layout.dtype, 0x7F if layout.dtype == "int8" else 0x80))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of tokens with their keys and values, before anything is paged.

    `queries[r]` (q, h, d) belong to the last q of the n tokens of `keys[r]` (n, k, d), `values[r]` (n, k, e).
    """

    queries: list[np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    dtype: str
    kv_dtype: str

    @classmethod
    def random(cls, query_lens, kv_lens, *, heads=(4, 2), dims=(16, 16), dtype="bfloat16", kv_dtype=None, seed=0):
        random = np.random.default_rng(seed)
        kv_dtype = kv_dtype or dtype

        def draw(name, *shape):
            return random.standard_normal(shape).astype(jnp.dtype(name))

        return cls(
            queries=[draw(dtype, q, heads[0], dims[0]) for q in query_lens],
            keys=[draw(kv_dtype, n, heads[1], dims[0]) for n in kv_lens],
            values=[draw(kv_dtype, n, heads[1], dims[1]) for n in kv_lens],
            dtype=dtype,
            kv_dtype=kv_dtype,
        )

    def rows(self, *picked: int) -> Batch:
        """Some rows, in the order given."""
        lists = {name: [getattr(self, name)[r] for r in picked] for name in ("queries", "keys", "values")}
        return dataclasses.replace(self, **lists)

    def and_rows(self, other: Batch) -> Batch:
        """The rows of both."""
        lists = {name: [*getattr(self, name), *getattr(other, name)] for name in ("queries", "keys", "values")}
        return dataclasses.replace(self, **lists)

    def cut(self, row: int, start: int, stop: int) -> Batch:
        """One row at an earlier step: its tokens `start` .. `stop` − 1 are the new ones, none lie ahead."""
        first = len(self.keys[row]) - len(self.queries[row])
        return dataclasses.replace(
            self,
            queries=[self.queries[row][start - first : stop - first]],
            keys=[self.keys[row][:stop]],
            values=[self.values[row][:stop]],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laid:
    """A batch in pages."""

    query: jax.Array
    pool: KvArrays
    table: PageTable
    layout: StorageLayout
    layer: int

    @property
    def arrays(self) -> TableArrays:
        return table_arrays(self.table)

    @property
    def page_base(self) -> int:
        return self.layer * self.layout.num_pages


COMMON = {"rows": 4, "tokens": 8, "listed_pages": 16, "max_query_len": 8, "max_kv_len": 64}
"""A rung that most small problems fit, so that they share one compiled program."""


def lay(
    batch: Batch, *, size=4, seed=0, pad=None, num_pages=None, num_layers=1, layer=0, shards=1, poisoned=True
) -> Laid:
    """Pages of `size` tokens in an order drawn from `seed`; `pad` is the keyword arguments of `PageTable.pad`.

    What no row owns holds NaN, or zeros if not `poisoned`.
    """
    kv_lens = [len(k) for k in batch.keys]
    need = [-(-n // size) for n in kv_lens]
    num_pages = num_pages or 4 + sum(need)
    order = (1 + np.random.default_rng(seed).permutation(num_pages - 1)).tolist()
    pages = [[order.pop() for _ in range(n)] for n in need]
    table = build_page_table(
        query_lens=[len(q) for q in batch.queries],
        kv_lens=kv_lens,
        pages=pages,
        tokens_per_page=size,
        num_pages=num_pages,
    )
    some_keys, some_values = batch.keys[0], batch.values[0]
    layout = StorageLayout(
        num_layers=num_layers,
        num_pages=num_pages,
        tokens_per_page=size,
        num_kv_heads=some_keys.shape[1],
        head_dim=some_keys.shape[2],
        value_head_dim=some_values.shape[2],
        dtype=batch.kv_dtype,
        kv_head_shards=shards,
    )
    empty = poison(layout) if poisoned else filled(layout, 0)
    keys, values = (np.array(x) for x in (empty.keys, empty.values))
    for row, ids in enumerate(pages):
        at = np.arange(kv_lens[row])
        where = (layer * num_pages + np.array(ids, np.int64)[at // size], at % size)
        keys[where], values[where] = bits(batch.keys[row]), bits(batch.values[row])
    if pad is not None:
        table = table.pad(**pad)
    query = np.concatenate(batch.queries)
    query = np.concatenate([query, np.full((table.num_tokens - len(query), *query.shape[1:]), np.nan, query.dtype)])
    pool = dataclasses.replace(empty, keys=jnp.asarray(keys), values=jnp.asarray(values))
    return Laid(query=jnp.asarray(query), pool=pool, table=table, layout=layout, layer=layer)


def attend(laid: Laid, spec: AttentionSpec, extras: AttentionExtras | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE of the backend."""
    base = jnp.int32(laid.page_base)
    out, lse = _attend(laid.query, laid.pool, base, laid.arrays, Rung.of(laid.table), spec, extras or AttentionExtras())
    return np.asarray(out), np.asarray(lse)


def attend_float64(laid: Laid, spec: AttentionSpec, extras: AttentionExtras | None = None):
    """Words of output and LSE before the rounding: where these do not move, nothing does."""
    base = jnp.int32(laid.page_base)
    with jax.enable_x64(True):
        words = _exact(laid.query, laid.pool, base, laid.arrays, spec, extras or AttentionExtras())
        return tuple(np.asarray(x) for x in words)


@functools.partial(jax.jit, static_argnames=("rung", "spec"))
def _attend(query, pool, base, table, rung, spec, extras):
    static = BACKEND.static_plan(rung, spec)
    return BACKEND.attend(query, pool, base, static, BACKEND.plan_arrays(static, table), spec, extras)


@functools.partial(jax.jit, static_argnames="spec")
def _exact(query, pool, base, table, spec, extras):
    out, lse = exact(query, pool, base, token_rows(table), spec, extras)
    return lax.bitcast_convert_type(out, jnp.uint64), lax.bitcast_convert_type(lse, jnp.uint64)
