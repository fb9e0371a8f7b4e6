"""Which compiled programs a runner has used, and the refusal of new ones once that is all there should be."""

from __future__ import annotations

from collections.abc import Hashable

from paged.common.errors import LateCompileError


class ProgramBook:
    """Programs by what they are compiled for. `seal` it after a warm-up, and a program that is not in it is refused."""

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, ...], None] = {}
        self.sealed = False

    def __len__(self) -> int:
        return len(self._known)

    def expect(self, *program: Hashable) -> None:
        """This program is about to run. Raises `LateCompileError` if it is new and the book is sealed."""
        if program in self._known:
            return
        if self.sealed:
            raise LateCompileError(
                f"a step wants a program that the warm-up did not compile: {_words(program)}. Warm up with what the "
                f"requests ask for (`warm_up(SamplingParams(…))`), or do without strict=True."
            )
        self._known[program] = None

    @property
    def steps(self) -> int:
        """Programs that run a step; the others move pages."""
        return sum(not isinstance(program[0], str) for program in self._known)

    def seal(self) -> None:
        """From now on no new program is expected."""
        self.sealed = True


def _words(program: tuple[Hashable, ...]) -> str:
    if isinstance(program[0], str):
        return f"{program[0]} of {program[1]} pages"
    made, rung = program
    abilities = f"level={made.level}, num_top={made.num_top}, scores_prompt={made.scores_prompt}"  # type: ignore[union-attr]
    return (
        f"{rung.rows} rows, {rung.tokens} tokens, queries up to {rung.max_query_len}, lengths up to "  # type: ignore[union-attr]
        f"{rung.max_kv_len} ({abilities})"  # type: ignore[union-attr]
    )
