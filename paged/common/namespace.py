"""What must be equal for cached K and V to be interchangeable."""

from __future__ import annotations

import dataclasses
import hashlib

from paged.common import codec
from paged.common.errors import InvalidInputError

_DOMAIN = b"paged.CacheNamespace.v1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheNamespace:
    """Everything besides token ids that changes K and V, or who may see them (requirements C6, X2).

    Fields are str, int, float, bytes, bool or None; None, `""` and 0 differ. `weights` is a fingerprint of the weights
    themselves, not a name (scenario C6); `revision` counts updates in place (C8). `adapter` is the adapter's digest.
    `tenant` separates users unless sharing is opted into. `kv_dtype` names the encoding, fn and fnuz apart (F1).
    """

    weights: str
    revision: int
    tokenizer: str
    adapter: str | None = None
    tenant: str | None = None
    salt: str | None = None
    rope: str | None = None
    kv_dtype: str
    kv_quantisation: str | None = None
    layout: str | None = None
    sharding: str | None = None
    prompt_embeddings: str | None = None
    multimodal: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, (str, int, float, bytes, bool)):
                raise InvalidInputError(
                    f"CacheNamespace.{field.name} must be str, int, float, bytes, bool or None, "
                    f"got {value!r} of type {type(value).__name__}."
                )

    def digest(self) -> bytes:
        """32 bytes of SHA-256 over every field of the dataclass, typed and length-prefixed (requirements C6, X1)."""
        digest = hashlib.sha256(_DOMAIN)
        for field in dataclasses.fields(self):
            for part in (field.name.encode(), *_typed(getattr(self, field.name))):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        return digest.digest()

    def to_bytes(self) -> bytes:
        """Versioned encoding; `from_bytes` gives an equal namespace. Bytes fields travel as hex."""
        fields = {
            f.name: {"bytes": v.hex()} if isinstance(v := getattr(self, f.name), bytes) else v
            for f in dataclasses.fields(self)
        }
        return codec.encode("CacheNamespace", 1, fields, {})

    @classmethod
    def from_bytes(cls, data: bytes) -> CacheNamespace:
        """Decode and validate what `to_bytes` wrote."""
        fields = codec.decode("CacheNamespace", 1, data, ())
        try:
            values = {k: bytes.fromhex(v["bytes"]) if isinstance(v, dict) else v for k, v in fields.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(f"CacheNamespace.from_bytes: damaged bytes field ({error}).") from None
        return codec.build(cls, "CacheNamespace", values)


def _typed(value: str | int | float | bytes | bool | None) -> tuple[bytes, bytes]:
    if isinstance(value, bytes):
        return b"bytes", value
    if isinstance(value, float):
        return b"float", value.hex().encode()
    return type(value).__name__.encode(), b"" if value is None else str(value).encode()
