"""The reference as a backend: registered like any other, so that the path to a kernel is walked every day."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float, Int32, Shaped

from paged.backends.protocol import AttentionExtras, KvArrays, Rung, TableArrays
from paged.common import AttentionSpec, Capabilities, Range
from paged.common.capabilities import FEATURES, PROMISES
from paged.common.dtypes import ELEMENT_BYTES
from paged.reference import move
from paged.reference.attend import TokenRows, attend, token_rows

CAPABILITIES = Capabilities(
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    kv_dtypes=frozenset(ELEMENT_BYTES),
    page_sizes=Range(1, 256),
    head_dims=frozenset(range(1, 1025)),
    group_sizes=Range(1, 1024),
    features=FEATURES,
    numerics="exact",
    promises=PROMISES,
    # Typed, XLA's CPU compiler converts a whole bfloat16 or fp8 pool around every scatter and gather.
    pool_storage="words",
    poison="any_bits",
    # Bits do not depend on the device: 0 of 1,113,804 elements wrong against the oracle on an NVIDIA H200.
    platforms=frozenset({"cpu", "gpu", "cuda"}),
)


@dataclasses.dataclass(frozen=True)
class ReferenceBackend:
    """Every option, every promise, no speed."""

    name: str = "reference"

    @property
    def capabilities(self) -> Capabilities:
        """The same for every instance: `CAPABILITIES`."""
        return CAPABILITIES

    def static_plan(self, rung: Rung, spec: AttentionSpec) -> Rung:
        """The rung itself; no bit depends on it."""
        return rung

    def plan_arrays(self, static: Rung, table: TableArrays) -> TokenRows:
        """See `paged.reference.attend.TokenRows`."""
        return token_rows(table)

    def append(
        self,
        pool: KvArrays,
        key: Shaped[Array, "t k d"],
        value: Shaped[Array, "t k e"],
        slots: Int32[Array, " t"],
        static: Rung,
        arrays: TokenRows,
    ) -> KvArrays:
        """See `paged.reference.move.append`; padding writes nothing, not even the sentinel."""
        return move.append(pool, key, value, slots)

    def attend(
        self,
        query: Float[Array, "t h d"],
        pool: KvArrays,
        page_base: Int32[Array, ""] | int,
        static: Rung,
        arrays: TokenRows,
        spec: AttentionSpec,
        extras: AttentionExtras,
    ) -> tuple[Float[Array, "t h e"], Float[Array, "t h"]]:
        """See `paged.reference.attend.attend`."""
        return attend(query, pool, page_base, arrays, spec, extras)

    def scrub(self, pool: KvArrays, pages: Int32[Array, " n"]) -> KvArrays:
        """See `paged.reference.move.scrub`."""
        return move.scrub(pool, pages)

    def copy_pages(self, pool: KvArrays, source: Int32[Array, " n"], target: Int32[Array, " n"]) -> KvArrays:
        """See `paged.reference.move.copy_pages`."""
        return move.copy_pages(pool, source, target)


def make_backend() -> ReferenceBackend:
    """The factory of the entry point `reference`; it takes no options and touches no device."""
    return ReferenceBackend()
