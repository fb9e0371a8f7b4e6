"""Runs a problem on a backend: words in, words out, one jitted program each.

The arguments of `attend` are built by `paged.backends.step.attention_step`, as an engine's are. Nothing is compared
inside a program: XLA may drop a rounding that only a comparison would see, so everything leaves through the boundary.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from conformance.case import AttendProblem, MoveProblem
from conformance.formats import decode, format_of, is_nan
from paged.backends.metadata import from_vllm, pack_table, unpack_table
from paged.backends.moves import layer_slots, storage_dtype
from paged.backends.protocol import AttentionBackend, AttentionExtras, KvArrays, Rung
from paged.backends.sharding import KvSharding
from paged.backends.step import attention_step, plan_step, same_pool
from paged.common import AttentionSpec, PageTable
from paged.common.errors import PagedError


class OutputShapeError(PagedError):
    """A backend returned an array of another shape or dtype than the protocol says."""


class ReplicaError(PagedError):
    """Copies of one array on different devices hold different bits."""


@dataclasses.dataclass(frozen=True, eq=False)
class AttendOutput:
    """What one attend call gave: words (t, h, e), float32 LSE (t, h) or None, and the pool's words afterwards."""

    out: np.ndarray
    lse: np.ndarray | None
    keys: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class VllmMetadata:
    """The step of a problem in vLLM's shape, `block_tables` entries past a row's pages as the caller likes."""

    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray


@dataclasses.dataclass(frozen=True)
class Program:
    """What is static in one compiled call; equal programs share a compilation."""

    backend: AttentionBackend
    rung: Rung
    spec: AttentionSpec
    sharding: KvSharding | None = None
    vllm: bool = False

    def plan(self, metadata: Any) -> Any:
        """The step's plan from packed or vLLM-shaped metadata; traceable."""
        if not self.vllm:
            return plan_step(self.backend, unpack_table(metadata, self.rung), self.rung, self.spec)
        step = types.SimpleNamespace(**metadata)
        rung = self.rung
        arrays, vllm_rung = from_vllm(
            step,
            num_tokens=rung.tokens,
            tokens_per_page=rung.tokens_per_page,
            num_pages=rung.num_pages,
            max_query_len=rung.max_query_len,
            max_kv_len=rung.max_kv_len,
        )
        heads = {name: getattr(rung, name) for name in ("group_size", "head_dim", "kv_dtype")}
        return plan_step(self.backend, arrays, dataclasses.replace(vllm_rung, **heads), self.spec)


def layer_step(
    program: Program, pool: KvArrays, query: Any, key: Any, value: Any, metadata: Any, layer: Any, extras: Any
) -> tuple[Any, Any, KvArrays]:
    """The step of one layer: append, then attend."""
    plan = program.plan(metadata)
    return attention_step(
        program.backend, plan, pool, query, key, value, layer=layer, extras=extras, sharding=program.sharding
    )


