"""The level `serving`: an engine's steps over one pool that goes from step to step, judged like single calls.

After every layer of every step the output is judged as that of a single call, and the pool against what it must hold;
so a fault shows at the step where it happens, whatever earlier steps it comes from. Two relations compare whole traces:
`repeat` plays a trace twice, `schedule` plays the same requests in another order of steps (chunks, preemption, shared
prefixes) and compares tokens that are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from conformance import execute
from conformance.canonical import digest
from conformance.case import AttendProblem, Case, MoveProblem, Result
from conformance.hypotheses import Hypothesis
from conformance.judge import judge_attend, judge_move
from conformance.oracle import Rules
from conformance.vectors import Trace, Vector, generate
from conformance.vectors.vector import Operation, TraceStep
from paged.backends.protocol import AttentionBackend, KvArrays
from paged.common import PageTable
from paged.common.errors import InvalidInputError

if TYPE_CHECKING:
    from conformance.runner import Session

RECALLED = 12
"""Earlier states of pool and page list that a diagnosis tries, the latest first."""


@dataclasses.dataclass(frozen=True, eq=False)
class Played:
    """One layer of one step: what was asked and what came back."""

    index: int
    layer: int
    step: TraceStep
    vector: Vector
    output: execute.AttendOutput


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """A scrub or copy before a step: what was asked, and the pool's words afterwards."""

    index: int
    step: TraceStep
    problem: MoveProblem
    keys: np.ndarray
    values: np.ndarray


def _movement(trace: Trace, operation: Operation, before: tuple[np.ndarray, np.ndarray]) -> MoveProblem:
    """The operation as a movement of the pool that was there before it."""
    after = [words.copy() for words in before]
    for words, old in zip(after, before):
        words[operation.rows] = 0 if operation.source is None else old[operation.source]
    rows = operation.rows.astype(np.int32)
    source = None if operation.source is None else operation.source.astype(np.int32)
    return MoveProblem(
        operation=operation.kind,
        dtype=trace.kv_dtype,
        num_layers=trace.num_layers,
        num_pages=trace.num_pages,
        keys=before[0],
        values=before[1],
        expected_keys=after[0],
        expected_values=after[1],
        pages=rows if source is None else None,
        source=source,
        target=None if source is None else rows,
    )


class CarriedPool:
    """A backend's pool, kept from step to step: one array, or one a layer for a `per_layer` backend."""

    def __init__(self, backend: AttentionBackend, trace: Trace):
        self._backend, self._trace = backend, trace
        self._per_layer = backend.capabilities.pool_layout == "per_layer"
        self._pools = [self._place(trace.keys[rows], trace.values[rows]) for rows in self._parts()]
        kinds = {"scrub": 1, "copy_pages": 1}
        for kind in kinds:  # padded to one length, so that a trace compiles each once
            sizes = [len(o.rows) for step in trace.steps for o in step.operations if o.kind == kind]
            kinds[kind] = max(sizes, default=0) // (trace.num_layers if self._per_layer else 1)
        self._sizes = kinds

    def _parts(self) -> list[slice]:
        pages = self._trace.num_pages
        if not self._per_layer:
            return [slice(0, self._trace.num_layers * pages)]
        return [slice(layer * pages, (layer + 1) * pages) for layer in range(self._trace.num_layers)]

    def _place(self, keys: np.ndarray, values: np.ndarray) -> KvArrays:
        problem = _Words(self._trace.kv_dtype)
        return execute.place(self._backend, problem, keys, values, None, whole=True)

    def layer(self, layer: int) -> int:
        """Index of the array that holds that layer."""
        return layer if self._per_layer else 0

    def step(self, problem: AttendProblem) -> execute.AttendOutput:
        """Append and attend in the problem's layer; the pool becomes what the step returned."""
        at = self.layer(problem.layer)
        arguments = execute.attend_arguments(self._backend, problem, pool=self._pools[at])
        out, lse, self._pools[at] = execute.run_attend(*arguments)
        return execute.collect(self._backend, problem, out, lse, self.words)

    def apply(self, operation: Operation) -> None:
        """Do what happens between two steps."""
        if operation.kind == "write":
            keys, values = self.words()
            keys[operation.rows], values[operation.rows] = operation.keys, operation.values
            self._pools = [self._place(keys[rows], values[rows]) for rows in self._parts()]
            return
        for at, rows in enumerate(self._parts()):
            inside = (operation.rows >= rows.start) & (operation.rows < rows.stop)
            lists = [operation.rows] if operation.source is None else [operation.source, operation.rows]
            padded = [self._pad(x[inside] - rows.start, operation.kind) for x in lists]
            self._pools[at] = execute.run_pages(self._backend, None, operation.kind, self._pools[at], *padded)

    def _pad(self, rows: np.ndarray, kind: str) -> np.ndarray:
        return np.pad(rows, (0, self._sizes[kind] - len(rows)), constant_values=-1).astype(np.int32)

    def words(self) -> tuple[np.ndarray, np.ndarray]:
        """Words of all layers, on the host, to keep."""
        out = []
        for name, first in (("keys", self._trace.keys), ("values", self._trace.values)):
            parts = [execute.to_host("the pool", getattr(pool, name)).view(first.dtype) for pool in self._pools]
            whole = np.concatenate(parts)
            if whole.shape != first.shape:
                raise execute.OutputShapeError(f"the pool came back as {whole.shape}, it went in as {first.shape}.")
            out.append(whole)
        return out[0], out[1]


