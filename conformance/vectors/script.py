"""Scripts of an engine's steps: who runs, whose pages are whose, in words of a small closed language.

A script is a list of steps, each a text of words apart by spaces:

- `a+7`: request a (a letter) feeds 7 more tokens. A letter that holds nothing begins at position 0.
- `-a`: before the step, a is finished and gives its pages back. `!a`: a is preempted: the same, and its tokens are fed
  again later, as the same tokens, wherever pages are free then.
- `b=a:32`: before the step, b begins with the first 32 tokens of a, on a's pages: whole ones, as a prefix cache shares.
- `b~a`: before the step, b is forked from a: whole pages are shared, the last one is copied if it is not full.

Pages are counted, freed when nobody holds them, and taken last freed first, so that a freed page has a new owner soon.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from paged.common import pages_for
from paged.common.errors import InvalidInputError

MAX_STEPS = 48
MAX_LETTERS = 16

_WORD = re.compile(
    r"(?:(?P<drop>[-!])(?P<gone>[a-p])|(?P<new>[a-p])(?:(?P<how>[=~])(?P<of>[a-p])(?::(?P<n>\d{1,5}))?|\+(?P<q>\d{1,4})))\Z"
)

Lineage = tuple[tuple[str, int], ...]
"""Whose tokens a request holds: (letter, end) of each stretch, the last one open-ended as `(letter, -1)`."""


@dataclasses.dataclass
class Request:
    """A request as the script sees it: `length` tokens held, on `pages`, its tokens named by `lineage`."""

    letter: str
    lineage: Lineage
    length: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)

    def origin(self, position: int) -> str:
        """The letter whose token lies at that position."""
        return next(letter for letter, end in self.lineage if end < 0 or position < end)

    def key(self, position: int) -> str:
        """A name for the token at that position and all tokens before it."""
        stretches = []
        for letter, end in self.lineage:
            if 0 <= end <= position:
                stretches.append(f"{letter}{end}")
            else:
                return "/".join([*stretches, f"{letter}@{position}"])
        raise AssertionError("a lineage ends openly")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a step: `fed` new tokens of a request that holds `length` afterwards on `pages`."""

    request: Request
    fed: int
    length: int
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: pages given back before it, pages newly taken, (source, target) of pages copied, then the rows."""

    text: str
    freed: tuple[int, ...]
    taken: tuple[int, ...]
    copied: tuple[tuple[int, int], ...]
    rows: tuple[Row, ...]


class Engine:
    """Plays a script over `order`, the free pages in the order in which they are first taken."""

    def __init__(self, page: int, order: Sequence[int]):
        self.page = page
        self.free = [int(page) for page in order][::-1]
        self.count: dict[int, int] = {}
        self.requests: dict[str, Request] = {}

    def step(self, text: str, where: str) -> Step:
        """The step that `text` describes; raises `InvalidInputError` beginning with `where` for one that cannot be."""
        self._freed: list[int] = []
        self._taken: list[int] = []
        copied: list[tuple[int, int]] = []
        rows: list[Row] = []
        for word in text.split():
            match = _WORD.match(word)
            if match is None:
                raise InvalidInputError(f"{where}: {word!r} is not a word of a script (a+7, -a, !a, b=a:32, b~a).")
            if match["drop"]:
                self._drop(where, match["gone"], finished=match["drop"] == "-")
            elif match["q"]:
                rows.append(self._feed(where, match["new"], int(match["q"])))
            else:
                copied += self._begin(where, match["new"], match["of"], match["how"], match["n"])
        if not rows:
            raise InvalidInputError(f"{where}: {text!r} feeds no token.")
        letters = [row.request.letter for row in rows]
        if len(set(letters)) != len(letters):
            raise InvalidInputError(f"{where}: {text!r} feeds a request twice.")
        return Step(text, tuple(self._freed), tuple(self._taken), tuple(copied), tuple(rows))

    def _held(self, where: str, letter: str) -> Request:
        request = self.requests.get(letter)
        if request is None or not request.length:
            raise InvalidInputError(f"{where}: request {letter!r} holds nothing.")
        return request

    def _drop(self, where: str, letter: str, *, finished: bool) -> None:
        request = self._held(where, letter)
        for page in request.pages:
            self.count[page] -= 1
            if not self.count[page]:
                self.free.append(page)
                self._freed.append(page)
        self.requests[letter] = Request(letter, request.lineage)
        if finished:
            self.requests[letter] = Request(letter, ((letter, -1),))

    def _take(self, where: str) -> int:
        if not self.free:
            raise InvalidInputError(f"{where}: no page is free; raise params.num_pages or release a request.")
        page = self.free.pop()
        self.count[page] = 1
        self._taken.append(page)
        return page

    def _feed(self, where: str, letter: str, tokens: int) -> Row:
        request = self.requests.setdefault(letter, Request(letter, ((letter, -1),)))
        last = request.length // self.page
        if request.length % self.page and self.count[request.pages[last]] > 1:
            raise InvalidInputError(f"{where}: {letter!r} would write to page {request.pages[last]}, which is shared.")
        request.length += tokens
        while len(request.pages) < pages_for(request.length, self.page):
            request.pages.append(self._take(where))
        return Row(request, tokens, request.length, tuple(request.pages))

    def _begin(self, where: str, letter: str, of: str, how: str, length: Any) -> list[tuple[int, int]]:
        source = self._held(where, of)
        if (held := self.requests.get(letter)) is not None and held.length:
            raise InvalidInputError(f"{where}: request {letter!r} runs already.")
        shared = int(length) if length else source.length
        if not 0 < shared <= source.length or (how == "=" and shared % self.page):
            raise InvalidInputError(
                f"{where}: {letter}{how}{of} shares {shared} of {source.length} tokens; a prefix is whole pages of "
                f"{self.page} tokens, a fork all that there is."
            )
        stretches: list[tuple[str, int]] = []
        for name, end in source.lineage:
            stretches.append((name, shared if end < 0 else min(end, shared)))
            if end < 0 or end >= shared:
                break
        whole = shared // self.page
        request = Request(letter, (*stretches, (letter, -1)), shared, source.pages[:whole])
        for page in request.pages:
            self.count[page] += 1
        copied = []
        if shared % self.page:
            request.pages.append(self._take(where))
            copied.append((source.pages[whole], request.pages[whole]))
        self.requests[letter] = request
        return copied


def parse(name: str, value: Any) -> tuple[str, ...]:
    """A script as a parameter: at most `MAX_STEPS` texts of at most 200 characters."""
    good = isinstance(value, (list, tuple)) and 0 < len(value) <= MAX_STEPS
    if not good or not all(isinstance(text, str) and 0 < len(text) <= 200 for text in value):
        raise InvalidInputError(f"params.{name} must be a list of 1 to {MAX_STEPS} texts, got {value!r:.80}.")
    return tuple(value)
