"""Planes, a fake pool that obeys their callbacks, and a snapshot that shows whether anything changed."""

from __future__ import annotations

import numpy as np

from paged.common import CacheNamespace, PageTable, StorageLayout
from paged.control import ControlPlane, Handle, Slice

ARRAYS = ("query_offsets", "page_offsets", "page_ids", "last_page_len", "kv_lens", "write_slots")
SCRUBBED, POISONED = 0, -1


def make_layout(num_pages: int = 13, tokens_per_page: int = 4) -> StorageLayout:
    return StorageLayout(
        num_layers=2, num_pages=num_pages, tokens_per_page=tokens_per_page, num_kv_heads=2, head_dim=8, dtype="bfloat16"
    )


def make_plane(num_pages: int = 13, tokens_per_page: int = 4, **kwargs) -> ControlPlane:
    return ControlPlane(make_layout(num_pages, tokens_per_page), **{"max_requests": 4, **kwargs})


def make_namespace(**fields) -> CacheNamespace:
    return CacheNamespace(**{"weights": "w", "revision": 1, "tokenizer": "t", "kv_dtype": "bfloat16", **fields})


def open_with(plane: ControlPlane, num_tokens: int) -> Handle:
    """A new request with `num_tokens` cached tokens, its dirty pages taken as scrubbed."""
    handle = plane.open()
    assert handle is not None
    if num_tokens:
        checked(plane.prepare([Slice(handle, 0, num_tokens)], lambda pages: None))
    return handle


def checked(table: PageTable | None) -> PageTable:
    """The table, after its fields went through every check of the constructor and came out equal."""
    assert table is not None
    arrays = {name: getattr(table, name) for name in ARRAYS}
    for array in arrays.values():
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        assert not array.flags.writeable
    bounds = {name: getattr(table, name) for name in ("max_query_len", "max_kv_len", "tokens_per_page", "num_pages")}
    assert all(type(value) is int for value in bounds.values())
    assert PageTable(**arrays, **bounds) == table
    return table


def never(*pages: np.ndarray) -> None:
    raise AssertionError(f"called with {pages}")


def snapshot(value: object) -> object:
    """All state reachable from a plane as comparable data; what it merely remembers to be faster is left out."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [snapshot(item) for item in value]
    if type(value).__module__.startswith("paged.control") and hasattr(value, "__dict__"):
        return {k: snapshot(v) for k, v in vars(value).items() if k not in ("_reader", "_counting", "poison_freed")}
    return value


class FakePool:
    """One integer for each slot instead of K and V: what was written, or why nothing is there."""

    def __init__(self, plane: ControlPlane):
        self.plane = plane
        self.size = plane.layout.tokens_per_page
        self.slots = np.full((plane.layout.num_pages, self.size), SCRUBBED, np.int64)
        self.scrubbed: list[list[int]] = []
        self.copied: list[tuple[list[int], list[int]]] = []

    def scrub(self, pages: np.ndarray) -> None:
        assert pages.dtype == np.int32
        assert len(set(pages.tolist())) == pages.shape[0] > 0
        self.slots[pages] = SCRUBBED
        self.scrubbed.append(pages.tolist())

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        assert source.dtype == target.dtype == np.int32
        assert source.shape == target.shape
        self.slots[target] = self.slots[source]
        self.copied.append((source.tolist(), target.tolist()))

    def poison(self, pages: np.ndarray) -> None:
        self.slots[pages] = POISONED

    def run(self, table: PageTable, values: list[int]) -> None:
        """The step: token i's value goes to its write slot."""
        flat = self.slots.reshape(-1)
        live = table.write_slots >= 0
        assert live.sum() == len(values)
        flat[table.write_slots[live]] = values

    def read(self, table: PageTable, row: int) -> list[int]:
        """What attention of a row sees: its pages in order, up to its length."""
        return self.slots[table.pages_of(row)].reshape(-1)[: table.kv_lens[row]].tolist()

    def cached(self, handle: Handle) -> list[int]:
        """What is in the cache for a request."""
        return self.slots[self.plane.pages_of(handle)].reshape(-1)[: self.plane.length(handle)].tolist()