run_attend = jax.jit(layer_step, static_argnums=0, donate_argnums=1)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def run_append(
    program: Program, pool: KvArrays, key: Any, value: Any, metadata: Any, slots: Any, layer: Any
) -> KvArrays:
    """The backend's append alone, of elements that no conversion has touched."""
    rung = program.rung
    plan = program.plan(metadata)
    absolute = layer_slots(slots, layer, num_pages=rung.num_pages, tokens_per_page=rung.tokens_per_page)

    def append(pool: KvArrays, key: Any, value: Any, absolute: Any, arrays: Any) -> KvArrays:
        return same_pool("append", pool, program.backend.append(pool, key, value, absolute, plan.static, arrays))

    return _on_shards(program.sharding, append, 3, pool, key, value, absolute, plan.arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def run_pages(
    backend: AttentionBackend, sharding: KvSharding | None, operation: str, pool: KvArrays, *pages: Any
) -> KvArrays:
    """The backend's `scrub` or `copy_pages`."""

    def move(pool: KvArrays, *pages: Any) -> KvArrays:
        return same_pool(operation, pool, getattr(backend, operation)(pool, *pages))

    return _on_shards(sharding, move, 1, pool, *pages)


def _on_shards(sharding: KvSharding | None, move: Any, split: int, *arguments: Any) -> KvArrays:
    """`move` on each device's share: the first `split` arguments are laid over the head axes, the rest are whole."""
    if sharding is None:
        return move(*arguments)
    specs = [sharding.pool_spec] + [sharding.heads_spec] * (split - 1) + [PartitionSpec()] * (len(arguments) - split)
    specs = tuple(jax.tree.map(lambda _, s=s: s, a) for s, a in zip(specs, arguments))
    return jax.shard_map(
        move, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.pool_spec, check_vma=False
    )(*arguments)  # fmt: skip


def attend(
    backend: AttentionBackend,
    problem: AttendProblem,
    *,
    sharding: KvSharding | None = None,
    vllm: VllmMetadata | None = None,
) -> AttendOutput:
    """Append the step's tokens and attend to them.

    The problem's pool holds what append would have written; here those slots are spoiled first, and their elements go
    in as the step's new keys and values, padding tokens carrying spoilt ones.
    Raises `OutputShapeError` for a result of another shape or dtype than the protocol's.
    """
    arguments = attend_arguments(backend, problem, sharding=sharding, vllm=vllm)
    out, lse, pool = run_attend(*arguments)
    return collect(backend, problem, out, lse, lambda: fetch(backend, problem, pool))


def attend_arguments(
    backend: AttentionBackend,
    problem: AttendProblem,
    *,
    sharding: KvSharding | None = None,
    vllm: VllmMetadata | None = None,
    pool: KvArrays | None = None,
) -> tuple[Any, ...]:
    """Arguments of `run_attend` for a problem, over its own pool or one that an earlier step returned."""
    if vllm is None:
        metadata, rung = pack_table(problem.table)
    else:
        metadata, rung = dataclasses.asdict(vllm), Rung.of(problem.table)
    kv_heads, head_dim = problem.keys.shape[2:]
    rung = rung.with_heads(group_size=problem.query.shape[1] // kv_heads, head_dim=head_dim, kv_dtype=problem.kv_dtype)
    program = Program(backend, rung, problem.spec, sharding, vllm is not None)
    pool_keys, pool_values, new_keys, new_values = split_step(problem, backend.capabilities.poison)
    if format_of(problem.kv_dtype).bits == 8:
        new_keys = _unquantised(new_keys, problem.kv_dtype, problem.key_scale)
        new_values = _unquantised(new_values, problem.kv_dtype, problem.value_scale)
    else:
        new_keys, new_values = (x.view(jnp.dtype(problem.kv_dtype)) for x in (new_keys, new_values))
    extras = AttentionExtras(
        sinks=None if problem.sinks is None else jnp.asarray(problem.sinks, jnp.float32),
        key_scale=_scalar(problem.key_scale),
        value_scale=_scalar(problem.value_scale),
    )
    if pool is None:
        pool = place(backend, problem, pool_keys, pool_values, sharding)
    query = problem.query.view(jnp.dtype(problem.dtype))
    return program, pool, query, new_keys, new_values, metadata, np.int32(problem.layer), extras


def collect(
    backend: AttentionBackend,
    problem: AttendProblem,
    out: Any,
    lse: Any,
    words: Callable[[], tuple[np.ndarray, np.ndarray]],
) -> AttendOutput:
    """Check the form of what a step returned and take its words to the host, those of the pool by `words`."""
    tokens, heads, _ = problem.query.shape
    expected = (tokens, heads, problem.values.shape[3])
    if out.shape != expected or out.dtype != jnp.dtype(problem.dtype):
        raise OutputShapeError(f"attend returned {out.dtype}{out.shape}, expected {problem.dtype}{expected}.")
    if "lse" in backend.capabilities.features:
        if lse is None or lse.shape != (tokens, heads) or lse.dtype != jnp.float32:
            got = "None" if lse is None else f"{lse.dtype}{lse.shape}"
            raise OutputShapeError(f"attend returned the LSE {got}, expected float32{(tokens, heads)}.")
    elif lse is not None:
        raise OutputShapeError("attend returned an LSE, but the feature 'lse' is not declared; return None.")
    keys, values = words()
    return AttendOutput(
        out=to_host("the output", out).view(problem.query.dtype),
        lse=None if lse is None else to_host("the LSE", lse),
        keys=keys,
        values=values,
    )


def split_step(problem: AttendProblem, poison: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Words of the pool before the step and of the step's new keys and values (t, k, d)."""
    table, spoilt = problem.table, poison_word(problem.kv_dtype, poison)
    slots = table.write_slots
    written = slots >= 0
    rows = problem.layer * table.num_pages + slots[written] // table.tokens_per_page
    offsets = slots[written] % table.tokens_per_page
    before, new = [], []
    for stored in pool_words(problem, poison):
        pool = np.array(stored, order="C")
        tokens = np.full((len(slots), *stored.shape[2:]), spoilt, stored.dtype)
        tokens[written] = pool[rows, offsets]
        pool[rows, offsets] = spoilt
        before.append(pool)
        new.append(tokens)
    return before[0], before[1], new[0], new[1]


def pool_words(problem: AttendProblem, poison: str) -> tuple[np.ndarray, np.ndarray]:
    """The problem's pool, free of NaN and infinities where the backend asks for that."""
    if poison == "any_bits":
        return problem.keys, problem.values
    return finite(problem.keys, problem.kv_dtype), finite(problem.values, problem.kv_dtype)


def poison_word(dtype: str, poison: str) -> int:
    """The word that spoils what must not be read: NaN, or the largest finite value where only those are allowed."""
    return format_of(dtype).nan if poison == "any_bits" else format_of(dtype).max_word


def finite(words: np.ndarray, dtype: str) -> np.ndarray:
    """`words` with NaN and infinities replaced by the largest finite value, signs kept where there are any."""
    found = format_of(dtype)
    bad = is_nan(words, dtype)
    if found.infinity is not None:
        bad = bad | ((words & (found.sign_bit - 1)) == found.infinity)
    return np.where(bad, np.asarray(found.max_word, words.dtype), words)


def place(
    backend: AttentionBackend,
    problem: Any,
    keys: np.ndarray,
    values: np.ndarray,
    sharding: KvSharding | None,
    *,
    whole: bool = False,
) -> KvArrays:
    """Words of all layers as the pool that the backend takes: its storage, its layout, laid over the mesh.

    A `per_layer` backend gets the problem's layer, or, with `whole`, every layer.
    """
    kv_dtype = problem.kv_dtype if isinstance(problem, AttendProblem) else problem.dtype
    storage = backend.capabilities.pool_storage
    if backend.capabilities.pool_layout == "per_layer" and not whole:
        keys, values = (x[_layer_rows(problem)] for x in (keys, values))
    target = None if sharding is None else sharding.named(sharding.pool_spec)
    arrays = (jax.device_put(x.view(storage_dtype(kv_dtype, storage)), target, may_alias=False) for x in (keys, values))
    return KvArrays(*arrays, words_of=kv_dtype if storage == "words" else None)


def fetch(
    backend: AttentionBackend, problem: Any, pool: KvArrays, *, whole: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Words of all layers from a backend's pool. A layer that the backend never got is as it was."""
    out = []
    for stored, array in ((problem.keys, pool.keys), (problem.values, pool.values)):
        words = to_host("the pool", array).view(stored.dtype)
        if backend.capabilities.pool_layout == "per_layer" and not whole:
            every = np.array(stored)
            every[_layer_rows(problem)] = words
            words = every
        if words.shape != stored.shape:
            raise OutputShapeError(f"the pool came back as {words.shape}, it went in as {stored.shape}.")
        out.append(words)
    return out[0], out[1]


def to_host(what: str, array: Any) -> np.ndarray:
    """The array on the host. Raises `ReplicaError` if devices that hold the same part of it disagree."""
    parts: dict[str, tuple[Any, np.ndarray]] = {}
    for shard in array.addressable_shards:
        held = np.asarray(shard.data)
        device, first = parts.setdefault(str(shard.index), (shard.device, held))
        if held.tobytes() != first.tobytes():
            where = _first_difference(first, held, shard.index)
            raise ReplicaError(f"copies of {what} differ between {device} and {shard.device}, first at {where}.")
    return np.asarray(array)


def _first_difference(one: np.ndarray, other: np.ndarray, part: tuple[slice, ...]) -> str:
    """Where two copies of a part of an array differ first, in the words of the whole array."""
    words = [np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape) for x in (one, other)]
    at = np.argwhere(words[0] != words[1])[0].tolist()
    names = ("pool row", "slot", "KV head", "dim") if one.ndim == 4 else ("token", "head", "dim")
    return ", ".join(f"{name} {i + (s.start or 0)}" for name, i, s in zip(names, at, part))


def _layer_rows(problem: Any) -> slice:
    pages = problem.table.num_pages if isinstance(problem, AttendProblem) else problem.num_pages
    return slice(problem.layer * pages, (problem.layer + 1) * pages)


def _unquantised(words: np.ndarray, dtype: str, scale: float | None) -> np.ndarray:
    """Float32 values that quantise back to `words`."""
    return (decode(words, dtype) * (1.0 if scale is None else scale)).astype(np.float32)


def _scalar(value: float | None) -> Any:
    return None if value is None else jnp.asarray(value, jnp.float32)


def move(
    backend: AttentionBackend, problem: MoveProblem, *, sharding: KvSharding | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Run an append, scrub or copy; the pool's words afterwards.

    Scrub and copy name rows of an array: a `per_layer` backend gets all layers as if they were one.
    """
    if problem.operation == "append":
        return _append(backend, problem, sharding)
    pool = place(backend, problem, problem.keys, problem.values, sharding, whole=True)
    pages = (problem.pages,) if problem.operation == "scrub" else (problem.source, problem.target)
    pool = run_pages(backend, sharding, problem.operation, pool, *(np.asarray(p, np.int32) for p in pages))
    return fetch(backend, problem, pool, whole=True)


def _append(
    backend: AttentionBackend, problem: MoveProblem, sharding: KvSharding | None
) -> tuple[np.ndarray, np.ndarray]:
    return fetch(backend, problem, run_append(*append_arguments(backend, problem, sharding=sharding)))


def append_arguments(
    backend: AttentionBackend, problem: MoveProblem, *, sharding: KvSharding | None = None
) -> tuple[Any, ...]:
    """Arguments of `run_append` for a problem whose operation is `append`."""
    assert problem.new_keys is not None
    assert problem.new_values is not None
    pool = place(backend, problem, problem.keys, problem.values, sharding)
    metadata, rung = pack_table(problem.table if problem.table is not None else table_for_slots(problem))
    rung = rung.with_heads(group_size=1, head_dim=problem.keys.shape[3], kv_dtype=problem.dtype)
    program = Program(backend, rung, AttentionSpec(scale=1.0), sharding)
    new = [x.view(jnp.dtype(problem.dtype)) for x in (problem.new_keys, problem.new_values)]
    layer = 0 if backend.capabilities.pool_layout == "per_layer" else problem.layer
    return program, pool, new[0], new[1], metadata, np.asarray(problem.slots, np.int32), np.int32(layer)


def table_for_slots(problem: MoveProblem) -> PageTable:
    """A decode step that writes the problem's slots: each token a row of its own, whose last position is its slot."""
    size = problem.keys.shape[1]
    slots = np.zeros(0, np.int32) if problem.slots is None else np.asarray(problem.slots)
    inside = (slots >= size) & (slots < problem.num_pages * size)
    kv_lens = np.where(inside, slots % size + 1, 0)
    return PageTable(
        query_offsets=np.arange(len(slots) + 1),
        page_offsets=np.concatenate([[0], np.cumsum(inside)]),
        page_ids=np.concatenate([slots[inside] // size, np.zeros(int((~inside).sum()), slots.dtype)]),
        last_page_len=kv_lens,
        kv_lens=kv_lens,
        write_slots=np.where(inside, slots, -1),
        max_query_len=1,
        max_kv_len=size,
        tokens_per_page=size,
        num_pages=problem.num_pages,
    )