@dataclasses.dataclass(frozen=True)
class _Words:
    """The one thing about a problem that placing words asks for."""

    dtype: str


def play(backend: AttentionBackend, trace: Trace, look: bool = True) -> Iterator[Played | Moved]:
    """Every operation on pages and every layer of every step, in order, over one pool.

    Without `look` the pool is not taken to the host for the operations, and they are not told of.
    """
    pool = CarriedPool(backend, trace)
    for index, step in enumerate(trace.steps):
        for operation in step.operations:
            if not look or operation.kind == "write":
                pool.apply(operation)
                continue
            before = pool.words()
            pool.apply(operation)
            yield Moved(index, step, _movement(trace, operation, before), *pool.words())
        for layer, vector in enumerate(step.layers):
            problem = vector.problem
            assert isinstance(problem, AttendProblem)
            yield Played(index, layer, step, vector, pool.step(problem))


def run(session: Session, case: Case, vector: Vector) -> Result:
    """Play the case's trace and judge every step, or, where the case asks for a relation, compare two plays."""
    trace = vector.problem
    assert isinstance(trace, Trace)
    relation = case.params.get("relation")
    if relation is None:
        return _judged(session, case, trace)
    if relation == "repeat":
        return _compared(session, case, trace, trace, "the trace was played again", "invariant.1")
    if relation == "schedule":
        options = case.params.get("relation_args")
        if not isinstance(options, Mapping) or set(options) != {"script"}:
            raise InvalidInputError("params.relation_args must be an object with script, the other schedule.")
        params = {**case.params, "script": options["script"]}
        other = generate(dataclasses.replace(case, params=params), session.backend.capabilities.poison).problem
        assert isinstance(other, Trace)
        return _compared(session, case, trace, other, "the requests were scheduled otherwise", "steps.3")
    raise InvalidInputError(f"params.relation of a trace must be repeat or schedule, got {relation!r}.")


def _judged(session: Session, case: Case, trace: Trace) -> Result:
    from conformance.runner import expected_of

    elements = decided = 0
    outputs, past = [], []
    storage = session.backend.capabilities.pool_storage
    for played in play(session.backend, trace):
        where = f"step {played.index + 1} of {len(trace.steps)} ({played.step.text})"
        if isinstance(played, Moved):
            result = judge_move(played.problem, played.keys, played.values, storage=storage, id=case.id)
            if result.status != "pass":
                return dataclasses.replace(result, diagnosis=f"before {where}: {result.diagnosis}")
            continue
        problem = played.vector.problem
        assert isinstance(problem, AttendProblem)
        expected = expected_of(played.vector, session.backend.capabilities)
        expected = dataclasses.replace(expected, explain={**expected.explain, "recalled": _recalled(problem, past)})
        output = played.output
        result = judge_attend(problem, expected, output.out, output.lse, id=case.id)
        if result.status == "pass":
            result = _pool(session, case, problem, output, result)
        elements, decided = elements + result.elements, decided + result.decided
        if result.status != "pass":
            text = f"{where}, layer {played.layer}: {result.diagnosis}"
            return dataclasses.replace(result, diagnosis=text, elements=elements, decided=decided)
        outputs.append(result.output)
        past.append(problem)
    return Result(id=case.id, status="pass", elements=elements, decided=decided, output=digest(outputs))


def _pool(session: Session, case: Case, problem: AttendProblem, output: execute.AttendOutput, judged: Result) -> Result:
    """The pool after a step, as a movement: what was not to change is there as it was, what was written is written."""
    poison = session.backend.capabilities.poison
    keys, values, new_keys, new_values = execute.split_step(problem, poison)
    move = MoveProblem(
        operation="append",
        dtype=problem.kv_dtype,
        num_layers=problem.num_layers,
        num_pages=problem.table.num_pages,
        keys=keys,
        values=values,
        expected_keys=problem.keys,
        expected_values=problem.values,
        layer=problem.layer,
        new_keys=new_keys,
        new_values=new_values,
        slots=problem.table.write_slots,
        table=problem.table,
    )
    found = judge_move(move, output.keys, output.values, storage=session.backend.capabilities.pool_storage, id=case.id)
    return judged if found.status == "pass" else found


