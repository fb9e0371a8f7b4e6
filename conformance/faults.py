"""The faults behind `conformance.mutants`: the reference with one thing wrong.

Most faults change what the reference is given: its specification, its rows, its pool. Those of softmax and accumulation
need a kernel to be wrong in, and sit in `conformance.broken_kernel`, a plain float32 kernel with tiles and splits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from conformance import broken_kernel
from conformance.mutants import MUTANTS
from paged.backends.moves import from_storage, rows_of, to_storage
from paged.backends.protocol import AttentionBackend, AttentionExtras, KvArrays, Rung, TableArrays
from paged.common import AttentionSpec, Capabilities
from paged.common.errors import InvalidInputError
from paged.reference.attend import TokenRows


@dataclasses.dataclass
class Call:
    """Arguments of one attend call, for a fault to change before the reference sees them."""

    query: Any
    pool: KvArrays
    page_base: Any
    rung: Rung
    table: TableArrays
    rows: TokenRows
    spec: AttentionSpec
    extras: AttentionExtras

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.query.shape[-1]

    @property
    def row_of_token(self) -> jax.Array:
        """Row of each token, the number of rows for padding."""
        return rows_of(self.table.query_offsets, self.rung.tokens)

    @property
    def row_of_entry(self) -> jax.Array:
        """Row of each entry of the page list, the number of rows for padding."""
        return rows_of(self.table.page_offsets, self.rung.listed_pages)

    def list_pages(self, ids: jax.Array) -> None:
        """Use another page list of the same length."""
        self.rows = dataclasses.replace(self.rows, page_ids=self.rows.page_ids.at[: self.rung.listed_pages].set(ids))

    def respecify(self, **changes: Any) -> None:
        """Use another specification."""
        self.spec = dataclasses.replace(self.spec, **changes)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What one mutant does; None is what the reference does.

    - `before(call)` changes the arguments of attend; `after(call, out, lse)` its results.
    - `attend(call)` takes the place of attend altogether.
    - `append(pool, key, value, slots, rung)`, `scrub(pool, pages)`, `copy(pool, source, target)` take the place of
      the movers.
    - `numerics`: the numeric model that the mutant declares, where it is not the reference's.
    """

    before: Callable[[Call], None] | None = None
    after: Callable[[Call, Any, Any], tuple[Any, Any]] | None = None
    attend: Callable[[Call], tuple[Any, Any]] | None = None
    append: Callable[..., KvArrays] | None = None
    scrub: Callable[..., KvArrays] | None = None
    copy: Callable[..., KvArrays] | None = None
    numerics: str | None = None


@dataclasses.dataclass(frozen=True)
class Broken:
    """A backend of the protocol: the reference with the fault `mutant`. Hashable by name."""

    inner: AttentionBackend
    mutant: str

    @property
    def name(self) -> str:
        """The reference's name and the fault's."""
        return f"{self.inner.name}+{self.mutant}"

    @property
    def fault(self) -> Fault:
        """The fault."""
        return FAULTS[self.mutant]

    @property
    def capabilities(self) -> Capabilities:
        """The reference's declaration; a mutant claims everything that it breaks."""
        declared = self.inner.capabilities
        return declared if self.fault.numerics is None else dataclasses.replace(declared, numerics=self.fault.numerics)

    def static_plan(self, rung: Rung, spec: AttentionSpec) -> Hashable:
        """The rung beside the reference's plan."""
        return rung, self.inner.static_plan(rung, spec)

    def plan_arrays(self, static: Any, table: TableArrays) -> Any:
        """The table beside the reference's arrays."""
        return table, self.inner.plan_arrays(static[1], table)

    def append(self, pool: KvArrays, key: Any, value: Any, slots: Any, static: Any, arrays: Any) -> KvArrays:
        """The reference's, unless that is what is broken."""
        if self.fault.append is not None:
            return self.fault.append(pool, key, value, slots, static[0])
        return self.inner.append(pool, key, value, slots, static[1], arrays[1])

    def attend(
        self, query: Any, pool: KvArrays, page_base: Any, static: Any, arrays: Any, spec: Any, extras: Any
    ) -> tuple[Any, Any]:
        """The reference's, with the fault before it, after it or in its place."""
        call = Call(query, pool, page_base, static[0], arrays[0], arrays[1], spec, extras)
        if self.fault.before is not None:
            self.fault.before(call)
        if self.fault.attend is not None:
            return self.fault.attend(call)
        out, lse = self.inner.attend(
            call.query, call.pool, call.page_base, static[1], call.rows, call.spec, call.extras
        )
        return (out, lse) if self.fault.after is None else self.fault.after(call, out, lse)

    def scrub(self, pool: KvArrays, pages: Any) -> KvArrays:
        """The reference's, unless that is what is broken."""
        return (self.fault.scrub or self.inner.scrub)(pool, pages)

    def copy_pages(self, pool: KvArrays, source: Any, target: Any) -> KvArrays:
        """The reference's, unless that is what is broken."""
        return (self.fault.copy or self.inner.copy_pages)(pool, source, target)


