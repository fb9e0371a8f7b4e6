"""Tier 0: what is true of a program's structure and of refusals, not of values.

Each check takes the case's own problem, so that the program looked at is one that other cases judge by value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from conformance import execute, hlo
from conformance.case import AttendProblem, Case, Result
from conformance.environment import all_devices
from conformance.runner import CHECKS, Check, NoDeviceError, Session, mesh_sharding, parse_mesh
from paged.backends.protocol import AttentionBackend
from paged.backends.sharding import KvSharding
from paged.backends.step import check_step, plan_step
from paged.common import AttentionSpec, Range, StorageLayout
from paged.common.capabilities import FEATURES
from paged.common.errors import InvalidInputError, UnsupportedError


def _check(check: Check) -> Check:
    CHECKS[check.__name__] = check
    return check


def _problem(session: Session, case: Case) -> AttendProblem:
    problem = session.vector(case).problem
    if not isinstance(problem, AttendProblem):
        raise InvalidInputError(f"case {case.id!r}: this check looks at an attend call.")
    return problem


def _sharding(case: Case) -> KvSharding | None:
    return mesh_sharding(parse_mesh(case.params))


def _failed(case: Case, diagnosis: str) -> Result:
    return Result(id=case.id, status="fail", clause=case.clause[0], diagnosis=diagnosis)


def _passed(case: Case, elements: int, **details: Any) -> Result:
    return Result(id=case.id, status="pass", elements=elements, decided=elements, details=details)


@_check
def donation(session: Session, case: Case) -> Result:
    """The pool's buffers keep their addresses through a step on every device (sharded.4).

    The probe is tried on a program without donation first, and must see other addresses there.
    """
    arguments = execute.attend_arguments(session.backend, _problem(session, case), sharding=_sharding(case))
    before = addresses(arguments[1])
    kept = _not_donated(arguments[1])
    if addresses(kept) == before:
        raise InvalidInputError("the probe is broken: a program without donation kept the addresses too.")
    _, _, pool = execute.run_attend(*arguments)
    after = addresses(jax.block_until_ready(pool))
    if after != before:
        moved = sum(a != b for a, b in zip(before, after))
        return _failed(
            case, f"{moved} of {len(before)} pool buffers moved: the step returns another pool than it was given"
        )
    return _passed(case, len(before))


@jax.jit
def _not_donated(pool: Any) -> Any:
    return jax.tree.map(lambda x: x.at[0].set(jnp.zeros((), x.dtype)), pool)


@_check
def collectives(session: Session, case: Case) -> Result:
    """No collective runs in an append, in an attention or between them (sharded.3), by the compiled program.

    The program is one step of one layer and nothing else, so every collective in it was put there by the backend,
    wherever the compiler schedules it. A reader of programs that finds none is tried on the same step with one
    collective planted there, which it must find. Not seen are devices that talk inside a custom call or through the
    host.
    """
    problem, sharding = _problem(session, case), _sharding(case)
    if sharding is None:
        raise InvalidInputError(f"case {case.id!r}: this check needs params.mesh.")
    found = _collectives(session.backend, problem, sharding)
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        text = f"{found[0]}{more}. Heads are independent: neither append nor attention needs another device"
        return _failed(case, f"the compiled step of one layer has a collective: {text}")
    planted: Any = _Collecting(session.backend, sharding.kv_axes)
    if not _collectives(planted, problem, sharding):
        raise InvalidInputError("the reader is broken: it does not see a collective planted after the append.")
    return _passed(case, 1)


def _collectives(backend: AttentionBackend, problem: AttendProblem, sharding: KvSharding) -> list[hlo.Instruction]:
    arguments = execute.attend_arguments(backend, problem, sharding=sharding)
    return hlo.collectives(execute.run_attend.lower(*arguments).compile().as_text() or "")


@dataclasses.dataclass(frozen=True)
class _Collecting:
    """A backend that adds up a part of the pool over the head axes between its append and its attention."""

    inner: AttentionBackend
    axes: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def append(self, *arguments: Any) -> Any:
        """The inner one's, and then a sum over devices into the sentinel page. Compiled, never run.

        Into the pool, since that leaves the program: whatever the attention ignores, the sum is not dead code.
        """
        pool = self.inner.append(*arguments)
        mark = jax.lax.psum(jax.lax.convert_element_type(pool.keys[0, 0, 0, 0], jnp.int32), self.axes)
        return dataclasses.replace(pool, keys=pool.keys.at[0, 0, 0, 0].set(mark.astype(pool.keys.dtype)))


def addresses(pool: Any) -> tuple[int, ...]:
    """Address of every buffer of a pool, on every device."""
    shards = (s for leaf in jax.tree.leaves(pool) for s in leaf.addressable_shards)
    return tuple(s.data.unsafe_buffer_pointer() for s in shards)


@_check
def over_sharded(session: Session, case: Case) -> Result:
    """A head axis over more devices than KV heads is refused with both numbers and the way out (sharded.5)."""
    problem = _problem(session, case)
    heads = problem.keys.shape[2]
    devices = all_devices()
    shards = 2 * heads
    if len(devices) < shards:
        raise NoDeviceError(
            f"no device: {shards} are needed to shard {heads} KV heads too far, here are {len(devices)}."
        )
    sharding = KvSharding(jax.make_mesh((shards,), ("tensor",), devices=devices[:shards]), ("tensor",))
    layout = dataclasses.replace(layout_of(problem), kv_head_shards=shards)
    backend = _spy(session.backend)
    try:
        check_step(
            backend,
            layout,
            [problem.spec],
            num_query_heads=max(problem.query.shape[1], shards),
            dtype=problem.dtype,
            sharding=sharding,
        )
    except (InvalidInputError, UnsupportedError) as error:
        text = str(error)
        if str(heads) not in text or str(shards) not in text:
            return _failed(case, f"the refusal does not name {heads} heads and {shards} shards: {text}")
        if backend.calls:
            return _failed(case, f"{backend.calls[0]} was called before the refusal")
        return _passed(case, 1)
    return _failed(case, f"{heads} KV heads over {shards} shards were accepted")


@_check
def refusals(session: Session, case: Case) -> Result:
    """Whatever lies outside the declaration is refused by name before the backend is called (refuse.1)."""
    problem, declared = _problem(session, case), session.backend.capabilities
    layout, heads = layout_of(problem), problem.query.shape[1]
    step: dict[str, Any] = {"num_query_heads": heads, "dtype": problem.dtype}
    asked: list[tuple[str, Callable[[Any], Any]]] = []

    def ask(capability: str, layout: StorageLayout = layout, specs: Iterable[AttentionSpec] = (), **more: Any) -> None:
        asked.append((capability, lambda b: check_step(b, layout, list(specs), **{**step, **more})))

    options = {
        "window": {"window": 8},
        "soft_cap": {"soft_cap": 30.0},
        "non_causal": {"causal": False},
    }
    for feature in sorted(FEATURES - declared.features):
        if feature in options:
            spec = AttentionSpec(scale=1.0, **options[feature])
            ask(feature, specs=[spec])
            table, rung = _plan_inputs(problem)
            asked.append((feature, lambda b, s=spec, t=table, r=rung: plan_step(b, t, r, s)))
        elif feature == "value_head_dim":
            if others := sorted(declared.head_dims - {layout.head_dim}):
                ask(feature, dataclasses.replace(layout, value_head_dim=others[0]))
        elif feature in ("sinks", "kv_scales", "lse"):
            more: dict[str, Any] = {feature: True}
            asked.append((feature, lambda b, m=more: check_step(b, layout, [problem.spec], **step, **m)))
        else:
            ask(feature, specs=[problem.spec], batches=[feature])
    ask("page_sizes", dataclasses.replace(layout, tokens_per_page=declared.page_sizes.high + 1))
    ask("head_dims", dataclasses.replace(layout, head_dim=max(declared.head_dims) + 1))
    ask("head_dims", dataclasses.replace(layout, value_head_dim=max(declared.head_dims) + 1))
    sizes = declared.group_sizes
    group = 1 + (sizes.high if isinstance(sizes, Range) else max(sizes))
    ask("group_sizes", num_query_heads=layout.num_kv_heads * group)
    ask("dtypes", dtype="int8")
    if declared.max_page_id < 2**20:
        ask("max_page_id", dataclasses.replace(layout, num_pages=declared.max_page_id + 2))
    for capability, demand in asked:
        backend = _spy(session.backend)
        try:
            demand(backend)
        except UnsupportedError as error:
            if error.capability != capability:
                return _failed(case, f"asked beyond {capability!r}, the refusal names {error.capability!r}: {error}")
        else:
            return _failed(case, f"a demand beyond the declared {capability!r} was accepted")
        if backend.calls:
            return _failed(case, f"{backend.calls[0]} was called before {capability!r} was refused")
    return _passed(case, len(asked))


def _plan_inputs(problem: AttendProblem) -> tuple[Any, Any]:
    from paged.backends.metadata import table_arrays
    from paged.backends.protocol import Rung

    return table_arrays(problem.table), Rung.of(problem.table)


def _spy(backend: AttentionBackend) -> Any:
    return _Spy(backend)


class _Spy:
    """A backend that only notes which of its methods were called."""

    def __init__(self, backend: AttentionBackend):
        self.name, self.capabilities = backend.name, backend.capabilities
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def method(*_: Any, **__: Any) -> Any:
            self.calls.append(name)
            raise AssertionError(f"{name} was called")

        if name.startswith("_"):
            raise AttributeError(name)
        return method


def layout_of(problem: AttendProblem) -> StorageLayout:
    """The geometry of a problem's pool."""
    table = problem.table
    return StorageLayout(
        num_layers=problem.num_layers,
        num_pages=table.num_pages,
        tokens_per_page=table.tokens_per_page,
        num_kv_heads=problem.keys.shape[2],
        head_dim=problem.keys.shape[3],
        value_head_dim=problem.values.shape[3],
        dtype=problem.kv_dtype,
    )
