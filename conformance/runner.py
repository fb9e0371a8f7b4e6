"""Backend and case -> `Result`. Whatever a backend raises becomes an `error`; nothing here ever skips."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from conformance import execute, relations
from conformance.canonical import digest
from conformance.case import AttendExpected, AttendProblem, Case, MoveProblem, Result
from conformance.environment import all_devices, current_device
from conformance.execute import ReplicaError
from conformance.formats import is_nan
from conformance.judge import expectation, judge_attend, judge_move
from conformance.needs import required, unmet
from conformance.plain import plain
from conformance.relations import PADDING, Call, Mesh
from conformance.vectors import Trace, Vector, generate
from conformance.watch import Watch, signals_of_interrupt
from paged.backends.protocol import AttentionBackend
from paged.backends.sharding import KvSharding
from paged.common import Capabilities
from paged.common.errors import InvalidInputError, PagedError

MAX_MESSAGE = 600

Check = Callable[["Session", Case], Result]
CHECKS: dict[str, Check] = {}
"""Name in a case's parameter `check` -> what looks at a program's structure instead of its values. A closed list."""


class NoDeviceError(PagedError):
    """The backend runs on none of the platforms that are here, or a mesh needs more devices than there are."""


class DeclarationError(PagedError):
    """A backend's declaration changed while it ran."""


