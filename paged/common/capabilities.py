"""What a backend declares it can do, as data from closed vocabularies (requirement B2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from paged.common import codec
from paged.common.checks import (
    INT32_LIMIT,
    check_bool,
    check_choice,
    check_int,
    check_names,
    check_number,
    per_field,
    show,
)
from paged.common.dtypes import ELEMENT_BYTES, check_dtype, element_bytes
from paged.common.errors import InvalidInputError, UnsupportedError
from paged.common.layout import StorageLayout
from paged.common.spec import AttentionSpec

FEATURES = frozenset(
    {
        *("window", "soft_cap", "sinks", "lse", "non_causal", "kv_scales", "value_head_dim"),
        *("prefill", "decode", "mixed"),
    }
)
"""Options a backend may claim. `value_head_dim`: values of another head dim than keys; `prefill`, `decode` and `mixed`
are the kinds of batch it takes."""

PROMISES = frozenset({"deterministic", "batch_invariant", "chunk_invariant", "shard_invariant", "masked_nan"})
"""Bit promises. `deterministic` is mandatory; the others are certified only where they are claimed."""

REGIMES = frozenset({"partition", "replicate"})


@dataclasses.dataclass(frozen=True)
class Range:
    """Inclusive range of positive ints, optionally restricted to powers of two. Booleans are not in any range."""

    low: int
    high: int
    powers_of_two: bool = False

    def __post_init__(self) -> None:
        per_field(check_int, self, "low", minimum=1)
        per_field(check_int, self, "high", minimum=self.low)
        per_field(check_bool, self, "powers_of_two")

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not self.low <= value <= self.high:
            return False
        return not self.powers_of_two or int(value) & (int(value) - 1) == 0

    def __str__(self) -> str:
        return f"{self.low}..{self.high}" + (" (powers of two)" if self.powers_of_two else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericModel:
    """The arithmetic a backend claims, from a menu; it decides how strong certified rounding is.

    - `weights`: dtype of the unnormalised softmax weights P before they meet V: `"float32"` or `"input"`.
    - `partials`: dtype of what splits of one row pass to the merge: `"float32"` or `"output"`.
    - `normalised`: P is divided by its row sum before it is rounded.
    - `exact`: float64 inside and one rounding at the end (the reference).
    - `exp_error_log2`: log2 of the relative error of the exponential.
    - `tanh_error_log2`: log2 of the error of tanh, used by soft caps.
    """

    name: str
    weights: str = "float32"
    partials: str = "float32"
    normalised: bool = False
    exact: bool = False
    exp_error_log2: float = -22.0
    tanh_error_log2: float = -22.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidInputError(f"NumericModel.name must be a non-empty string, got {show(self.name)}.")
        per_field(check_choice, self, "weights", choices=("float32", "input"))
        per_field(check_choice, self, "partials", choices=("float32", "output"))
        per_field(check_bool, self, "normalised", "exact")
        per_field(check_number, self, "exp_error_log2", "tanh_error_log2")


NUMERIC_MODELS = {
    m.name: m
    for m in (
        NumericModel(name="exact", exact=True, exp_error_log2=-50.0, tanh_error_log2=-50.0),
        NumericModel(name="N0"),
        NumericModel(name="N0+xla", exp_error_log2=-20.5, tanh_error_log2=-20.0),
        NumericModel(name="N0+tanh", tanh_error_log2=-16.0),
        NumericModel(name="N0p", partials="output"),
        NumericModel(name="N1", weights="input"),
        NumericModel(name="N1+tanh", weights="input", tanh_error_log2=-16.0),
        NumericModel(name="N1n", weights="input", normalised=True),
        NumericModel(name="N2", weights="input", partials="output"),
    )
}
"""The menu. N0 is the strongest after `exact`; the names are those of docs/design/certified-rounding.md.