def broken(mutant: str, reference: AttentionBackend) -> Broken:
    """The mutant of that name. Raises `InvalidInputError` unless it exists and `reference` is the reference."""
    if mutant not in MUTANTS:
        raise InvalidInputError(f"mutant must be one of {', '.join(MUTANTS)}; got {mutant!r}.")
    if reference.name != "reference":
        raise InvalidInputError(f"mutants are broken versions of the reference; got the backend {reference.name!r}.")
    return Broken(reference, mutant)


FAULTS: dict[str, Fault] = {"honest": Fault(), "honest_kernel": Fault(attend=broken_kernel.host(), numerics="N0+xla")}
"""Every fault by its mutant's name, and two that are none: what the judge must not catch."""


def _before(name: str) -> Callable[[Callable[[Call], None]], Callable[[Call], None]]:
    def keep(function: Callable[[Call], None]) -> Callable[[Call], None]:
        FAULTS[name] = Fault(before=function)
        return function

    return keep


def _after(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS[name] = Fault(after=function)
        return function

    return keep


def _append(name: str) -> Callable[[Callable[..., KvArrays]], Callable[..., KvArrays]]:
    def keep(function: Callable[..., KvArrays]) -> Callable[..., KvArrays]:
        FAULTS[name] = Fault(append=function)
        return function

    return keep


# Scale


@_before("double_scale")
def _double_scale(call: Call) -> None:
    call.respecify(scale=call.spec.scale / math.sqrt(call.head_dim))


@_before("no_scale")
def _no_scale(call: Call) -> None:
    call.respecify(scale=1.0)


@_before("scale_padded_head_dim")
def _scale_padded_head_dim(call: Call) -> None:
    d = call.head_dim
    call.respecify(scale=call.spec.scale * math.sqrt(d / (d + d // 4)))


@_before("scale_bf16")
def _scale_bf16(call: Call) -> None:
    call.respecify(scale=float(np.asarray(call.spec.scale, jnp.bfloat16)))


@_before("log2e_twice")
def _log2e_twice(call: Call) -> None:
    call.respecify(scale=call.spec.scale * math.log2(math.e))


# Lengths, masks and windows


@_before("last_page_len_minus_1")
def _last_page_len_minus_1(call: Call) -> None:
    rows = call.rows
    call.rows = dataclasses.replace(rows, kv_len=jnp.maximum(rows.kv_len - 1, jnp.minimum(rows.kv_len, 1)))


@_before("last_page_len_plus_1")
def _last_page_len_plus_1(call: Call) -> None:
    rows = call.rows
    more = jnp.where(rows.kv_len > 0, 1, 0)
    call.rows = dataclasses.replace(rows, kv_len=rows.kv_len + more, position=rows.position + more)


@_before("reads_padding")
def _reads_padding(call: Call) -> None:
    rows, size = call.rows, call.rung.tokens_per_page
    last = (rows.position == rows.kv_len - 1) & (rows.kv_len > 0)
    whole = -(-rows.kv_len // size) * size
    position = jnp.where(last, whole - 1, rows.position)
    call.rows = dataclasses.replace(rows, kv_len=whole, position=position)


@_before("no_causal_offset")
def _no_causal_offset(call: Call) -> None:
    row = jnp.minimum(call.row_of_token, call.rung.rows - 1)
    token = jnp.arange(call.rung.tokens, dtype=jnp.int32)
    call.rows = dataclasses.replace(call.rows, position=token - call.table.query_offsets[row])


@_before("causal_strict")
def _causal_strict(call: Call) -> None:
    if call.spec.causal:
        call.rows = dataclasses.replace(call.rows, position=jnp.maximum(call.rows.position - 1, 0))
        if call.spec.window is not None:
            call.respecify(window=max(call.spec.window - 1, 1))


@_before("not_causal")
def _not_causal(call: Call) -> None:
    call.respecify(causal=False)


@_before("window_plus_1")
def _window_plus_1(call: Call) -> None:
    if call.spec.window is not None:
        call.respecify(window=call.spec.window + 1)


@_before("window_minus_1")
def _window_minus_1(call: Call) -> None:
    if call.spec.window is not None:
        call.respecify(window=max(call.spec.window - 1, 1))


@_before("no_window")
def _no_window(call: Call) -> None:
    call.respecify(window=None)


# Soft cap and sinks


@_before("no_soft_cap")
def _no_soft_cap(call: Call) -> None:
    call.respecify(soft_cap=None)


@_before("cap_before_scale")
def _cap_before_scale(call: Call) -> None:
    if call.spec.soft_cap is not None:  # scale · c · tanh(qk / c) is a cap of scale · c after the scale
        call.respecify(soft_cap=call.spec.soft_cap * call.spec.scale)


@_before("no_sinks")
def _no_sinks(call: Call) -> None:
    call.extras = dataclasses.replace(call.extras, sinks=None)


@_before("sinks_scaled")
def _sinks_scaled(call: Call) -> None:
    if call.extras.sinks is not None:
        call.extras = dataclasses.replace(call.extras, sinks=call.extras.sinks * np.float32(call.spec.scale))


@_before("sink_per_split")
def _sink_per_split(call: Call) -> None:
    if call.extras.sinks is not None:
        call.extras = dataclasses.replace(call.extras, sinks=call.extras.sinks + np.float32(math.log(2)))


# Heads, slots and pages


def _gqa_modulo_order(heads: int, kv_heads: int) -> np.ndarray:
    """Place of query head h such that place // group = h mod KV heads."""
    h = np.arange(heads)
    return (h % kv_heads) * (heads // kv_heads) + h // kv_heads


@_before("gqa_modulo")
def _gqa_modulo(call: Call) -> None:
    source = np.argsort(_gqa_modulo_order(call.query.shape[1], call.pool.keys.shape[2]))
    call.query = call.query[:, source]
    if call.extras.sinks is not None:
        call.extras = dataclasses.replace(call.extras, sinks=call.extras.sinks[source])


def _gqa_modulo_back(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    place = _gqa_modulo_order(call.query.shape[1], call.pool.keys.shape[2])
    return out[:, place], lse[:, place]


FAULTS["gqa_modulo"] = Fault(before=_gqa_modulo, after=_gqa_modulo_back)


@_before("v_head0")
def _v_head0(call: Call) -> None:
    values = call.pool.values
    call.pool = dataclasses.replace(call.pool, values=jnp.broadcast_to(values[:, :, :1], values.shape))


@_before("k_as_v")
def _k_as_v(call: Call) -> None:
    call.pool = dataclasses.replace(call.pool, values=call.pool.keys)


@_before("v_next_slot")
def _v_next_slot(call: Call) -> None:
    """Token j's value is that of the token before it, the first one's that of the last."""
    size = call.rung.tokens_per_page
    flat = call.pool.values.reshape(-1, *call.pool.values.shape[2:])
    j = jnp.arange(max(call.rung.max_kv_len, 1), dtype=jnp.int32)[None]
    n = call.table.kv_lens[:, None]

    def slot(position: jax.Array) -> jax.Array:
        entry = jnp.clip(call.table.page_offsets[:-1, None] + position // size, 0, call.rung.listed_pages - 1)
        return (call.table.page_ids[entry] + call.page_base) * size + position % size

    target = jnp.where(j < n, slot(j), flat.shape[0])
    source = jnp.where(j < n, slot(jnp.where(j == 0, n - 1, j - 1)), 0)
    values = flat.at[target].set(flat[source], mode="drop").reshape(call.pool.values.shape)
    call.pool = dataclasses.replace(call.pool, values=values)


@_before("sorted_pages")
def _sorted_pages(call: Call) -> None:
    order = jnp.lexsort((call.table.page_ids, call.row_of_entry))
    call.list_pages(call.table.page_ids[order])


@_before("stale_table")
def _stale_table(call: Call) -> None:
    """The last page of every row is the one that it had before: here its first."""
    table, entry = call.table, jnp.arange(call.rung.listed_pages, dtype=jnp.int32)
    row = jnp.minimum(call.row_of_entry, call.rung.rows - 1)
    last = entry == table.page_offsets[row + 1] - 1
    call.list_pages(jnp.where(last, table.page_ids[table.page_offsets[row]], table.page_ids))


@_before("row0_table")
def _row0_table(call: Call) -> None:
    table, entry = call.table, jnp.arange(call.rung.listed_pages, dtype=jnp.int32)
    row = jnp.minimum(call.row_of_entry, call.rung.rows - 1)
    held = jnp.maximum(table.page_offsets[1], 1)
    call.list_pages(table.page_ids[(entry - table.page_offsets[row]) % held])


def _page_id_bits(bits: int) -> Callable[[Call], None]:
    def cut(call: Call) -> None:
        call.list_pages(call.table.page_ids & ((1 << bits) - 1))

    return cut


FAULTS["page_id_7_bits"] = Fault(before=_page_id_bits(7))
FAULTS["page_id_16_bits"] = Fault(before=_page_id_bits(16))


@_before("page_base_missing")
def _page_base_missing(call: Call) -> None:
    call.page_base = jnp.int32(0)


@_before("key_scale_ignored")
def _key_scale_ignored(call: Call) -> None:
    call.extras = dataclasses.replace(call.extras, key_scale=None)


@_before("value_scale_ignored")
def _value_scale_ignored(call: Call) -> None:
    call.extras = dataclasses.replace(call.extras, value_scale=None)


# Results


@_after("lse_base2")
def _lse_base2(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    return out, lse * np.float32(math.log2(math.e))


@_after("lse_without_max")
def _lse_of_max(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    lens = jnp.maximum(call.rows.kv_len, 1).astype(jnp.float32)
    return out, lse - jnp.log(lens)[:, None]


@_after("empty_row_nan")
def _empty_row_nan(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    empty = (call.rows.kv_len == 0) & (call.row_of_token < call.rung.rows)
    return jnp.where(empty[:, None, None], jnp.asarray(np.nan, out.dtype), out), lse


@_after("empty_row_lse")
def _empty_row_lse(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    empty = (call.rows.kv_len == 0) & (call.row_of_token < call.rung.rows)
    return out, jnp.where(empty[:, None], jnp.float32(np.inf), lse)


@_after("padding_not_zeroed")
def _padding_not_zeroed(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    padding = call.row_of_token >= call.rung.rows
    first = jnp.broadcast_to(out[:1], out.shape)
    return jnp.where(padding[:, None, None], first, out), lse


@_after("minus_zero")
def _minus_zero(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    return jnp.where(out == 0, -jnp.zeros_like(out), out), lse


# Append


def _scatter(pool: KvArrays, key: Any, value: Any, slots: Any, *, drop: Any = None) -> KvArrays:
    """Write tokens to absolute slots as they are, negative ones wrapped as an index wraps; `drop` are not written."""
    rows, size = pool.keys.shape[:2]
    row, offset = slots // size, slots % size
    if drop is not None:
        row = jnp.where(drop, rows, row)

    def write(stored: Any, new: Any) -> Any:
        return stored.at[row, offset].set(to_storage(new, stored.dtype), mode="drop")

    return dataclasses.replace(pool, keys=write(pool.keys, key), values=write(pool.values, value))


@_append("append_padding_wraps")
def _append_padding_wraps(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    return _scatter(pool, key, value, slots)


@_append("append_padding_slot0")
def _append_padding_slot0(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    """Padding goes to the first slot that is not the sentinel's."""
    return _scatter(pool, key, value, jnp.where(slots < 0, rung.tokens_per_page, slots))


@_append("append_slot_off_by_one")
def _append_slot_off_by_one(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    return _scatter(pool, key, value, slots + 1, drop=slots < 0)


@_append("append_drops_last")
def _append_drops_last(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    live = slots >= 0
    last = jnp.max(jnp.where(live, jnp.arange(slots.shape[0]), -1))
    return _scatter(pool, key, value, slots, drop=~live | (jnp.arange(slots.shape[0]) == last))


@_append("append_head_swapped")
def _append_head_swapped(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    return _scatter(pool, key[:, ::-1], value[:, ::-1], slots, drop=slots < 0)


@_append("append_adds")
def _append_adds(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    rows, size = pool.keys.shape[:2]
    row = jnp.where(slots < 0, rows, slots // size)

    def write(stored: Any, new: Any) -> Any:
        held = from_storage(stored[jnp.minimum(row, rows - 1), slots % size], pool.dtype)
        return stored.at[row, slots % size].set(to_storage(held + new, stored.dtype), mode="drop")

    return dataclasses.replace(pool, keys=write(pool.keys, key), values=write(pool.values, value))


@_append("append_page_not_looked_up")
def _append_page_not_looked_up(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    """Tokens go to the page after the one that the table names."""
    moved = (slots + rung.tokens_per_page) % (pool.keys.shape[0] * rung.tokens_per_page)
    return _scatter(pool, key, value, moved, drop=slots < 0)


@_append("append_canonicalises_zero")
def _append_canonicalises_zero(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    key, value = (jnp.where(x == 0, jnp.zeros_like(x), x) for x in (key, value))
    return _scatter(pool, key, value, slots, drop=slots < 0)


@_append("append_clears_page")
def _append_clears_page(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    rows, size = pool.keys.shape[:2]
    row = jnp.where(slots < 0, rows, slots // size)
    keys, values = (x.at[row].set(jnp.zeros((), x.dtype), mode="drop") for x in (pool.keys, pool.values))
    cleared = dataclasses.replace(pool, keys=keys, values=values)
    return _scatter(cleared, key, value, slots, drop=slots < 0)


@_append("append_keys_only")
def _append_keys_only(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    return dataclasses.replace(_scatter(pool, key, value, slots, drop=slots < 0), values=pool.values)


@_append("layer_offset_missing")
def _layer_offset_missing(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    inside = slots % (rung.num_pages * rung.tokens_per_page)
    return _scatter(pool, key, value, inside, drop=slots < 0)


# Pages


def _scrub_misses_values(pool: KvArrays, pages: Any) -> KvArrays:
    row = jnp.where(pages >= 0, pages, pool.keys.shape[0])
    return dataclasses.replace(pool, keys=pool.keys.at[row].set(jnp.zeros((), pool.keys.dtype), mode="drop"))


def _scrub_padding(pool: KvArrays, pages: Any) -> KvArrays:
    """A padding entry scrubs the last row, as a negative index does."""
    keys, values = (x.at[pages].set(jnp.zeros((), x.dtype)) for x in (pool.keys, pool.values))
    return dataclasses.replace(pool, keys=keys, values=values)


def _copy_reversed(pool: KvArrays, source: Any, target: Any) -> KvArrays:
    row = jnp.where(target >= 0, source, pool.keys.shape[0])

    def move(stored: Any) -> Any:
        return stored.at[row].set(stored[jnp.maximum(target, 0)], mode="drop")

    return dataclasses.replace(pool, keys=move(pool.keys), values=move(pool.values))


def _copy_in_turn(pool: KvArrays, source: Any, target: Any) -> KvArrays:
    """One page after the other, so that a later copy reads what an earlier one wrote."""

    def step(i: Any, arrays: tuple[Any, Any]) -> tuple[Any, Any]:
        row = jnp.where(target[i] >= 0, target[i], pool.keys.shape[0])
        keys, values = (x.at[row].set(x[jnp.maximum(source[i], 0)], mode="drop") for x in arrays)
        return keys, values

    keys, values = lax.fori_loop(0, source.shape[0], step, (pool.keys, pool.values))
    return dataclasses.replace(pool, keys=keys, values=values)


FAULTS["scrub_misses_values"] = Fault(scrub=_scrub_misses_values)
FAULTS["scrub_padding_wraps"] = Fault(scrub=_scrub_padding)
FAULTS["copy_reversed"] = Fault(copy=_copy_reversed)
FAULTS["copy_in_turn"] = Fault(copy=_copy_in_turn)

# Softmax, accumulation and splits

for _name in broken_kernel.FLAWS:
    FAULTS[_name] = Fault(attend=broken_kernel.host(_name), numerics="N0+xla")

from conformance import faults_devices, faults_geometry, faults_steps  # noqa: E402, F401, I001 (each adds its own)
from conformance import faults_gated  # noqa: E402, F401 (of all the others, so it comes last)