class Session:
    """Runs cases on one backend. Programs that differ only in their arrays are compiled once, whatever the order."""

    def __init__(self, backend: AttentionBackend, watch: Watch | None = None):
        """`watch`, if given, was made before anything of the backend was imported."""
        self.backend = backend
        self.declared = backend.capabilities
        self._watch = watch or Watch()
        self._watch.keep_options()

    def run(self, case: Case) -> Result:
        """The result of one case; never raises but for an interruption from outside."""
        with signals_of_interrupt() as came:
            try:
                result = self._claimed(case)
            except ReplicaError as error:
                result = Result(id=case.id, status="fail", clause="sharded.2", diagnosis=str(error))
            except BaseException as error:  # what ends a process, an interruption or a test is no way to answer
                if isinstance(error, KeyboardInterrupt) and came:
                    raise
                result = Result(id=case.id, status="error", diagnosis=describe_error(error))
        if changed := self._watch.restore():
            more = f", and {len(changed) - 1} more such" if len(changed) > 1 else ""
            text = f"the backend changed what is not its own: {changed[0]}{more}. A result made so says nothing."
            return Result(id=case.id, status="error", diagnosis=plain(text))
        return dataclasses.replace(result, diagnosis=plain(result.diagnosis))

    def _claimed(self, case: Case) -> Result:
        """The result of a case that the declaration claims, as it was declared first and still is afterwards."""
        if missing := unmet(required(case), self.declared):
            return Result(id=case.id, status="not-claimed", diagnosis=f"needs {', '.join(missing)}")
        self._require_platform()
        result = self._run(case)
        if (now := self.backend.capabilities) != self.declared:
            before, now = self.declared.to_json(), now.to_json()
            moved = ", ".join(name for name in before if before[name] != now.get(name))
            raise DeclarationError(f"the backend declares something else than when it was made: {moved}.")
        return result

    def _require_platform(self) -> None:
        here, wanted = current_device(), self.declared.platforms
        names = {here.platform, here.client.platform}  # a GPU is "gpu", and "cuda" or "rocm"
        if not names & wanted:
            runs, found = ", ".join(sorted(wanted)), " or ".join(sorted(names))
            raise NoDeviceError(f"no device: {self.backend.name!r} runs on {runs}; here is {found}.")

    def _run(self, case: Case) -> Result:
        params = case.params
        if params.get("check") is not None:
            from conformance import structure  # noqa: F401 (fills CHECKS)

            if params["check"] not in CHECKS:
                raise InvalidInputError(f"params.check must be one of {', '.join(sorted(CHECKS))}.")
            return CHECKS[params["check"]](self, case)
        vector = self.vector(case)
        if isinstance(vector.problem, Trace):
            from conformance import serving

            return serving.run(self, case, vector)
        if params.get("relation") is not None:
            return self._relation(case, vector)
        mesh = parse_mesh(params)
        result = self._call_and_judge(case, vector, mesh_sharding(mesh))
        if mesh is not None and result.status == "fail":
            return self._blame_mesh(case, vector, mesh, result)
        return result

    def _call_and_judge(self, case: Case, vector: Vector, sharding: KvSharding | None) -> Result:
        if isinstance(vector.problem, MoveProblem):
            keys, values = execute.move(self.backend, vector.problem, sharding=sharding)
            return judge_move(vector.problem, keys, values, storage=self._storage, id=case.id)
        assert isinstance(vector.problem, AttendProblem)
        output = execute.attend(self.backend, vector.problem, sharding=sharding)
        return self._judge(case, vector, output)

    def _blame_mesh(self, case: Case, vector: Vector, mesh: Mesh, result: Result) -> Result:
        """The failure as one of sharding if the same call is right on one device."""
        if self._call_and_judge(case, vector, None).status != "pass":
            return result
        text = f"right on one device and wrong over {mesh}: {result.diagnosis}"
        return dataclasses.replace(result, clause="sharded.1", diagnosis=text)

    @property
    def _storage(self) -> str:
        return self.declared.pool_storage

    def vector(self, case: Case) -> Vector:
        """The case's inputs, poisoned as the backend's declaration allows."""
        return generate(case, self.declared.poison)

    def _judge(self, case: Case, vector: Vector, output: execute.AttendOutput) -> Result:
        expected = expected_of(vector, self.declared)
        problem = vector.problem
        assert isinstance(problem, AttendProblem)
        result = judge_attend(problem, expected, output.out, output.lse, id=case.id)
        if result.status == "fail" and (again := self._blame_chance(case, problem, output)) is not None:
            return again
        nan = int(is_nan(output.out, problem.dtype).sum())
        if result.status == "fail" and nan and result.details["wrong"] <= 1.2 * nan and result.clause not in EMPTY:
            return self._blame_poison(problem, expected, result)
        return result if result.status != "pass" else self._pool_after(case, problem, output) or result

    def _blame_chance(self, case: Case, problem: AttendProblem, output: execute.AttendOutput) -> Result | None:
        """A failure of invariant.1 if the same call on one device now gives other bits, else None."""
        call = relations.Call(problem, np.arange(problem.table.num_tokens))
        first, second = (execute.attend(self.backend, problem) for _ in range(2))
        fault, compared = compare(first, [second], [call])
        if fault is None:
            return None
        text = f"the output is wrong, and not the same twice: {fault}"
        return Result(id=case.id, status="fail", clause="invariant.1", diagnosis=text, elements=compared)

    def _blame_poison(self, problem: AttendProblem, expected: AttendExpected, result: Result) -> Result:
        """A NaN that is there without poison too was not read from anywhere: the arithmetic made it. Where it is gone,
        what is still wrong tells why such places were read."""
        bare = relations.unpoisoned(problem)
        clean = execute.attend(self.backend, bare)
        nan = is_nan(clean.out, problem.dtype)
        if not nan.any():
            return unpoisoned_cause(bare, expected, clean.out, clean.lse, result)
        text = (
            f"{result.diagnosis} But {int(nan.sum())} elements are NaN with zeros in all those places too: it comes of "
            "the arithmetic, such as 0 / 0 where a part of the row is empty, or ∞ − ∞."
        )
        return dataclasses.replace(result, clause="attend.1", diagnosis=text)

    def _pool_after(self, case: Case, problem: AttendProblem, output: execute.AttendOutput) -> Result | None:
        """A failure if the step's append left another pool than the problem's, else None."""
        poison = self.declared.poison
        keys, values, new_keys, new_values = execute.split_step(problem, poison)
        after_keys, after_values = execute.pool_words(problem, poison)
        step = MoveProblem(
            operation="append",
            dtype=problem.kv_dtype,
            num_layers=problem.num_layers,
            num_pages=problem.table.num_pages,
            keys=keys,
            values=values,
            expected_keys=after_keys,
            expected_values=after_values,
            layer=problem.layer,
            new_keys=new_keys,
            new_values=new_values,
            slots=problem.table.write_slots,
            table=problem.table,
        )
        found = judge_move(step, output.keys, output.values, storage=self._storage, id=case.id)
        return None if found.status == "pass" else found

    def _call(self, call: Call) -> execute.AttendOutput:
        return execute.attend(self.backend, call.problem, sharding=mesh_sharding(call.mesh), vllm=call.vllm)

    def _relation(self, case: Case, vector: Vector) -> Result:
        problem = vector.problem
        if not isinstance(problem, AttendProblem):
            raise InvalidInputError(f"case {case.id!r}: relations are between attend calls, not {vector.family}.")
        options = case.params.get("relation_args")
        relation = relations.build(case.params["relation"], case.id, problem, self.declared, options)
        base = self._call(relation.base)
        elements = 0
        for variant in relation.variants:
            outputs = [self._call(call) for call in variant.calls]
            fault, compared = compare(base, outputs, variant.calls)
            elements += compared
            if fault is not None:
                text = f"bits moved when {variant.what}: {fault}"
                return Result(id=case.id, status="fail", clause=case.clause[0], diagnosis=text, elements=elements)
        if relation.base.problem is problem:
            judged = self._judge(case, vector, base)
            if judged.status != "pass":
                return judged
        own = {"bits": digest(base.out.tobytes())}
        return Result(id=case.id, status="pass", elements=elements, decided=elements, details=own)


EMPTY = ("attend.8", "attend.9")
"""Clauses of tokens that see nothing: a NaN there needs no further reason."""
PLACES = ("pages.3", "pages.4", "attend.6", "attend.12")
"""Clauses of which slot a kernel reads: breaking one makes it read what it must not, as no more than a consequence."""


