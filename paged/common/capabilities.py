"""What a backend declares it can do, as data from closed vocabularies (requirement B2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from paged.common.checks import INT32_LIMIT, check_choice, check_int, per_field
from paged.common.dtypes import ELEMENT_BYTES, element_bytes
from paged.common.errors import InvalidInputError, UnsupportedError
from paged.common.layout import StorageLayout
from paged.common.spec import AttentionSpec

FEATURES = frozenset({"window", "soft_cap", "sinks", "lse", "non_causal", "kv_scales", "prefill", "decode", "mixed"})
"""Options a backend may claim. `prefill`, `decode` and `mixed` are the kinds of batch it takes."""

PROMISES = frozenset({"deterministic", "batch_invariant", "chunk_invariant", "shard_invariant", "masked_nan"})
"""Bit promises. `deterministic` is mandatory; the others are certified only where they are claimed."""

REGIMES = frozenset({"partition", "replicate"})


@dataclasses.dataclass(frozen=True)
class Range:
    """Inclusive range of ints, optionally restricted to powers of two."""

    low: int
    high: int
    powers_of_two: bool = False

    def __post_init__(self) -> None:
        per_field(check_int, self, "low", minimum=1)
        per_field(check_int, self, "high", minimum=self.low)

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int) or not self.low <= value <= self.high:
            return False
        return not self.powers_of_two or value & (value - 1) == 0

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


NUMERIC_MODELS = {
    m.name: m
    for m in (
        NumericModel(name="exact", exact=True, exp_error_log2=-50.0, tanh_error_log2=-50.0),
        NumericModel(name="N0"),
        NumericModel(name="N0+xla", exp_error_log2=-20.5, tanh_error_log2=-20.0),
        NumericModel(name="N0p", partials="output"),
        NumericModel(name="N1", weights="input"),
        NumericModel(name="N1n", weights="input", normalised=True),
        NumericModel(name="N2", weights="input", partials="output"),
    )
}
"""The menu. N0 is the strongest after `exact`; the names are those of the documentation on certified rounding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Declared limits of a backend. Asking for more is refused at construction, before any kernel runs.

    - `dtypes`, `kv_dtypes`: element types of query and output, and of the pool.
    - `page_sizes`, `head_dims`, `group_sizes`: tokens per page, elements per head, query heads per KV head.
    - `features`, `promises`, `regimes`: subsets of the vocabularies of this module.
    - `numerics`: name of an entry of `NUMERIC_MODELS`.
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
    group_sizes: Range
    features: frozenset[str]
    numerics: str
    promises: frozenset[str] = frozenset({"deterministic"})
    regimes: frozenset[str] = frozenset({"partition"})
    max_page_id: int = INT32_LIMIT - 1
    max_pool_bytes: int = 2**63 - 1
    pool_layout: str = "stacked"
    pool_storage: str = "typed"
    poison: str = "any_bits"
    platforms: frozenset[str] = frozenset({"cpu"})

    def __post_init__(self) -> None:
        for field, vocabulary in (
            ("dtypes", frozenset(ELEMENT_BYTES)),
            ("kv_dtypes", frozenset(ELEMENT_BYTES)),
            ("features", FEATURES),
            ("promises", PROMISES),
            ("regimes", REGIMES),
        ):
            value = frozenset(getattr(self, field))
            if unknown := value - vocabulary:
                raise InvalidInputError(
                    f"Capabilities.{field} has {sorted(unknown)[0]!r}, which is not in {sorted(vocabulary)}."
                )
            object.__setattr__(self, field, value)
        if "deterministic" not in self.promises:
            raise InvalidInputError("Capabilities.promises must contain 'deterministic'; it is not optional.")
        per_field(check_choice, self, "numerics", choices=tuple(NUMERIC_MODELS))
        per_field(check_choice, self, "pool_layout", choices=("stacked", "per_layer"))
        per_field(check_choice, self, "pool_storage", choices=("typed", "words"))
        per_field(check_choice, self, "poison", choices=("any_bits", "finite"))
        per_field(check_int, self, "max_page_id", minimum=1)
        per_field(check_int, self, "max_pool_bytes", minimum=1, maximum=2**63 - 1)
        object.__setattr__(self, "head_dims", frozenset(self.head_dims))
        object.__setattr__(self, "platforms", frozenset(self.platforms))

    @property
    def numeric_model(self) -> NumericModel:
        """The menu entry that `numerics` names."""
        return NUMERIC_MODELS[self.numerics]

    def require_layout(self, backend: str, layout: StorageLayout, *, num_query_heads: int, dtype: str) -> None:
        """Refuse a pool geometry that goes beyond the declaration.

        Raises `UnsupportedError` whose text and `capability` name what falls short (scenarios L7, L8, M16, M17).
        """
        group = layout.group_size(num_query_heads)
        offset = layout.num_layers - 1 if self.pool_layout == "stacked" else 0
        top_page = offset * layout.num_pages + layout.num_pages - 1
        layers = layout.num_layers if self.pool_layout == "stacked" else 1
        width = max(layout.head_dim, layout.value_head_dim or 0) * element_bytes(layout.dtype)
        array_bytes = layers * layout.slots_per_layer * layout.heads_per_shard * width
        _refuse(backend, "dtypes", dtype, self.dtypes)
        _refuse(backend, "kv_dtypes", layout.dtype, self.kv_dtypes)
        _refuse(backend, "page_sizes", layout.tokens_per_page, self.page_sizes)
        _refuse(backend, "head_dims", layout.head_dim, self.head_dims)
        _refuse(backend, "head_dims", layout.value_head_dim, self.head_dims)
        _refuse(backend, "group_sizes", group, self.group_sizes)
        _refuse(backend, "regimes", layout.regime, self.regimes)
        _refuse_above(backend, "max_page_id", top_page, self.max_page_id)
        _refuse_above(backend, "max_pool_bytes", array_bytes, self.max_pool_bytes)

    def require_spec(self, backend: str, spec: AttentionSpec, *, sinks: bool = False, kv_scales: bool = False) -> None:
        """Refuse an option that the backend does not declare; nothing is ever accepted and ignored."""
        asked = {
            "window": spec.window is not None,
            "soft_cap": spec.soft_cap is not None,
            "non_causal": not spec.causal,
            "sinks": sinks,
            "kv_scales": kv_scales,
        }
        for feature, wanted in asked.items():
            if wanted and feature not in self.features:
                raise UnsupportedError(
                    f"backend {backend!r} does not declare the feature {feature!r} (it has {sorted(self.features)}). "
                    f"Choose another backend or drop the option.",
                    capability=feature,
                )

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