def _recalled(problem: AttendProblem, past: list[AttendProblem]) -> tuple[Hypothesis, ...]:
    """What a backend would return that kept the page list or the pages of an earlier call."""
    out = []
    for back, earlier in enumerate(reversed(past[-RECALLED:]), 1):
        ago = "the call before" if back == 1 else f"{back} calls before"
        ids = earlier.table.page_ids
        if len(ids) == len(problem.table.page_ids) and not np.array_equal(ids, problem.table.page_ids):
            text = f"The output is that of the page list of {ago}: something was kept from it."
            out.append(Hypothesis("kept-list", "steps.1", text, problem, _listed(ids)))
        if (kept := _with_lengths(problem, earlier.table.kv_lens)) is not None:
            text = f"The output is that of the row lengths of {ago}: something was kept from it."
            out.append(Hypothesis("kept-lengths", "steps.1", text, kept))
        if not _same_pages(problem, earlier):
            text = f"The output is that of what the pages held at {ago}: something was kept from it."
            kept = dataclasses.replace(problem, keys=earlier.keys, values=earlier.values)
            out.append(Hypothesis("kept-pages", "steps.1", text, kept))
    return tuple(out)


def _listed(ids: np.ndarray) -> Rules:
    """The rule of a backend that takes its pages from another list."""

    def pages(problem: AttendProblem, row: int) -> np.ndarray:
        table = problem.table
        first, end = int(table.page_offsets[row]), int(table.page_offsets[row + 1])
        return problem.layer * table.num_pages + ids[first:end].astype(np.int64)

    return Rules(pages=pages)


def _with_lengths(problem: AttendProblem, lengths: np.ndarray) -> AttendProblem | None:
    """The problem with other row lengths; None if they are the same, or of another number of rows."""
    table = problem.table
    if lengths.shape != table.kv_lens.shape or np.array_equal(lengths, table.kv_lens):
        return None
    fields = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
    return dataclasses.replace(problem, table=PageTable.trusted(**{**fields, "kv_lens": lengths}))


def _same_pages(problem: AttendProblem, earlier: AttendProblem) -> bool:
    """Whether the pages that the problem lists hold the same as at an earlier call."""
    rows = problem.layer * problem.table.num_pages + problem.table.page_ids
    return np.array_equal(problem.keys[rows], earlier.keys[rows]) and np.array_equal(
        problem.values[rows], earlier.values[rows]
    )


def _compared(session: Session, case: Case, trace: Trace, other: Trace, what: str, clause: str) -> Result:
    """Whether tokens that both traces have, with equal tokens before them, got the same bits in every layer."""
    first, again = (_outputs(session.backend, each) for each in (trace, other))
    common = sorted(first.keys() & again.keys())
    if not common:
        raise InvalidInputError("params.relation_args.script has no token in common with params.script.")
    elements = 0
    for key in common:
        for kind, old, new in zip(("output", "LSE"), first[key], again[key]):
            moved = old != new
            elements += old.size
            if moved.any():
                at = tuple(int(i) for i in np.argwhere(moved)[0])
                digits = 2 * old.dtype.itemsize
                text = (
                    f"bits moved when {what}: {int(moved.sum())} of {old.size} words of the {kind} of token {key[1]}, "
                    f"layer {key[0]}, first at {at}: 0x{int(old[at]):0{digits}x} -> 0x{int(new[at]):0{digits}x}"
                )
                return Result(id=case.id, status="fail", clause=clause, diagnosis=text, elements=elements)
    own = {"bits": digest([[list(key), [x.tobytes().hex() for x in first[key]]] for key in common])}
    return Result(id=case.id, status="pass", elements=elements, decided=elements, details=own)


def _outputs(backend: AttentionBackend, trace: Trace) -> dict[tuple[int, str], tuple[np.ndarray, ...]]:
    """(layer, token) -> words of its output and of its LSE if there is one. A token that ran twice keeps the last."""
    out: dict[tuple[int, str], tuple[np.ndarray, ...]] = {}
    for played in play(backend, trace, look=False):
        assert isinstance(played, Played)
        lse = played.output.lse
        for at, name in enumerate(played.step.tokens):
            words = (played.output.out[at],) if lse is None else (played.output.out[at], lse[at].view(np.uint32))
            out[played.layer, name] = words
    return out