def unpoisoned_cause(
    problem: AttendProblem, expected: AttendExpected, output: np.ndarray, lse: np.ndarray | None, result: Result
) -> Result:
    """`result`, a failure with NaN, or a better reason for it: the finding on the same call with zeros in all places
    that must not be read, if it names where the kernel reads."""
    again = judge_attend(problem, expected, output, lse, id=result.id)
    if again.status != "fail" or again.clause not in PLACES or again.details.get("hint") is None:
        return result
    text = f"It reads what it must not, and gives NaN; with zeros in those places: {again.diagnosis}"
    return dataclasses.replace(again, diagnosis=text)


def expected_of(vector: Vector, declared: Capabilities) -> AttendExpected:
    """What the declared arithmetic allows: rows of one query token may have a model of their own."""
    prefill, decode = declared.numeric_model, declared.decode_numeric_model
    expected = expectation(vector, prefill)
    problem = vector.problem
    assert isinstance(problem, AttendProblem)
    if decode == prefill:
        return expected
    other = expectation(vector, decode)
    lens = problem.table.query_lens
    single = np.zeros(problem.table.num_tokens, bool)
    single[: int(problem.table.query_offsets[-1])] = np.repeat(lens == 1, lens)
    fields = ("low", "high", "lse_low", "lse_high", "exact", "deviation")
    pairs = {name: (getattr(expected, name), getattr(other, name)) for name in fields}
    mixed = {
        name: None if a is None or b is None else np.where(single.reshape(-1, *[1] * (a.ndim - 1)), b, a)
        for name, (a, b) in pairs.items()
    }
    return dataclasses.replace(expected, **mixed)


def compare(base: execute.AttendOutput, outputs: list[execute.AttendOutput], calls: Any) -> tuple[str | None, int]:
    """The first difference between the base and outputs that together must equal it, and how much was compared.

    Words are compared, so −0 differs from +0. A padding token's output must be +0 and its LSE −∞.
    """
    compared = 0
    for output, call in zip(outputs, calls):
        live = call.tokens != PADDING
        pairs = [("output", base.out, output.out, 0)]
        if base.lse is not None and output.lse is not None:
            lse_words = int(np.array(-np.inf, np.float32).view(np.uint32))
            pairs.append(("LSE", base.lse.view(np.uint32), output.lse.view(np.uint32), lse_words))
        for what, old, new, padding in pairs:
            want = np.full(new.shape, padding, new.dtype)
            want[live] = old[call.tokens[live]]
            compared += new.size
            moved = want != new
            if moved.any():
                at = tuple(int(i) for i in np.argwhere(moved)[0])
                digits = 2 * new.dtype.itemsize
                where = ", ".join(f"{name} {i}" for name, i in zip(("head", "dim"), at[1:]))
                token = "a padding token" if not live[at[0]] else f"token {call.tokens[at[0]]}"
                return (
                    f"{int(moved.sum())} of {new.size} words of the {what} differ, first at {token}, {where}: "
                    f"0x{want[at]:0{digits}x} -> 0x{new[at]:0{digits}x}"
                ), compared
    return None, compared


def parse_mesh(params: Mapping[str, Any]) -> Mesh | None:
    """The mesh of a case, `{"axis": size, …}` in `mesh` and the axes of KV heads in `kv_axes`."""
    sizes, axes = params.get("mesh"), params.get("kv_axes")
    if sizes is None:
        return None
    good = isinstance(sizes, Mapping) and 0 < len(sizes) <= 4
    if not good or not all(isinstance(n, int) and 0 < n <= 64 for n in sizes.values()):
        raise InvalidInputError(f"params.mesh must map 1 to 4 axes to sizes in 1..64, got {sizes!r}.")
    if not isinstance(axes, (list, tuple)) or not all(isinstance(a, str) for a in axes):
        raise InvalidInputError(f"params.kv_axes must list the axes of params.mesh that shard KV heads, got {axes!r}.")
    return Mesh(dict(sizes), tuple(axes))


def mesh_sharding(mesh: Mesh | None) -> KvSharding | None:
    """The mesh over this process's devices; raises `NoDeviceError` if there are too few."""
    if mesh is None:
        return None
    shape = tuple(mesh.sizes.values())
    count, devices = int(np.prod(shape)), all_devices()
    if len(devices) < count:
        raise NoDeviceError(f"no device: {mesh} needs {count} devices, this process sees {len(devices)}.")
    grid = np.array(devices[:count]).reshape(shape)
    return KvSharding(jax.sharding.Mesh(grid, tuple(mesh.sizes)), mesh.kv_axes)


def describe_error(error: BaseException) -> str:
    """Type, message and place of an exception, short enough for a certificate."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (at {'/'.join(frames[-1].filename.split('/')[-3:])}:{frames[-1].lineno})" if frames else ""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__}, whose text cannot be made"
    return (text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + " …") + place
