"""What a level asks of a backend before it runs: its calls of append and attend, traced with shapes and not executed.

A backend that compiles kernels beforehand learns here which of them a level will call. No value is computed, so nothing
is judged. A mesh is left out: a shard's call has the same dtypes, head dim and options.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from conformance import execute, relations
from conformance.case import AttendProblem, Case, MoveProblem
from conformance.execute import VllmMetadata
from conformance.needs import required, unmet
from conformance.vectors import Trace, generate
from paged.backends.protocol import AttentionBackend
from paged.common import Capabilities


def trace(backend: AttentionBackend, cases: Iterable[Case]) -> int:
    """Trace every append and attend that the cases ask of a backend that passes them; returns how many programs.

    Cases that the backend's declaration does not claim are left out, as in a run.
    """
    seen: set[Any] = set()
    for case in cases:
        if unmet(required(case), backend.capabilities):
            continue
        for problem, vllm in calls(case, backend.capabilities):
            if (key := _static(problem, vllm)) not in seen:
                seen.add(key)
                _trace(backend, problem, vllm)
    return len(seen)


def calls(case: Case, declared: Capabilities) -> Iterator[tuple[AttendProblem | MoveProblem, VllmMetadata | None]]:
    """The appends and attends of a case that passes, in order, and the metadata of those that come with vLLM's.

    Scrubs and copies are not among them.
    """
    problem, relation = generate(case, declared.poison).problem, case.params.get("relation")
    options = case.params.get("relation_args") or {}
    if isinstance(problem, MoveProblem):
        yield from [(problem, None)] if problem.operation == "append" else []
    elif isinstance(problem, Trace):
        scripts = [options["script"]] if relation == "schedule" else []
        others = [dataclasses.replace(case, params={**case.params, "script": script}) for script in scripts]
        for played in (problem, *(generate(other, declared.poison).problem for other in others)):
            assert isinstance(played, Trace)
            for step in played.steps:
                yield from ((vector.problem, None) for vector in step.layers)  # pyright: ignore[reportReturnType]
    elif relation is None:
        yield problem, None
    else:
        built = relations.build(relation, case.id, problem, declared, options)
        for call in (built.base, *(call for variant in built.variants for call in variant.calls)):
            yield call.problem, call.vllm


def _trace(backend: AttentionBackend, problem: AttendProblem | MoveProblem, vllm: VllmMetadata | None) -> None:
    if isinstance(problem, MoveProblem):
        run, (program, *arrays) = execute.run_append, execute.append_arguments(backend, problem)
    else:
        run, (program, *arrays) = execute.run_attend, execute.attend_arguments(backend, problem, vllm=vllm)
    jax.eval_shape(functools.partial(run, program), *arrays)


def _static(problem: AttendProblem | MoveProblem, vllm: VllmMetadata | None) -> Any:
    """What decides the traced program, and perhaps a little more."""
    shapes = (problem.keys.shape, problem.values.shape)
    if isinstance(problem, MoveProblem):
        assert problem.new_keys is not None
        return problem.dtype, shapes, problem.new_keys.shape
    table = problem.table
    sizes = (len(table.kv_lens), len(table.page_ids), table.max_query_len, table.max_kv_len, table.tokens_per_page)
    absent = (problem.sinks is None, problem.key_scale is None, problem.value_scale is None)
    tables = None if vllm is None else tuple(np.shape(array) for array in dataclasses.asdict(vllm).values())
    return problem.dtype, problem.kv_dtype, shapes, problem.query.shape, problem.spec, sizes, absent, tables
