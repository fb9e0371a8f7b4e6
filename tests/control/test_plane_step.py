"""One step through the control plane: what is reserved, what is overwritten, what the table says."""

import numpy as np

from paged.common import PageTable, StorageLayout
from paged.control import ControlPlane, Slice

FIELDS = ("query_offsets", "page_offsets", "page_ids", "last_page_len", "kv_lens", "write_slots")


def make_plane(num_pages: int = 13, tokens_per_page: int = 4, **kwargs) -> ControlPlane:
    layout = StorageLayout(
        num_layers=2, num_pages=num_pages, tokens_per_page=tokens_per_page, num_kv_heads=2, head_dim=8, dtype="bfloat16"
    )
    return ControlPlane(layout, **{"max_requests": 4, **kwargs})


def checked(table: PageTable | None) -> PageTable:
    """The table, after its fields went through every check of the constructor."""
    assert table is not None
    fields = {name: getattr(table, name) for name in (*FIELDS, "max_query_len", "max_kv_len", "num_pages")}
    again = PageTable(**fields, tokens_per_page=table.tokens_per_page)
    assert again == table
    for name in FIELDS:
        array = getattr(table, name)
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        assert not array.flags.writeable
    return table


def never(*pages: np.ndarray) -> None:
    raise AssertionError(f"called with {pages}")


def test_mixed_prefill_and_decode():
    plane = make_plane()
    a, b = plane.open(), plane.open()
    checked(plane.prepare([Slice(a, 0, 5)], never))
    table = checked(plane.prepare([Slice(b, 0, 3), Slice(a, 5, 1)], never))
    assert table.query_offsets.tolist() == [0, 3, 4]
    assert table.kv_lens.tolist() == [3, 6]
    assert table.last_page_len.tolist() == [3, 2]
    assert table.pages_of(0).tolist() == plane.pages_of(b).tolist() == [3]
    assert table.pages_of(1).tolist() == plane.pages_of(a).tolist() == [1, 2]
    assert table.write_slots.tolist() == [12, 13, 14, 9]
    assert (table.max_query_len, table.max_kv_len) == (3, 6)
    assert (plane.length(a), plane.length(b)) == (6, 3)
    plane.verify()
