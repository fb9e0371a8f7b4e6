"""What must be equal for cached K and V to be interchangeable."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

from paged.common import codec
from paged.common.checks import check_int, per_field, show
from paged.common.dtypes import check_dtype
from paged.common.errors import InvalidInputError

_DOMAIN = b"paged.CacheNamespace.v1"

Value = str | int | float | bytes | bool | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CacheNamespace:
    """Everything besides token ids that changes K and V, or who may see them (requirements C6, X2).

    - `weights`: fingerprint of the weights themselves, not a name (scenario C6), so never empty.
    - `revision`: counts updates of the weights in place (scenario C8).
    - `tokenizer`: fingerprint of the tokenizer.
    - `adapter`: digest of the adapter; `salt`: what a user mixes in. Two fields, so that one never passes for the other
      (scenario C5).
    - `tenant`: separates users unless sharing is opted into.
    - `rope`, `kv_quantisation`, `layout`, `sharding`, `prompt_embeddings`, `multimodal`: digests or descriptions.
    - `kv_dtype`: name of the element type, fn and fnuz apart (scenario F1).

    The optional fields take plain str, int, float, bytes, bool or None, and None, `""`, 0, 0.0 and False all differ.
    Equality and hash are those of the digest. Raises `InvalidInputError` that names the field and the value; subclasses
    of the plain types (numpy scalars, enums) are refused, because their text is not theirs alone to decide.
    """

    weights: str
    revision: int
    tokenizer: str
    adapter: Value = None
    tenant: Value = None
    salt: Value = None
    rope: Value = None
    kv_dtype: str
    kv_quantisation: Value = None
    layout: Value = None
    sharding: Value = None
    prompt_embeddings: Value = None
    multimodal: Value = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_value(field.name, getattr(self, field.name))
        for name in ("weights", "tokenizer"):
            if type(value := getattr(self, name)) is not str:
                raise InvalidInputError(f"CacheNamespace.{name} must be a fingerprint (str), got {show(value)}.")
        if not self.weights:
            raise InvalidInputError("CacheNamespace.weights must be a fingerprint of the weights, got ''.")
        per_field(check_int, self, "revision", minimum=0, maximum=2**63 - 1)
        per_field(check_dtype, self, "kv_dtype")

    def digest(self) -> bytes:
        """32 bytes of SHA-256 over every field of the dataclass, typed and length-prefixed (requirements C6, X1)."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> bytes:
        digest = hashlib.sha256(_DOMAIN)
        for field in dataclasses.fields(self):
            for part in (field.name.encode(), *_typed(getattr(self, field.name))):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheNamespace) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

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
        return codec.load(cls, 1, data, revive=_revive)


def _check_value(field: str, value: object) -> None:
    if type(value) not in (str, int, float, bytes, bool, type(None)):
        raise InvalidInputError(
            f"CacheNamespace.{field} must be a plain str, int, float, bytes, bool or None, "
            f"got {show(value)} of type {type(value).__name__}."
        )
    if isinstance(value, str) and not value.isascii() and not _encodes(value):
        raise InvalidInputError(f"CacheNamespace.{field} must be text that UTF-8 can hold, got {show(value)}.")
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise InvalidInputError(f"CacheNamespace.{field} must fit 64 bits, got {show(value)}.")
    if isinstance(value, float) and value - value != 0:
        raise InvalidInputError(f"CacheNamespace.{field} must be finite, got {value!r}.")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _revive(fields: dict[str, Any]) -> dict[str, Any]:
    try:
        return {k: bytes.fromhex(v["bytes"]) if isinstance(v, dict) else v for k, v in fields.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(f"CacheNamespace.from_bytes: damaged bytes field ({error}).") from None


def _typed(value: Value) -> tuple[bytes, bytes]:
    if isinstance(value, bytes):
        return b"bytes", value
    if isinstance(value, float):
        return b"float", value.hex().encode()
    return type(value).__name__.encode(), b"" if value is None else str(value).encode()
