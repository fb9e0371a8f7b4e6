"""What a backend declares, and the refusal of every demand beyond it (requirement B2, scenario M17)."""

import dataclasses
import json

import numpy as np
import pytest

from paged.common import AttentionSpec, Capabilities, InvalidInputError, Range, StorageLayout, UnsupportedError
from paged.common.capabilities import FEATURES, NUMERIC_MODELS, PROMISES, REGIMES

GEOMETRY = {"num_layers": 2, "num_pages": 8, "tokens_per_page": 16, "num_kv_heads": 2, "head_dim": 64}
PLAIN = AttentionSpec(scale=0.125)


def layout(**changes) -> StorageLayout:
    return StorageLayout(**{**GEOMETRY, "dtype": "bfloat16", **changes})


def capable(**changes) -> Capabilities:
    """Everything declared, so that one thing can be taken away at a time."""
    everything = {
        "dtypes": frozenset({"bfloat16", "float32"}),
        "kv_dtypes": frozenset({"bfloat16", "float8_e4m3fn"}),
        "page_sizes": Range(1, 256, powers_of_two=True),
        "head_dims": frozenset({64, 128}),
        "group_sizes": Range(1, 8),
        "features": FEATURES,
        "numerics": "N0",
        "promises": PROMISES,
        "regimes": REGIMES,
        "platforms": frozenset({"cpu", "cuda"}),
    }
    return Capabilities(**{**everything, **changes})


def require(capabilities: Capabilities, shape: StorageLayout, heads: int = 4, dtype: str = "bfloat16") -> None:
    capabilities.require_layout("acme", shape, num_query_heads=heads, dtype=dtype)


GEOMETRIES = [
    ("dtypes", {"dtypes": frozenset({"float32"})}, layout(), "acme' declares dtypes float32; asked for bfloat16."),
    ("kv_dtypes", {"kv_dtypes": frozenset({"int8"})}, layout(), "declares kv_dtypes int8; asked for bfloat16."),
    ("page_sizes", {"page_sizes": Range(1, 8)}, layout(), "declares page_sizes 1..8; asked for 16."),
    ("head_dims", {"head_dims": frozenset({128, 256})}, layout(), "declares head_dims 128, 256; asked for 64."),
    ("head_dims", {}, layout(value_head_dim=32), "declares head_dims 64, 128; asked for 32."),
    ("group_sizes", {"group_sizes": Range(3, 8)}, layout(), "declares group_sizes 3..8; asked for 2."),
    ("group_sizes", {"group_sizes": frozenset({1, 4})}, layout(), "declares group_sizes 1, 4; asked for 2."),
    ("regimes", {"regimes": frozenset({"partition"})}, layout(kv_head_shards=4), "regimes partition; asked for repli"),
    ("max_page_id", {"max_page_id": 14}, layout(), "declares max_page_id 14; this pool needs 15. Use a smaller pool."),
    ("max_pool_bytes", {"max_pool_bytes": 65535}, layout(), "declares max_pool_bytes 65535; this pool needs 65536."),
]


@pytest.mark.parametrize(("capability", "less", "shape", "words"), GEOMETRIES)
def test_scenario_m17_a_geometry_beyond_the_declaration_is_refused_by_name(capability, less, shape, words):
    if less:
        require(capable(), shape)
    with pytest.raises(UnsupportedError) as caught:
        require(capable(**less), shape)
    assert caught.value.capability == capability
    assert words in str(caught.value)


OPTIONS = {
    "window": {"spec": AttentionSpec(scale=1.0, window=3)},
    "soft_cap": {"spec": AttentionSpec(scale=1.0, soft_cap=30.0)},
    "non_causal": {"spec": AttentionSpec(scale=1.0, causal=False)},
    "sinks": {"spec": PLAIN, "sinks": True},
    "kv_scales": {"spec": PLAIN, "kv_scales": True},
}


