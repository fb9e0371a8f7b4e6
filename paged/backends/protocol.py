"""The seam between models and kernels: what a backend is, and the arrays that cross it.

Shapes use one vocabulary: `t` query tokens, `h` query heads, `k` KV heads, `d` head dim, `e` value head dim, `p` pages
of all layers, `s` token slots per page, `r` rows (requests), `l` listed pages.

A backend is any object with the attributes and methods of `AttentionBackend`; it needs no base class. It must be
hashable, because it is a static argument of the jitted step: a frozen dataclass is the usual form.

Some methods are optional, and change no meaning. `prepare()` does beforehand what the first call would do otherwise,
such as compiling and loading libraries; it touches no device, and may be called more than once. It returns what a
certificate says of them besides the digest of the backend's sources, a JSON-able mapping (digests, the compiler's
words), or None. Raises `BuildFailedError` if a compiler failed, `BackendUnavailableError` if something is missing.

The others change only the number of kernels. `rotate_append(pool, heads, slots, layer, num_pages, static, arrays)`
takes `PackedHeads`, slots relative to a layer and the layer's index; it turns query and key, appends, and returns the
query, the pool and plan arrays for `attend` with page base 0. `layer_kernels(plan, sizes, dtype)` returns
`LayerKernels` for a `StepPlan`, or None; `runs_layers(sizes, dtype, kv_dtype)` says whether it returns them for every
step of a model, so that the engine need not lay out layers apart. `logits(x, norm, head, eps)` returns the float32
product of the head with the norm of x, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from paged.common.capabilities import Capabilities
from paged.common.checks import check_int, per_field
from paged.common.page_table import PageTable
from paged.common.spec import AttentionSpec


class KvArrays(eqx.Module):
    """The pool's arrays, "NHD". Row l × num_pages + p is page p of layer l.

    Stored as the layout's dtype, or, for a backend whose `pool_storage` is `"words"`, as unsigned integers of the same
    size holding the same bits; `words_of` then names the element type (uint16 could be bfloat16 or float16). It is
    static, so that what the bits mean travels with them.
    """

    keys: Shaped[Array, "p s k d"]
    values: Shaped[Array, "p s k e"]
    words_of: str | None = eqx.field(static=True, default=None)

    @property
    def dtype(self) -> jnp.dtype:
        """The element type, however it is stored."""
        return jnp.dtype(self.words_of or self.keys.dtype)


class TableArrays(eqx.Module):
    """A `PageTable` on the device, with the field meanings of `paged.common.PageTable`; page ids are layer-relative."""

    kv_lens: Int32[Array, " r"]
    last_page_len: Int32[Array, " r"]
    query_offsets: Int32[Array, " r+1"]
    page_offsets: Int32[Array, " r+1"]
    page_ids: Int32[Array, " l"]
    write_slots: Int32[Array, " t"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """Static shapes of one compiled program: a step of the ladder, plus the geometry of one layer.

    - `rows`, `tokens`, `listed_pages` are array lengths; `max_query_len` and `max_kv_len` bound every row.
    - `group_size` (query heads per KV head), `head_dim`, `kv_dtype`: geometry of heads, the same on every shard. None
      where whoever made the rung does not know; a backend whose plans depend on them then refuses, by name.
    """

    rows: int
    tokens: int
    listed_pages: int
    max_query_len: int
    max_kv_len: int
    tokens_per_page: int
    num_pages: int
    group_size: int | None = None
    head_dim: int | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        per_field(check_int, self, "rows", "tokens", "listed_pages", "max_query_len", "max_kv_len", minimum=0)
        per_field(check_int, self, "tokens_per_page", minimum=1)
        per_field(check_int, self, "num_pages", minimum=2)

    @classmethod
    def of(cls, table: PageTable) -> Rung:
        """The rung that a table, padded or not, exactly fills."""
        return cls(
            rows=table.num_rows,
            tokens=table.num_tokens,
            listed_pages=table.page_ids.shape[0],
            max_query_len=table.max_query_len,
            max_kv_len=table.max_kv_len,
            tokens_per_page=table.tokens_per_page,
            num_pages=table.num_pages,
        )

    def with_heads(self, *, group_size: int, head_dim: int, kv_dtype: str) -> Rung:
        """The same rung with the geometry of heads filled in."""
        return dataclasses.replace(self, group_size=group_size, head_dim=head_dim, kv_dtype=kv_dtype)


class AttentionExtras(eqx.Module):
    """Array options of attention; None where absent.

    - `sinks` (h,) float32: one logit per query head, neither scaled nor capped, in the denominator and in the LSE.
    - `key_scale`, `value_scale`: float32 scalars; a stored element x means x × scale.
    """

    sinks: Float[Array, " h"] | None = None
    key_scale: Float[Array, ""] | None = None
    value_scale: Float[Array, ""] | None = None


class PackedHeads(eqx.Module):
    """Query, key and value of a step's tokens as one product of the model leaves them, before rotary positions.

    - `packed` (t, k, g + 2, d): for each KV head the g query heads that read it, its key, its value. Grouped so, one
      stored weight serves any number of shards: each has its KV heads' rows together.
    - `cos`, `sin` (t, d / 2) float32: of the angles that turn the pairs (i, i + d / 2) of query and key.
    """

    packed: Float[Array, "t k g2 d"]
    cos: Float[Array, "t half"]
    sin: Float[Array, "t half"]

    def split(self) -> tuple[Float[Array, "t h d"], Float[Array, "t k d"], Float[Array, "t k d"]]:
        """Query and key turned to their positions, and value."""
        tokens, _, _, dim = self.packed.shape
        query = self.packed[:, :, :-2].reshape(tokens, -1, dim)
        key, value = self.packed[:, :, -2], self.packed[:, :, -1]
        return turned(query, self.cos, self.sin), turned(key, self.cos, self.sin), value


def turned(x: Float[Array, "t h d"], cos: Float[Array, "t half"], sin: Float[Array, "t half"]) -> Float[Array, "t h d"]:
    """The pairs (i, i + d / 2) of every head turned by their angle; float32 inside, rounded once."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class StepPlan(eqx.Module):
    """What every layer with one `AttentionSpec` shares in one step: a backend's plan and the write slots.

    The static fields are constant per rung, so a step does not recompile; nothing here depends on the layer or on the
    number of shards.
    """

    arrays: Any
    write_slots: Int32[Array, " t"]
    rung: Rung = eqx.field(static=True)
    static: Any = eqx.field(static=True)
    spec: AttentionSpec = eqx.field(static=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a decoder layer, as a backend needs them to say whether its kernels fit."""

    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerAt:
    """Which layers one call inside a loop is for, from the loop's counter c.

    Stacked weights are indexed by block: c × `times` + `plus`. The pool is indexed by layer: that × `block`, plus
    `position`, the layer's place in the block. `count` layers follow one another; more than 1 only with `block` 1.
    """

    times: int
    plus: int
    block: int
    position: int
    count: int


class LayerWeights(eqx.Module):
    """Weights at one position of the block, stacked over blocks, (out, in); see `paged.models.Decoder`."""

    attention_norm: Float[Array, "l m"]
    qkv: Float[Array, "l k g2 d m"]
    output: Float[Array, "l m hd"]
    mlp_norm: Float[Array, "l m"]
    gate_up: Float[Array, "l 2 f m"]
    down: Float[Array, "l m f"]


@runtime_checkable
class LayerKernels(Protocol):
    """Whole decoder layers by a backend, for the steps that it offers them for.

    The residual stream travels as `x` (t, m) and `parts` (s, t, m) float32 that are still to be added to it: a product
    that is split over its inputs leaves its sums so, and the next norm reads them anyway.
    """

    def start(self, x: Float[Array, "t m"]) -> Float[Array, "s t m"]:
        """Parts that add nothing."""
        ...

    def layers(
        self,
        x: Float[Array, "t m"],
        parts: Float[Array, "s t m"],
        pool: KvArrays,
        weights: LayerWeights,
        counter: Int32[Array, ""],
        at: LayerAt,
        cos: Float[Array, "t half"],
        sin: Float[Array, "t half"],
        plan: StepPlan,
        eps: float,
    ) -> tuple[Float[Array, "t m"], Float[Array, "s t m"], KvArrays]:
        """Norm, query, key and value, rotary positions, append, attention, output, norm and SwiGLU of `at`'s layers.

        The first three operands are updated in place. Rounds where the plain layer rounds, except that the residual
        stream takes sums before they are rounded; the order of sums is the kernels' own and depends on no other token.
        """
        ...


@runtime_checkable
class AttentionBackend(Protocol):
    """What computes append and attention over pages.

    Methods are called inside `jax.jit`, and under sharding inside `jax.shard_map`, where the head axes they see are one
    device's share. Only `attention_step` calls `append` and `attend`.
    """

    @property
    def name(self) -> str:
        """The entry point's name, used in messages and certificates."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The declaration; asking for more is refused before any method below runs."""
        ...

    def static_plan(self, rung: Rung, spec: AttentionSpec) -> Hashable:
        """Static part of the plan: one value per rung and spec, independent of the number of shards."""
        ...

    def plan_arrays(self, static: Any, table: TableArrays) -> Any:
        """Array part of the plan, a pytree; traceable. Independent of the layer and of the number of shards."""
        ...

    def append(
        self,
        pool: KvArrays,
        key: Shaped[Array, "t k d"],
        value: Shaped[Array, "t k e"],
        slots: Int32[Array, " t"],
        static: Any,
        arrays: Any,
    ) -> KvArrays:
        """Write token i's key and value to absolute slot `slots[i]` = row × tokens_per_page + offset.

        `key` and `value` have the pool's dtype (not its storage words). A negative slot is a padding token, of which
        nothing may be written outside the sentinel pages. Bits are moved, never computed: −0 stays −0.
        """
        ...

    def attend(
        self,
        query: Float[Array, "t h d"],
        pool: KvArrays,
        page_base: Int32[Array, ""] | int,
        static: Any,
        arrays: Any,
        spec: AttentionSpec,
        extras: AttentionExtras,
    ) -> tuple[Float[Array, "t h e"], Float[Array, "t h"] | None]:
        """Attention of each token over its own row's pages; output in the query's dtype, natural-log LSE in float32.

        `page_base` = layer × num_pages, possibly traced, is added to page ids (0 for a `per_layer` pool). The LSE is
        None where the capability `lse` is absent.
        """
        ...

    def scrub(self, pool: KvArrays, pages: Int32[Array, " n"]) -> KvArrays:
        """Zero the named rows of the pool; negative entries are padding. See `paged.backends.moves.scrub`."""
        ...

    def copy_pages(self, pool: KvArrays, source: Int32[Array, " n"], target: Int32[Array, " n"]) -> KvArrays:
        """Copy rows of the pool bit for bit; negative targets are padding. See `paged.backends.moves.copy_pages`."""
        ...
