"""A control plane in dicts and sets: who holds which page, what every request reads, what is evicted next.

A page is an object with a set of holders. The content of a token's slot is a number that stands for all tokens up to
it, as K and V do, so two requests with one prefix have one content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from paged.control import Handle, Slice

INDEX = "index"


@dataclasses.dataclass(eq=False)
class Page:
    """`holders` are handles and the index; `steps` in flight name the page."""

    holders: set[Hashable] = dataclasses.field(default_factory=set)
    steps: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class Request:
    handle: Handle
    tokens: list[int] = dataclasses.field(default_factory=list)
    pages: list[Page] = dataclasses.field(default_factory=list)
    copy: tuple[int, Page] | None = None


@dataclasses.dataclass(eq=False)
class Node:
    """One published page; the index maps a tuple of all tokens up to its end to it."""

    page: Page
    used: int


Batch = list[tuple[Request, int]]


class PlaneModel:
    def __init__(self, num_pages: int, size: int):
        self.usable = num_pages - 1
        self.size = size
        self.requests: dict[Handle, Request] = {}
        self.waiting: set[Page] = set()  # nobody's, and in flight
        self.index: dict[tuple[int, ...], Node] = {}
        self.clock = 0
        self.contents: dict[tuple[int, ...], int] = {}

    def content(self, tokens: list[int]) -> list[int]:
        """The numbers that the slots of a request with these tokens hold."""
        prefixes = (tuple(tokens[: i + 1]) for i in range(len(tokens)))
        return [self.contents.setdefault(prefix, len(self.contents) + 1) for prefix in prefixes]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def held(self) -> set[Page]:
        out = self.waiting | {node.page for node in self.index.values()}
        for request in self.requests.values():
            out |= set(request.pages) | ({request.copy[1]} if request.copy else set())
        return out

    def free(self) -> int:
        return self.usable - len(self.held())

    def partial(self, request: Request) -> Page | None:
        """The page that the request's next token goes to, if it holds some already."""
        full, rest = divmod(len(request.tokens), self.size)
        return request.pages[full] if rest else None

    def wants(self, batch: Batch) -> tuple[int, list[Request]]:
        """New pages, and the requests that need a copy first."""
        grow = sum(max(0, self.pages_for(len(r.tokens) + n) - len(r.pages)) for r, n in batch)
        leaving = [r for r in self.requests.values() if r.copy]
        copies = []
        for request, _ in batch:
            page = self.partial(request)
            if page and not request.copy and len(page.holders) - sum(page is r.pages[c] for r, c in at(leaving)) > 1:
                request_copy = (len(request.tokens) // self.size, Page({request.handle}))
                copies.append((request, request_copy))
                leaving.append(dataclasses.replace(request, copy=request_copy))
        return grow, [request for request, _ in copies]

    def copies_before(self, batch: Batch) -> list[Request]:
        """Requests whose copy must be made first: those that write, and those that a writer would write over."""
        written = {page for page in (self.partial(r) for r, _ in batch) if page}
        writers = [id(r) for r, _ in batch]
        return [r for r, c in at(self.requests.values()) if id(r) in writers or r.pages[c] in written]

    def evictable(self) -> set[tuple[int, ...]]:
        return {key for key, node in self.index.items() if node.page.holders == {INDEX} and not node.page.steps}

    def available(self) -> int:
        return self.free() + len(self.evictable())

    def evict(self, count: int) -> None:
        while count:
            parents, free = {key[: -self.size] for key in self.index}, self.evictable()
            leaves = [k for k in free if k not in parents]
            if leaves:
                count -= 1
            else:  # somebody holds what is below a page that nobody holds
                above = {
                    k: {k[:n] for n in range(self.size, len(k), self.size)} for k in self.index if k not in parents
                }
                leaves = [k for k, keys in above.items() if keys & free]
            leaf = min(leaves, key=lambda k: self.index[k].used)
            self.let_go(INDEX, [self.index.pop(leaf).page])

    def take(self, batch: Batch) -> None:
        """A reservation that is granted."""
        grow, copies = self.wants(batch)
        self.evict(max(0, grow + len(copies) - self.free()))
        for request, n in batch:
            while len(request.pages) < self.pages_for(len(request.tokens) + n):
                request.pages.append(Page({request.handle}))
        for request in copies:
            request.copy = (len(request.tokens) // self.size, Page({request.handle}))

    def settle(self, request: Request) -> None:
        """A confirmed copy takes the place of the shared page."""
        assert request.copy
        number, page = request.copy
        self.let_go(request.handle, [request.pages[number]])
        request.pages[number], request.copy = page, None

    def let_go(self, holder: Hashable, pages: list[Page]) -> None:
        for page in pages:
            page.holders.discard(holder)
            if not page.holders and page.steps:
                self.waiting.add(page)

    def cut(self, request: Request, length: int) -> None:
        """Truncate, or release with length 0."""
        del request.tokens[length:]
        keep = self.pages_for(length)
        dropped, request.pages = request.pages[keep:], request.pages[:keep]
        if request.copy and request.copy[0] >= keep:
            dropped.append(request.copy[1])
            request.copy = None
        self.let_go(request.handle, dropped)

    def chain(self, tokens: list[int], whole: int) -> list[tuple[int, ...]]:
        return [tuple(tokens[: (i + 1) * self.size]) for i in range(whole)]

    def match(self, tokens: list[int]) -> list[tuple[int, ...]]:
        found = []
        for key in self.chain(tokens, max(0, len(tokens) - 1) // self.size):
            if key not in self.index:
                break
            found.append(key)
        return found

    def attach(self, request: Request, tokens: list[int]) -> None:
        keys = self.match(tokens)
        self.clock += 1
        for key in keys:
            node = self.index[key]
            node.used = self.clock
            node.page.holders.add(request.handle)
            request.pages.append(node.page)
        request.tokens = tokens[: len(keys) * self.size]

    def publish(self, request: Request, length: int) -> list[Page]:
        self.clock += 1
        adopted = []
        for key, page in zip(self.chain(request.tokens, length // self.size), request.pages):
            if key not in self.index:
                self.index[key] = Node(page, self.clock)
                page.holders.add(INDEX)
                adopted.append(page)
            self.index[key].used = self.clock
        return adopted

    def slices(self, batch: Batch) -> list[Slice]:
        return [Slice(r.handle, len(r.tokens), n) for r, n in batch]


def at(requests) -> list[tuple[Request, int]]:
    """Requests that wait for a copy, with the number of the page it replaces."""
    return [(request, request.copy[0]) for request in requests if request.copy]
