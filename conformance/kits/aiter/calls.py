"""Calls of the targets themselves: the alias probe, rounding, and what a handler must refuse or is known to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.kits.run import Context, check
from conformance.structure import addresses
from paged.backends.aiter.contract import ALIAS_PROBE, DECODE, PREFILL, Target
from paged.backends.aiter.plan import DECODE_MAX_CONTEXT, func_name, workspace_bytes
from paged.backends.aiter.probe import BUILD
from paged.backends.aiter.targets import provided
from paged.backends.protocol import Rung

PAGE, PAGES, KV_HEADS, GROUP, DIM = 16, 6, 2, 4, 128
TRUNCATED = 1.0
ROUNDED = 1.0078125


def run(target: Target, results: tuple[Any, ...], operands: tuple[Any, ...], **attributes: Any) -> Any:
    """One call as it is given, attributes not coerced."""
    call = jax.ffi.ffi_call(target.name, results, input_output_aliases=dict(target.aliases))
    return jax.block_until_ready(jax.jit(lambda *arrays: call(*arrays, **attributes))(*operands))


def rung(*, group: int = GROUP, dim: int = DIM, page: int = PAGE, longest: int = 256) -> Rung:
    """One row of one token."""
    sizes: dict[str, Any] = {"rows": 1, "tokens": 1, "listed_pages": 4, "max_query_len": 1, "max_kv_len": longest}
    return Rung(**sizes, tokens_per_page=page, num_pages=PAGES).with_heads(
        group_size=group, head_dim=dim, kv_dtype="bfloat16"
    )


def pool(values: Any = 1.0, *, page: int = PAGE, dim: int = DIM) -> Any:
    """A pool of `PAGES` pages; `values` fills it, broadcast from (tokens, 1, 1)."""
    flat = np.ones((PAGES * page, KV_HEADS, dim), np.float32)
    flat[: len(np.atleast_1d(values))] *= np.asarray(values, np.float32).reshape(-1, 1, 1)
    return jnp.asarray(flat.reshape(PAGES, page, KV_HEADS, dim), jnp.bfloat16)


def decode(
    values: Any, last: int, *, group: int = GROUP, dim: int = DIM, page: int = PAGE, longest: int = 256, **changes: Any
) -> Any:
    """One row over page 1: queries of zero, so every token weighs the same."""
    parts = -(-longest // 256)
    given = {"scale": np.float32(1), "logits_soft_cap": np.float32(0), "max_num_partitions": np.int64(parts)}
    given |= {"func_name": func_name(rung(group=group, dim=dim, page=page, longest=longest), parts), **changes}
    query = jnp.zeros((1, KV_HEADS * group, dim), jnp.bfloat16)
    lists = (_ints(0, 1), _ints(*[1] * 20), _ints(last))
    one = jnp.ones(1, jnp.float32)
    scratch = jnp.zeros(workspace_bytes(1, KV_HEADS * group, dim, parts, 2), jnp.uint8)
    pools = (pool(1.0, page=page, dim=dim), pool(values, page=page, dim=dim))
    (out,) = run(DECODE, (query,), (query, *pools, *lists, one, one, scratch), **given)
    return np.asarray(out, np.float32)


def prefill(values: Any, last: int, **changes: Any) -> Any:
    """One row of one token over page 1 through the prefill kernel; queries of zero."""
    given = {
        "scale": np.float32(1), "logits_soft_cap": np.float32(0), "max_seqlen_q": np.int64(1), "causal": True,
        "max_seqlen_k": np.int64(PAGE), "window_size_left": np.int64(-1), "window_size_right": np.int64(-1),
    } | changes  # fmt: skip
    query = jnp.zeros((1, KV_HEADS * GROUP, DIM), jnp.bfloat16)
    lists = (_ints(0, 1), _ints(*[1] * 20), _ints(last))
    (out,) = run(PREFILL, (query,), (query, pool(), pool(values), _ints(0, 1), *lists), **given)
    return np.asarray(out, np.float32)


def _ints(*values: int) -> Any:
    return jnp.asarray(values, jnp.int32)


@check("kit/alias-probe")
def alias_probe(context: Context) -> Any:
    """A donated buffer is changed in place through an FFI alias, and rows out of range are skipped."""
    if ALIAS_PROBE.name not in provided(context.backend.platform):
        return context.failed(f"{ALIAS_PROBE.library} is not built. Build:\n{BUILD}")
    before = jnp.asarray(np.arange(24, dtype=np.float32).reshape(6, 4))
    expected = np.array(before)
    expected[[1, 4]] += 1
    call = jax.ffi.ffi_call(ALIAS_PROBE.name, jax.ShapeDtypeStruct((6, 4), jnp.float32), input_output_aliases={0: 0})
    program = jax.jit(call, donate_argnums=0)
    pool_ = jax.device_put(before, may_alias=False)
    where = addresses(pool_)
    after = jax.block_until_ready(program(pool_, _ints(1, -1, 4, 6), jnp.ones((4, 4), jnp.float32)))
    if addresses(after) != where:
        return context.failed(
            "the donated buffer moved: the alias was not honoured, the pool would be copied each step."
        )
    if not (np.asarray(after) == expected).all():
        return context.failed("the probe's rows were not added in place.")
    return context.passed(24)


@check("kit/rounding/decode", "kit/rounding/prefill")
def rounding(context: Context) -> Any:
    """Three tokens of 1 + 2⁻⁷ and one of 1, equal weights: the mean is nearest to 1 + 2⁻⁷, and 1 where bits are cut."""
    values = np.ones(2 * PAGE)
    values[PAGE : PAGE + 3] = ROUNDED
    out = (decode if context.id.endswith("decode") else prefill)(values, 4)
    if ((out <= TRUNCATED) & (out > TRUNCATED - 2**-6)).all():  # decode cuts twice: each partition, then the merge
        return context.failed(
            "float32 is cut off to bfloat16, not rounded to nearest: the outputs are not those that docs/semantics.md "
            "demands. Build the kernels with -DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=0."
        )
    if not (out == ROUNDED).all():
        return context.failed(f"the mean of 1 + 2^-7 (three times) and 1 came out as {sorted(set(out.flat))[:4]}.")
    return context.passed(out.size)


REFUSED: dict[str, list[tuple[str, Callable[[], Any]]]] = {
    "kit/refused/decode-configurations": [
        ("3 query heads per KV head", lambda: decode(1.0, 4, group=3)),
        ("head dim 64", lambda: decode(1.0, 4, dim=64)),
        ("pages of 32 tokens", lambda: decode(1.0, 4, page=32)),
        (f"a context above {DECODE_MAX_CONTEXT}", lambda: decode(1.0, 4, longest=DECODE_MAX_CONTEXT + 1)),
        ("a kernel name that is none", lambda: decode(1.0, 4, func_name="pa_ragged_none")),
    ],
    "kit/refused/prefill-soft-cap": [("a soft cap", lambda: prefill(1.0, 4, logits_soft_cap=np.float32(30)))],
    "kit/refused/attribute-widths": [
        ("a Python float as the decode scale", lambda: decode(1.0, 4, scale=1.0)),
        ("32 bits for max_num_partitions", lambda: decode(1.0, 4, max_num_partitions=np.int32(1))),
        ("a float64 as the prefill scale", lambda: prefill(1.0, 4, scale=np.float64(1))),
        ("32 bits for max_seqlen_k", lambda: prefill(1.0, 4, max_seqlen_k=np.int32(16))),
    ],
}
"""Id -> what a handler must refuse, and the call that asks for it."""


@check(*REFUSED)
def refused(context: Context) -> Any:
    """Each call fails; one that is taken would be computed wrongly or not at all."""
    said = {}
    for what, ask in REFUSED[context.id]:
        try:
            ask()
        except Exception as error:
            said[what] = re.sub(r"\s+", " ", str(error))[:160]
        else:
            return context.failed(f"{what} was taken: the handler must refuse it.")
    return context.passed(len(said), refusals=said)


@check("kit/recorded/decode-soft-cap")
def soft_cap_is_ignored(context: Context) -> Any:
    """What decode does with a soft cap, which the backend never passes: ignored, refused or applied."""
    values = np.ones(2 * PAGE)
    try:
        capped = decode(values, 4, logits_soft_cap=np.float32(0.5))
    except Exception:
        return context.passed(1, finding="decode refuses a soft cap")
    same = bool((capped == decode(values, 4)).all())
    return context.passed(1, finding="decode takes a soft cap and ignores it" if same else "decode applies a soft cap")


@check("kit/recorded/nan-tail")
def nan_tail(context: Context) -> Any:
    """Whether NaN in slots past a row's length reaches its output, which is why the pool is declared finite."""
    values = np.ones(2 * PAGE)
    values[PAGE + 4 :] = np.nan
    leaks = {
        "decode": bool(np.isnan(decode(values, 4)).any()),
        "prefill": bool(np.isnan(prefill(values, 4)).any()),
    }
    finding = ", ".join(name for name, leak in leaks.items() if leak) or "none"
    return context.passed(2, finding=f"kernels that let NaN of a last page's dead slots through: {finding}")