@pytest.mark.parametrize("feature", OPTIONS)
def test_scenario_m17_an_option_that_is_not_declared_is_refused_by_name(feature):
    capable().require_spec("acme", **OPTIONS[feature])
    lacking = capable(features=FEATURES - {feature})
    lacking.require_spec("acme", PLAIN)
    with pytest.raises(UnsupportedError) as caught:
        lacking.require_spec("acme", **OPTIONS[feature])
    assert caught.value.capability == feature
    assert str(caught.value) == (
        f"backend 'acme' does not declare the feature '{feature}' (it has {sorted(FEATURES - {feature})}). "
        f"Choose another backend or drop the option."
    )


@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_scenario_m17_every_feature_can_be_asked_for_and_refused(feature):
    capable().require_features("acme", feature)
    with pytest.raises(UnsupportedError, match=feature) as caught:
        capable(features=FEATURES - {feature}).require_features("acme", *sorted(FEATURES))
    assert caught.value.capability == feature


def test_scenario_m17_a_platform_that_is_not_declared_is_refused():
    capable().require_platform("acme", "cuda")
    with pytest.raises(UnsupportedError, match="declares platforms cpu, cuda; asked for rocm") as caught:
        capable().require_platform("acme", "rocm")
    assert caught.value.capability == "platforms"


def test_scenario_m17_no_capability_that_limits_a_call_is_forgotten():
    """Each field is toggled above, or is one that the suite reads instead of a call being refused by it."""
    read_by_the_suite = {"numerics", "decode_numerics", "promises", "pool_layout", "pool_storage", "poison"}
    toggled = {row[0] for row in GEOMETRIES} | {"features", "platforms"}
    assert toggled | read_by_the_suite == {field.name for field in dataclasses.fields(Capabilities)}


@pytest.mark.parametrize("head_dim", [72, 96])
def test_scenario_m16_a_head_dim_without_a_kernel_is_refused(head_dim):
    with pytest.raises(UnsupportedError, match=rf"head_dims 64, 128; asked for {head_dim}\."):
        require(capable(), layout(head_dim=head_dim))


def test_scenario_l7_a_page_larger_than_declared_is_refused():
    require(capable(), layout(tokens_per_page=256))
    with pytest.raises(UnsupportedError, match=r"page_sizes 1\.\.128 \(powers of two\); asked for 256\."):
        require(capable(page_sizes=Range(1, 128, powers_of_two=True)), layout(tokens_per_page=256))
    with pytest.raises(UnsupportedError, match=r"asked for 48\."):
        require(capable(), layout(tokens_per_page=48))


def test_scenario_l8_a_kernel_that_packs_does_not_declare_page_size_one():
    require(capable(), layout(tokens_per_page=1))
    with pytest.raises(UnsupportedError, match=r"page_sizes 2\.\.256; asked for 1\."):
        require(capable(page_sizes=Range(2, 256)), layout(tokens_per_page=1))


def test_scenario_a2_a_kernel_with_16_bit_page_ids_is_not_given_page_65536():
    narrow = capable(max_page_id=2**16 - 1, page_sizes=Range(1, 64))
    require(narrow, layout(num_layers=1, num_pages=65536))
    with pytest.raises(UnsupportedError, match=r"max_page_id 65535; this pool needs 65536\. Use a smaller pool\."):
        require(narrow, layout(num_layers=1, num_pages=65537))
    with pytest.raises(UnsupportedError, match=r"max_page_id 65535; this pool needs 65537\."):
        require(narrow, layout(num_layers=2, num_pages=32769))  # the layer's offset is added to page ids


def test_scenario_a3_a_pool_above_the_byte_limit_is_refused():
    large = layout(num_layers=1, num_pages=8_400_000, tokens_per_page=1, num_kv_heads=8, head_dim=128)
    needed = 8_400_000 * 8 * 128 * 2
    require(capable(max_pool_bytes=needed), large, heads=8)
    with pytest.raises(UnsupportedError, match=rf"max_pool_bytes {2**32 - 1}; this pool needs {needed}\."):
        require(capable(max_pool_bytes=2**32 - 1), large, heads=8)


