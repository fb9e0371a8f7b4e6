"""Which compiled module serves which call. A module has its options compiled in and ignores any other silently, so it
is always chosen from the options, never reused across them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from paged.common.checks import check_choice, check_int

CTYPES = {
    "float32": "float",
    "bfloat16": "nv_bfloat16",
    "float16": "half",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
}
"""CUDA type of each dtype that FlashInfer's templates are instantiated with."""

KINDS = ("append", "decode", "paged", "prefill", "prefill_sm90")


@dataclasses.dataclass(frozen=True, order=True)
class ModuleSpec:
    """One shared library.

    - `kind`: `append` (all dtypes in one), `decode` (CUDA cores, one query token a row), `prefill` (tensor cores, FA2),
      `prefill_sm90` (Hopper, FA3), or `paged`: this project's own, for Hopper: decode with options at run time, and
      what lies around attention in a step of few tokens.
    - `query`, `kv`, `out`: dtypes of query, pool and kernel output. float32 output keeps the partial results of a split
      in float32.
    - `head_dim`; `window`, `soft_cap`: options compiled in.
    """

    kind: str
    query: str = "bfloat16"
    kv: str = "bfloat16"
    out: str = "bfloat16"
    head_dim: int = 128
    window: bool = False
    soft_cap: bool = False

    def __post_init__(self) -> None:
        check_choice("ModuleSpec", "kind", self.kind, KINDS)
        for field in ("query", "kv", "out"):
            check_choice("ModuleSpec", field, getattr(self, field), tuple(CTYPES))
        check_int("ModuleSpec", "head_dim", self.head_dim, minimum=16, maximum=512)

    @property
    def name(self) -> str:
        """File stem and FFI target stem, unique per spec."""
        if self.kind == "append":
            return "append"
        if self.kind == "paged":
            return f"{self.kind}-{self.query}-{self.head_dim}"
        options = "".join(text for flag, text in ((self.window, "-window"), (self.soft_cap, "-cap")) if flag)
        return f"{self.kind}-{self.query}-{self.kv}-{self.out}-{self.head_dim}{options}"


OPTIONS = {"none": (False, False), "window": (True, False), "cap": (False, True), "window+cap": (True, True)}
"""Options compiled into a module, by name: (sliding window, soft cap)."""


def matrix(
    *,
    dtypes: Iterable[str] = ("bfloat16", "float16"),
    kv_dtypes: Iterable[str] = ("same", "float8_e4m3fn"),
    head_dims: Iterable[int] = (64, 128, 256),
    options: Iterable[str] = tuple(OPTIONS),
    hopper: bool = True,
) -> list[ModuleSpec]:
    """Every module that the backend can ask for, both tiers, within the given dtypes, head dims and options.

    `kv_dtypes`: `"same"` is a pool of the query's dtype. `hopper`: with FA3 prefill and this project's own kernels,
    which take no fp8 pools.
    """
    out = [ModuleSpec("append")]
    for query, kv, head_dim, option in itertools.product(dtypes, kv_dtypes, head_dims, options):
        window, soft_cap = OPTIONS[check_choice("matrix", "options", option, tuple(OPTIONS))]
        same = kv == "same"
        common = {"query": query, "kv": query if same else kv, "head_dim": head_dim, "window": window}
        common["soft_cap"] = soft_cap
        out += [ModuleSpec(kind, out="float32", **common) for kind in ("decode", "prefill")]
        if hopper and same:
            out.append(ModuleSpec("prefill_sm90", out=query, **common))
            out.append(own(query, head_dim))
    return list(dict.fromkeys(out))


def own(dtype: str, head_dim: int) -> ModuleSpec:
    """The one module of this project's kernels for a dtype and a head dim."""
    return ModuleSpec("paged", query=dtype, kv=dtype, out=dtype, head_dim=head_dim)