`+tanh` is for soft caps through an approximate tanh instruction (2^-16.5 on [0, 8], measured on an H200)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Declared limits of a backend. Asking for more is refused at construction, before any kernel runs.

    - `dtypes`, `kv_dtypes`: element types of query and output, and of the pool.
    - `page_sizes`, `head_dims`, `group_sizes`: tokens per page, elements per head, query heads per KV head. Group sizes
      are a range or a set.
    - `features`, `promises`, `regimes`: subsets of the vocabularies of this module.
    - `numerics`: name of an entry of `NUMERIC_MODELS`; `decode_numerics`: the entry that holds for rows of one query
      token, whatever batch they come in, where another kernel computes them; None is the same.
    - `max_page_id`: largest page id after the layer offset; `max_pool_bytes`: of one device's K or V array.
    - `pool_layout`: `"stacked"` (one array, layer l's page p is row l × pages + p) or `"per_layer"`.
    - `pool_storage`: `"typed"` or raw `"words"` (unsigned integers of the element's size).
    - `poison`: what slots that must not be read may hold: `"any_bits"` or only `"finite"` values.
    - `platforms`: jax platforms it runs on.
    """

    dtypes: frozenset[str]
    kv_dtypes: frozenset[str]
    page_sizes: Range
    head_dims: frozenset[int]
    group_sizes: Range | frozenset[int]
    features: frozenset[str]
    numerics: str
    promises: frozenset[str] = frozenset({"deterministic"})
    regimes: frozenset[str] = frozenset({"partition"})
    decode_numerics: str | None = None
    max_page_id: int = INT32_LIMIT - 1
    max_pool_bytes: int = 2**63 - 1
    pool_layout: str = "stacked"
    pool_storage: str = "typed"
    poison: str = "any_bits"
    platforms: frozenset[str] = frozenset({"cpu"})

    def __post_init__(self) -> None:
        for field, vocabulary in _VOCABULARIES.items():
            per_field(check_names, self, field, vocabulary=vocabulary)
        per_field(_check_int_set, self, "head_dims")
        per_field(_check_range, self, "page_sizes")
        # A tuple of two could mean either, so it is neither.
        if isinstance(self.group_sizes, (frozenset, set)):
            per_field(_check_int_set, self, "group_sizes")
        else:
            per_field(_check_range, self, "group_sizes")
        for field in ("dtypes", "kv_dtypes", "regimes", "platforms"):
            if not getattr(self, field):
                raise InvalidInputError(f"Capabilities.{field} must not be empty: nothing could ever run.")
        if "deterministic" not in self.promises:
            raise InvalidInputError("Capabilities.promises must contain 'deterministic'; it is not optional.")
        per_field(check_choice, self, "numerics", choices=tuple(NUMERIC_MODELS))
        if self.decode_numerics is not None:
            per_field(check_choice, self, "decode_numerics", choices=tuple(NUMERIC_MODELS))
        per_field(check_choice, self, "pool_layout", choices=("stacked", "per_layer"))
        per_field(check_choice, self, "pool_storage", choices=("typed", "words"))
        per_field(check_choice, self, "poison", choices=("any_bits", "finite"))
        per_field(check_int, self, "max_page_id", minimum=1)
        per_field(check_int, self, "max_pool_bytes", minimum=1, maximum=2**63 - 1)

    @property
    def numeric_model(self) -> NumericModel:
        """The menu entry that `numerics` names."""
        return NUMERIC_MODELS[self.numerics]

    @property
    def decode_numeric_model(self) -> NumericModel:
        """The menu entry that holds for rows of one query token."""
        return NUMERIC_MODELS[self.decode_numerics or self.numerics]

    def require_layout(self, backend: str, layout: StorageLayout, *, num_query_heads: int, dtype: str) -> None:
        """Refuse a pool geometry that goes beyond the declaration.

        `dtype` is that of query and output. Raises `UnsupportedError` whose text and `capability` name what falls short
        (scenarios L7, L8, A3, M16), and `InvalidInputError` for arguments that no backend could take.
        """
        if not isinstance(layout, StorageLayout):
            raise InvalidInputError(f"Capabilities.require_layout: layout must be a StorageLayout, got {show(layout)}.")
        dtype = check_dtype("Capabilities.require_layout", "dtype", dtype)
        group = layout.group_size(num_query_heads)
        layers = layout.num_layers if self.pool_layout == "stacked" else 1
        width = max(layout.head_dim, layout.value_head_dim or 0) * element_bytes(layout.dtype)
        array_bytes = layers * layout.slots_per_layer * layout.heads_per_shard * width
        _refuse(backend, "dtypes", dtype, self.dtypes)
        _refuse(backend, "kv_dtypes", layout.dtype, self.kv_dtypes)
        _refuse(backend, "page_sizes", layout.tokens_per_page, self.page_sizes)
        _refuse(backend, "head_dims", layout.head_dim, self.head_dims)
        _refuse(backend, "head_dims", layout.value_head_dim, self.head_dims)
        if layout.value_head_dim != layout.head_dim:
            self.require_features(backend, "value_head_dim")
        _refuse(backend, "group_sizes", group, self.group_sizes)
        _refuse(backend, "regimes", layout.regime, self.regimes)
        _refuse_above(backend, "max_page_id", layers * layout.num_pages - 1, self.max_page_id)
        _refuse_above(backend, "max_pool_bytes", array_bytes, self.max_pool_bytes)

    def require_spec(self, backend: str, spec: AttentionSpec, *, sinks: bool = False, kv_scales: bool = False) -> None:
        """Refuse an option that the backend does not declare; nothing is ever accepted and ignored (scenario M17)."""
        if not isinstance(spec, AttentionSpec):
            raise InvalidInputError(f"Capabilities.require_spec: spec must be an AttentionSpec, got {show(spec)}.")
        asked = {
            "window": spec.window is not None,
            "soft_cap": spec.soft_cap is not None,
            "non_causal": not spec.causal,
            "sinks": check_bool("Capabilities.require_spec", "sinks", sinks),
            "kv_scales": check_bool("Capabilities.require_spec", "kv_scales", kv_scales),
        }
        self.require_features(backend, *(feature for feature, wanted in asked.items() if wanted))

    def require_features(self, backend: str, *features: str) -> None:
        """Refuse the first of `features`, names from `FEATURES`, that the backend does not declare."""
        for feature in features:
            check_choice("Capabilities.require_features", "feature", feature, choices=FEATURES)
            if feature not in self.features:
                raise UnsupportedError(
                    f"backend {backend!r} does not declare the feature {feature!r} (it has {sorted(self.features)}). "
                    f"Choose another backend or drop the option.",
                    capability=feature,
                )

    def require_platform(self, backend: str, platform: str) -> None:
        """Refuse a jax platform that the backend does not declare."""
        if not isinstance(platform, str):
            raise InvalidInputError(f"Capabilities.require_platform: platform must be a name, got {show(platform)}.")
        _refuse(backend, "platforms", platform, self.platforms)

    def to_json(self) -> dict[str, Any]:
        """The declaration as JSON-able data, sets sorted, for a certificate."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, frozenset):
                value = sorted(value)
            elif isinstance(value, Range):
                value = dataclasses.asdict(value)
            out[field.name] = value
        return out

    def to_bytes(self) -> bytes:
        """Versioned encoding; `from_bytes` gives an equal declaration."""
        return codec.encode("Capabilities", 1, self.to_json(), {})

    @classmethod
    def from_bytes(cls, data: bytes) -> Capabilities:
        """Decode and validate what `to_bytes` wrote."""
        return codec.load(cls, 1, data, revive=_revive)


_VOCABULARIES: dict[str, frozenset[str] | None] = {
    "dtypes": frozenset(ELEMENT_BYTES),
    "kv_dtypes": frozenset(ELEMENT_BYTES),
    "features": FEATURES,
    "promises": PROMISES,
    "regimes": REGIMES,
    "platforms": None,
}


def _revive(fields: dict[str, Any]) -> dict[str, Any]:
    out = dict(fields)
    for field in ("page_sizes", "group_sizes"):
        if isinstance(value := out[field], dict):
            if value.keys() != {"low", "high", "powers_of_two"}:
                raise InvalidInputError(f"Capabilities.from_bytes: {field} must be a range, got {show(value)}.")
            out[field] = Range(**value)
        elif field == "group_sizes":
            out[field] = _check_int_set("Capabilities", field, value)
    return out


def _check_range(owner: str, field: str, value: object) -> Range:
    if not isinstance(value, Range):
        raise InvalidInputError(f"{owner}.{field} must be a Range(low, high), got {show(value)}.")
    return value


def _check_int_set(owner: str, field: str, value: object) -> frozenset[int]:
    if not isinstance(value, (frozenset, set, list, tuple)):
        raise InvalidInputError(f"{owner}.{field} must be a set of ints, got {show(value)}.")
    if not value:
        raise InvalidInputError(f"{owner}.{field} must not be empty: nothing could ever run.")
    return frozenset(check_int(owner, field, entry, minimum=1) for entry in value)


def _refuse(backend: str, capability: str, asked: Any, declared: frozenset[Any] | Range) -> None:
    if asked not in declared:
        have: Any = declared if isinstance(declared, Range) else _listed(declared)
        raise UnsupportedError(
            f"backend {backend!r} declares {capability} {have}; asked for {asked}. "
            f"Choose another backend or another geometry.",
            capability=capability,
        )


def _refuse_above(backend: str, capability: str, asked: int, declared: int) -> None:
    if asked > declared:
        raise UnsupportedError(
            f"backend {backend!r} declares {capability} {declared}; this pool needs {asked}. Use a smaller pool.",
            capability=capability,
        )


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(str(v) for v in sorted(values))
