"""What an attention layer computes, beyond its arrays."""

from __future__ import annotations

import dataclasses

from paged.common import codec
from paged.common.checks import check_bool, check_int, check_number, per_field


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Static, hashable options of one attention layer (requirement R2).

    - `scale`: multiplies q·k, once. Always passed, never implied by the head dim. Used as the nearest float32, so it
      is 0 or of float32's normal range; so is the cap.
    - `causal`: masks are bottom-right aligned: token i of a row with q new tokens and length n sits at n - q + i.
    - `window`: tokens visible, the token itself included (Hugging Face's `sliding_window`); None is unlimited. A
      window implies nothing about tokens ahead: with `causal=False` only the past side is cut.
    - `soft_cap`: s -> cap · tanh(s / cap), after scale and before the mask; None is off.

    Raises `InvalidInputError` that names the field and the value.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        per_field(check_number, self, "scale", float32=True)
        per_field(check_bool, self, "causal")
        if self.window is not None:
            per_field(check_int, self, "window", minimum=1)
        if self.soft_cap is not None:
            per_field(check_number, self, "soft_cap", positive=True, float32=True)

    def to_bytes(self) -> bytes:
        """Versioned encoding; `from_bytes` gives an equal spec."""
        return codec.encode("AttentionSpec", 1, dataclasses.asdict(self), {})

    @classmethod
    def from_bytes(cls, data: bytes) -> AttentionSpec:
        """Decode and validate what `to_bytes` wrote."""
        return codec.load(cls, 1, data)