def test_limits_count_what_one_device_and_one_array_hold():
    wide = layout(num_kv_heads=4, kv_head_shards=2, head_dim=128, value_head_dim=64)
    one_array = 2 * 8 * 16 * (4 // 2) * 128 * 2
    require(capable(max_pool_bytes=one_array), wide)
    with pytest.raises(UnsupportedError, match=f"needs {one_array}"):
        require(capable(max_pool_bytes=one_array - 1), wide)
    require(capable(max_pool_bytes=one_array // 2, max_page_id=7, pool_layout="per_layer"), wide)
    with pytest.raises(UnsupportedError, match="max_page_id 6; this pool needs 7"):
        require(capable(max_page_id=6, pool_layout="per_layer"), wide)


def test_a_range_takes_numpy_ints_and_no_booleans():
    powers = Range(1, 16, powers_of_two=True)
    assert [n for n in range(-1, 33) if n in powers] == [1, 2, 4, 8, 16]
    assert np.int64(8) in powers
    assert np.int64(9) not in powers
    assert True not in powers
    assert 4.0 not in powers
    assert [n for n in range(6) if n in Range(2, 4)] == [2, 3, 4]
    assert (str(powers), str(Range(2, 4))) == ("1..16 (powers of two)", "2..4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": {"alibi"}}, "Capabilities.features has 'alibi', which is not in ['decode', 'kv_scales', "),
        ({"promises": {"batch_invariant"}}, "Capabilities.promises must contain 'deterministic'; it is not optional."),
        ({"numerics": "N9"}, f"Capabilities.numerics must be one of {', '.join(sorted(NUMERIC_MODELS))}; got 'N9'."),
        ({"page_sizes": 16}, "Capabilities.page_sizes must be a Range(low, high), got 16."),
        ({"head_dims": 64}, "Capabilities.head_dims must be a set of ints, got 64."),
        ({"head_dims": {0}}, "Capabilities.head_dims must be in 1..2147483647, got 0."),
        ({"platforms": "cpu"}, "Capabilities.platforms must be a set of names, got 'cpu' of type str."),
        ({"dtypes": set()}, "Capabilities.dtypes must not be empty: nothing could ever run."),
        ({"poison": "nan"}, "Capabilities.poison must be one of any_bits, finite; got 'nan'."),
    ],
)
def test_a_declaration_outside_the_vocabulary_is_refused(change, message):
    with pytest.raises(InvalidInputError) as caught:
        capable(**change)
    assert str(caught.value).startswith(message)


def test_a_declaration_is_json_and_comes_back_from_its_bytes():
    declared = capable(max_page_id=65535, pool_layout="per_layer", pool_storage="words", poison="finite")
    as_json = json.loads(json.dumps(declared.to_json()))
    assert as_json["page_sizes"] == {"low": 1, "high": 256, "powers_of_two": True}
    assert as_json["head_dims"] == [64, 128]
    assert Capabilities.from_bytes(declared.to_bytes()) == declared
    listed = capable(group_sizes={8, 1, 2})
    assert listed.to_json()["group_sizes"] == [1, 2, 8]
    assert Capabilities.from_bytes(listed.to_bytes()) == listed


def test_numeric_models_are_entries_of_the_menu():
    assert capable().numeric_model is capable().decode_numeric_model is NUMERIC_MODELS["N0"]
    split = capable(numerics="N1", decode_numerics="N2")
    assert (split.numeric_model, split.decode_numeric_model) == (NUMERIC_MODELS["N1"], NUMERIC_MODELS["N2"])


def test_the_order_and_the_kind_of_collection_do_not_matter():
    assert capable(dtypes=["float32", "bfloat16"], head_dims=(128, 64)) == capable()
    assert hash(capable(platforms={"cuda", "cpu"})) == hash(capable())
