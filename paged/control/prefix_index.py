"""Token prefix → pages that already hold its K and V: a trie whose nodes are pages (requirements C5, X1)."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from paged.common.checks import check_int32_vector, refuse_rows, show
from paged.common.errors import InternalError, InvalidInputError
from paged.common.layout import SENTINEL_PAGE, StorageLayout
from paged.common.namespace import CacheNamespace

Chain = Callable[[bytes, bytes], bytes]


def chain_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a page: BLAKE2b over token ids (uint32, little-endian), keyed by the parent's key, domain-separated."""
    return hashlib.blake2b(tokens, key=parent, person=b"paged.prefix.v1", digest_size=32).digest()


class PrefixIndex:
    """Trie of published pages; a node is one whole page, its parent the page of the tokens before it.

    A key is a hash chained from the parent's key, and a chain starts at the namespace's digest, so two configurations
    share nothing. A hit also needs the same parent and equal tokens, so a collision of keys can only miss (C7).

    This class knows pages and tokens; who holds a page is the control plane's matter, which keeps one reference for
    each page in the index. Recency is a counter of operations, no clock, so the order of eviction is deterministic.

    - `layout`: geometry of the pool; a node holds `tokens_per_page` tokens.
    - `chain`: (parent key, token bytes) → key; another one than `chain_key` is for tests of collisions.
    """

    def __init__(self, layout: StorageLayout, chain: Chain = chain_key):
        if not isinstance(layout, StorageLayout):
            raise InvalidInputError(f"PrefixIndex.layout must be a StorageLayout, got {show(layout)}.")
        self.tokens_per_page = layout.tokens_per_page
        self._chain = chain
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}
        self._content: dict[int, tuple[bytes, bytes]] = {}  # page -> namespace digest, its tokens
        self._held = np.zeros(layout.num_pages, np.bool_)
        self._parent = np.zeros(layout.num_pages, np.int32)  # the sentinel is the parent of first pages
        self._children = np.zeros(layout.num_pages, np.int32)
        self._last_used = np.zeros(layout.num_pages, np.int64)
        self._clock = 0
        self.held = self._held.view()
        self.held.flags.writeable = False

    def __len__(self) -> int:
        return len(self._key_of_page)

    @property
    def num_pages(self) -> int:
        """Pages of one layer of the pool, the sentinel included."""
        return self._held.shape[0]

    def match(self, namespace: CacheNamespace, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """int32 pages that hold the longest published prefix of a prompt, in token order; nothing changes.

        At most (len(tokens) − 1) // tokens_per_page pages, so at least one token is left to compute (scenario C1).
        """
        ids = token_ids("PrefixIndex.match", tokens)
        whole = max(0, ids.shape[0] - 1) // self.tokens_per_page
        pages: list[int] = []
        parent, root = SENTINEL_PAGE, _digest("match", namespace)
        key = root
        for content in self._pages_of(ids, whole):
            key = self._chain(key, content)
            page = self._page_of_key.get(key)
            if page is None or not self._is(page, parent, root, content):
                break
            pages.append(page)
            parent = page
        return np.array(pages, np.int32)

    def touch(self, pages: np.ndarray) -> None:
        """These pages were used now."""
        self._clock += 1
        self._last_used[pages] = self._clock

    def insert(self, namespace: CacheNamespace, tokens: Sequence[int] | np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Publish a request's whole pages: pages[i] holds tokens i × tokens_per_page on. Returns those adopted (int32).

        A page whose tokens are published already is not adopted; those after it are, below the page that is. Publishing
        stops at a collision of keys. Counts as a use of the whole chain.
        Raises `InvalidInputError` naming a page that is published with other tokens, before anything changes.
        """
        ids = token_ids("PrefixIndex.insert", tokens)
        parent, root = SENTINEL_PAGE, _digest("insert", namespace)
        key = root
        chain: list[int] = []
        new: dict[bytes, tuple[int, int, bytes]] = {}
        for content, own in zip(self._pages_of(ids, ids.shape[0] // self.tokens_per_page), pages.tolist()):
            key = self._chain(key, content)
            page = self._page_of_key.get(key)
            if key in new or (page is not None and not self._is(page, parent, root, content)):
                break
            if page is None:
                page = own
                if self._held[page]:
                    raise InvalidInputError(
                        f"PrefixIndex.insert: page {page} is published with other tokens. Publish what the pages hold."
                    )
                new[key] = page, parent, content
            chain.append(page)
            parent = page
        for key, (page, parent, content) in new.items():
            self._page_of_key[key], self._key_of_page[page] = page, key
            self._content[page] = root, content
            self._held[page], self._parent[page] = True, parent
            self._children[parent] += 1
        self.touch(np.array(chain, np.int32))
        return np.array([page for page, _, _ in new.values()], np.int32)

    def _is(self, page: int, parent: int, root: bytes, content: bytes) -> bool:
        """Whether a page that a key led to is the one meant, tokens and all."""
        return bool(self._parent[page] == parent) and self._content[page] == (root, content)

    def evictable(self, pinned: np.ndarray) -> np.ndarray:
        """(num_pages,) bool: pages that eviction may take while `pinned` (num_pages,) ones must stay where they are."""
        return self._held & ~pinned

    def evict(self, count: int, pinned: np.ndarray) -> np.ndarray:
        """Forget up to `count` unpinned pages, each time the leaf that was used longest ago.

        Where no leaf is left but pinned ones, the one of those below an unpinned page that was used longest ago is
        forgotten, too, and does not count: its holder has computed what is above it once more for itself, and would
        keep pages that nobody holds. Returns all that were forgotten, in order.
        """
        free = self._held & ~pinned
        leaves = np.flatnonzero(free & (self._children == 0))
        if leaves.shape[0] > count > 0:  # a parent was used no earlier than its child, so older leaves go first
            leaves = leaves[np.argpartition(self._last_used[leaves], count - 1)[:count]]
        heap = list(zip(self._last_used[leaves].tolist(), leaves.tolist()))
        heapq.heapify(heap)
        forgotten: list[int] = []
        while count > 0:
            if heap:
                page = heapq.heappop(heap)[1]
                count -= 1
            elif (below := self._pinned_leaves(pinned)).shape[0]:
                page = int(below[np.argmin(self._last_used[below])])
            else:
                break
            parent = int(self._parent[page])
            self._forget(page)
            forgotten.append(page)
            if parent != SENTINEL_PAGE and free[parent] and self._children[parent] == 0:
                heapq.heappush(heap, (int(self._last_used[parent]), parent))
        return np.array(forgotten, np.int32)

    def _pinned_leaves(self, pinned: np.ndarray) -> np.ndarray:
        """Pinned pages with nothing below them and an unpinned page above them."""
        leaves = np.flatnonzero(self._held & pinned & (self._children == 0))
        found = np.zeros(leaves.shape, np.bool_)
        above = self._parent[leaves]
        while above.any():
            found |= (above != SENTINEL_PAGE) & ~pinned[above]
            above = self._parent[above]  # the sentinel's is the sentinel
        return leaves[found]

    def clear(self) -> np.ndarray:
        """Forget every page; returns them (int32)."""
        pages = np.flatnonzero(self._held).astype(np.int32)
        for page in pages.tolist():
            self._forget(page)
        return pages

    def _forget(self, page: int) -> None:
        del self._page_of_key[self._key_of_page.pop(page)]  # with its page the key goes, too (scenario C16)
        del self._content[page]
        self._children[self._parent[page]] -= 1
        self._held[page], self._parent[page] = False, SENTINEL_PAGE

    def _pages_of(self, ids: np.ndarray, whole: int) -> Iterator[bytes]:
        data = ids.astype("<u4").tobytes()
        step = 4 * self.tokens_per_page
        return (data[i * step : (i + 1) * step] for i in range(whole))

    def verify(self) -> None:
        """Prove that keys, parents, tokens and counts agree; raises `InternalError` naming a page."""
        pages = np.flatnonzero(self._held).tolist()
        children = np.bincount(self._parent[pages], minlength=self.num_pages)
        for page in pages:
            parent, (root, content) = int(self._parent[page]), self._content[page]
            above = root if parent == SENTINEL_PAGE else self._key_of_page.get(parent, b"")
            for rule, good in (
                ("is in the index and is the sentinel", page != SENTINEL_PAGE),
                ("hangs below a page that is not in the index", parent == SENTINEL_PAGE or self._held[parent]),
                ("has another namespace than its parent", self._content.get(parent, (root,))[0] == root),
                ("has a key that its tokens do not give", self._chain(above, content) == self._key_of_page[page]),
                ("is not the page of its key", self._page_of_key.get(self._key_of_page[page]) == page),
                ("does not hold whole pages of tokens", len(content) == 4 * self.tokens_per_page),
            ):
                if not good:
                    raise InternalError(f"PrefixIndex: page {page} {rule}.")
        if not len(pages) == len(self._page_of_key) == len(self._key_of_page) == len(self._content):
            raise InternalError(f"PrefixIndex: {len(pages)} pages are held, {len(self._page_of_key)} have keys.")
        wrong = children != self._children
        if wrong.any():
            page = int(np.argmax(wrong))
            raise InternalError(f"PrefixIndex: page {page} has {children[page]} children, not {self._children[page]}.")


def token_ids(owner: str, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """`tokens` as int32 ids; raises `InvalidInputError` for `owner`, naming the first that is negative."""
    ids = check_int32_vector(owner, "tokens", tokens)
    refuse_rows(owner, "tokens", ids, ids < 0, "must not be negative", "token")
    return ids


def _digest(method: str, namespace: CacheNamespace) -> bytes:
    if not isinstance(namespace, CacheNamespace):
        raise InvalidInputError(f"PrefixIndex.{method}.namespace must be a CacheNamespace, got {show(namespace)}.")
    return namespace.digest()
