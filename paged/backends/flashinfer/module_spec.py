"""Which compiled module serves which call. A module has its options compiled in and ignores any other silently, so it
is always chosen from the options, never reused across them."""

from __future__ import annotations

import dataclasses

from paged.common.checks import check_choice, check_int

CTYPES = {
    "float32": "float",
    "bfloat16": "nv_bfloat16",
    "float16": "half",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
}
"""CUDA type of each dtype that FlashInfer's templates are instantiated with."""

KINDS = ("append", "decode", "prefill", "prefill_sm90")


@dataclasses.dataclass(frozen=True, order=True)
class ModuleSpec:
    """One shared library.

    - `kind`: `append` (all dtypes in one), `decode` (CUDA cores, one query token a row), `prefill` (tensor cores, FA2)
      or `prefill_sm90` (Hopper, FA3).
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
        options = "".join(text for flag, text in ((self.window, "-window"), (self.soft_cap, "-cap")) if flag)
        return f"{self.kind}-{self.query}-{self.kv}-{self.out}-{self.head_dim}{options}"
