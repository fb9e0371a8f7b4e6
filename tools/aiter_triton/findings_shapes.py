"""Reproducers of findings about shapes and metadata: what raises, and what is read outside its array."""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from . import kernels
from .findings import VENDOR, Evidence, finding
from .findings_numbers import LONG, worst
from .problem import make


def raised(run: Any) -> str:
    """What a launch raises, as text; empty if nothing."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@finding(
    name="head-dim-in-segments",
    what="rows up to more than 512 tokens with a head dim that is no power of two: the kernel that joins segments "
    "names a variable that it does not have, and does not compile",
    where=f"{VENDOR}/_triton_kernels/unified_attention.py:738",
    consequence="head dim 128 is the only one declared",
)
def head_dim_in_segments() -> Evidence:
    problem = make([1], [40], heads=1, kv_heads=1, dim=80)
    text = raised(lambda: problem.run(max_kv_len=LONG))
    return Evidence("offs_d" in text and worst(problem, problem.run()) < 1e-5, {"in segments": text, "whole": "right"})


@finding(
    name="page-size-power-of-two",
    what="page sizes that are no power of two work next to a prefill and raise where every row is decode or split: a "
    "tile is a page there",
    where=f"{VENDOR}/unified_attention.py:38",
    consequence="page size 16 is the only one declared",
)
def page_size_power_of_two() -> Evidence:
    decode, mixed = (make([n], [40], heads=1, kv_heads=1, page=24) for n in (1, 2))
    text = raised(decode.run)
    error = worst(mixed, mixed.run())
    return Evidence("power of 2" in text and error < 1e-5, {"decode": text, "error next to a prefill": error})


@finding(
    name="empty-row-in-segments",
    what="a row of length 0 with a query token gives 0 as a whole and NaN in segments, after a division by zero",
    where=f"{VENDOR}/_triton_kernels/unified_attention.py:732",
    consequence="no kernel is given an empty row: such rows get the sentinel page and length 1, and their output is "
    "masked",
)
def empty_row_in_segments() -> Evidence:
    problem = make([1, 1], [1, 33], heads=1, kv_heads=1)
    empty = torch.tensor([0, 33], dtype=torch.int32)
    whole, split = problem.run(kv_lens=empty)[0], problem.run(kv_lens=empty, max_kv_len=LONG)[0]
    measured = {"whole": whole.unique().tolist(), "NaN in segments": int(torch.isnan(split).sum())}
    return Evidence(bool((whole == 0).all()) and bool(torch.isnan(split).all()), measured)


@finding(
    name="block-table-overread",
    what="next to a prefill, the block table is read for a whole tile of 64 tokens without a mask, up to 63 tokens' "
    "worth of entries past a row's pages, past the end of the table in its last row",
    where=f"{VENDOR}/_triton_kernels/unified_attention.py:245",
    consequence="tables are made wider by a tile, filled with a valid page",
)
def block_table_overread() -> Evidence:
    folder = Path(__file__).parent
    runs = {}
    for name, spare in (("table of exactly the row's pages", 0), ("table a tile wider", 4)):
        code = f"from aiter_triton.findings_shapes import _guarded; _guarded({spare})"
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder.parent)!r}); {code}"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        runs[name] = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit {done.returncode}"
    return Evidence(list(runs.values()) == ["SIGSEGV", "exit 0"], runs)


def _guarded(spare: int) -> None:
    """Run a row of one page with a block table that ends where readable memory does, `spare` entries behind it."""
    kernels.vendor("unified_attention")
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    none = ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0)
    assert none == 0
    problem = make([2], [10], heads=1, kv_heads=1)
    width = 1 + spare
    buffer = (ctypes.c_char * (4 * width)).from_address(start + mmap.PAGESIZE - 4 * width)
    table = torch.frombuffer(buffer, dtype=torch.int32).view(1, width)
    table[0] = torch.tensor([problem.pages[0][0]] + [0] * spare, dtype=torch.int32)
    assert worst(problem, problem.run(block_table=table)) < 1e-5
    sys.exit(0)
