"""Compiling ahead of time whatever steps can need, by running each program once on nothing but padding."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from paged.common.errors import InvalidInputError
from paged.control import FixedShape, PinnedShapes, ShapeLadders
from paged.engine.params import GREEDY, NUM_WORDS, SamplingParams
from paged.engine.runner import Packed
from paged.engine.step import Program, pack_step
from paged.engine.step_inputs import build_step_inputs

if TYPE_CHECKING:
    from paged.engine.runtime import Runtime

Say = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """What a warm-up did: programs that run steps, programs that move pages, and seconds."""

    step_programs: int
    move_programs: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"warm-up: {self.step_programs} step programs and {self.move_programs} that move pages in "
            f"{self.seconds:.1f} s"
        )


def warm_up(runtime: Runtime, params: Iterable[SamplingParams], *, strict: bool, say: Say | None) -> WarmUp:
    """See `Runtime.warm_up`."""
    plane, runner = runtime.plane, runtime.runner
    if plane.num_open or plane.held_pages:
        raise InvalidInputError(
            f"warm_up: {plane.num_open} requests are open and {plane.held_pages} pages are held. Warm up before the "
            f"first request, or after forget_prefixes()."
        )
    began, book = time.perf_counter(), runner.programs
    steps, moves = book.steps, len(book) - book.steps
    programs = _variants(runner.program, params)
    for shape in _rungs(runtime):
        table = plane.padding(shape)
        inputs = build_step_inputs([], [], table)
        for program in programs:
            words = np.zeros(table.num_rows * NUM_WORDS, np.int32) if program.level > GREEDY else None
            targets = np.zeros(table.num_tokens, np.int32) if program.scores_prompt else None
            vector, rung = pack_step(inputs, table, words, targets)
            runner.read(runner.launch(Packed((), vector, rung, np.zeros(0, np.bool_), program, ())))
    _moves(runtime)
    runner.rest()
    runner.traces.clear()
    if strict:
        book.seal()
    done = WarmUp(book.steps - steps, len(book) - book.steps - moves, time.perf_counter() - began)
    if say is not None:
        say(str(done))
    return done


def _rungs(runtime: Runtime) -> Iterator[FixedShape]:
    shapes = runtime.plane.shapes
    if isinstance(shapes, (PinnedShapes, ShapeLadders)):
        return shapes.rungs()
    if isinstance(shapes, FixedShape):
        return iter((shapes,))
    raise InvalidInputError(
        f"warm_up: the shapes that {type(shapes).__name__} can give are not known. Use ShapeLadders, PinnedShapes or "
        f"FixedShape."
    )


def _variants(base: Program, params: Iterable[SamplingParams]) -> list[Program]:
    """The programs of steps that hold any mix of such requests, while their prompts are scored and after."""
    found: dict[Program, None] = {}
    for one in params:
        found[base.doing(one.level, base.num_top if one.logprobs else 0, False)] = None
        if one.prompt_logprobs is not None:
            found[base.doing(one.level, base.num_top if one.num_top else 0, True)] = None
    while True:
        mixed = {a | b: None for a in found for b in found}
        if len(mixed) == len(found):
            return list(found)
        found = found | mixed


def _moves(runtime: Runtime) -> None:
    """Scrub, copy and, if freed pages are poisoned, poison, once for each length of their lists."""
    runner, usable = runtime.runner, runtime.layout.usable_pages
    count = 1
    while True:
        count = min(runner.pool.batch_size(count), usable)
        pages = np.arange(1, count + 1, dtype=np.int32)
        runner.copy(pages, pages)
        if runtime.poisons:
            runner.poison(pages)
        runner.scrub(pages)  # last: what was never used is taken to be clean
        if count == usable:
            return
        count += 1
