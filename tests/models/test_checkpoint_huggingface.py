"""Hugging Face directories (requirement M2): what is read, what is refused and by which name."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from model_steps import drawn_decoder
from tiny_checkpoints import CONFIG, as_bfloat16, hf_config, hf_tensors, write_huggingface

from paged.backends.sharding import KvSharding
from paged.common import InvalidInputError
from paged.models import llama3_rope_factors
from paged.models.checkpoint import load_model
from paged.models.checkpoint.huggingface import read_config


@pytest.fixture(scope="module")
def model():
    return drawn_decoder(CONFIG, 7)


@pytest.fixture(scope="module")
def tensors(model):
    return hf_tensors(model)


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) and x.dtype == y.dtype for x, y in pairs)


def test_float32_weights_come_back_bit_for_bit(tmp_path, model, tensors):
    write_huggingface(tmp_path, tensors)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    seen = []
    loaded = load_model(tmp_path, progress=lambda *a: seen.append(a))
    assert loaded.config == CONFIG
    assert same(loaded.model, model)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello w")) == "hello w"
    assert loaded.tokenizer.eos == (2, 0)
    assert loaded.tokenizer.chat_template == "{{ messages }}"
    assert [done for _, done, _ in seen] == list(range(1, 10))
    assert {total for _, _, total in seen} == {9}


def test_bfloat16_shards(tmp_path, model, tensors):
    write_huggingface(tmp_path, as_bfloat16(tensors), hf_config(eos_token_id=[2, 0]), shards=3)
    loaded = load_model(str(tmp_path), dtype="bfloat16")
    assert loaded.config == CONFIG
    assert same(loaded.model, jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), model))
    widened = load_model(tmp_path, dtype="float32").model
    assert same(widened, jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), model))


def test_the_fingerprint_follows_weights_config_and_dtype(tmp_path, tensors):
    first = load_model(write_huggingface(tmp_path / "a", tensors)).fingerprint
    assert first.startswith("sha256:")
    assert load_model(write_huggingface(tmp_path / "b", tensors)).fingerprint == first
    changed = tensors | {"model.norm.weight": tensors["model.norm.weight"] + np.float32(1e-3)}
    others = [
        load_model(write_huggingface(tmp_path / "c", changed)).fingerprint,
        load_model(write_huggingface(tmp_path / "d", tensors, hf_config(rope_theta=1e4))).fingerprint,
        load_model(tmp_path / "a", dtype="bfloat16").fingerprint,
    ]
    assert len({first, *others}) == 4


def test_weights_are_loaded_onto_their_shards(tmp_path, model, tensors):
    write_huggingface(tmp_path, tensors)
    sharding = KvSharding(Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "tensor")), ("tensor",))
    loaded = load_model(tmp_path, sharding=sharding).model
    key = loaded.layers[0].attention.key
    assert {s.data.shape for s in key.addressable_shards} == {(2, 16, 32)}
    assert len(key.addressable_shards) == 8
    assert same(loaded, model)


def test_tied_embeddings_have_no_head(tmp_path, tensors):
    tied = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    assert load_model(write_huggingface(tmp_path / "a", tied, hf_config(tie_word_embeddings=True))).model.head is None
    stored = tied | {"lm_head.weight": tied["model.embed_tokens.weight"]}
    loaded = load_model(write_huggingface(tmp_path / "b", stored, hf_config(tie_word_embeddings=True)))
    assert loaded.model.head is None
    with pytest.raises(InvalidInputError, match=r"ties the output head.*'lm_head\.weight' differs"):
        load_model(write_huggingface(tmp_path / "c", tensors, hf_config(tie_word_embeddings=True)))


def test_scenario_a7_head_dim_is_read_and_not_guessed(tmp_path):
    data = hf_config(hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, head_dim=256)
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert read_config(tmp_path).head_dim == 256
    del data["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert read_config(tmp_path).head_dim == 128
    (tmp_path / "config.json").write_text(json.dumps(data | {"hidden_size": 2050}))
    with pytest.raises(InvalidInputError, match=r"no head_dim, and hidden_size=2050 is not a multiple"):
        read_config(tmp_path)


def test_a_guessed_head_dim_that_the_weights_contradict_is_refused(tmp_path, tensors):
    with pytest.raises(
        InvalidInputError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight' must have shape \(32, 32\).*\(64, 32\)"
    ):
        load_model(write_huggingface(tmp_path, tensors, hf_config(head_dim=None)))


REFUSED = {
    "architecture": ({"model_type": "mistral"}, r"model_type='mistral' is not implemented, only 'llama'"),
    "class": ({"architectures": ["LlamaForSequenceClassification"]}, r"architectures=.*SequenceClassification"),
    "bias": ({"attention_bias": True}, r"attention_bias=True is not implemented"),
    "mlp bias": ({"mlp_bias": True}, r"mlp_bias=True"),
    "window": ({"sliding_window": 4096}, r"sliding_window=4096"),
    "layer types": ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types\[1\]='sliding_attention'"),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act='gelu'"),
    "quantised": ({"quantization_config": {"bits": 4}}, r"quantization_config="),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_scaling of type 'yarn' is not implemented"),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_scaling of type 'linear'"),
    "scaling key": ({"rope_scaling": {"rope_type": "default", "beta": 1}}, r"rope_scaling\.beta=1 is not implemented"),
    "incomplete": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        r"rope_scaling\.original_max_position_embeddings must",
    ),
    "unknown": ({"logit_scale": 0.1}, r"logit_scale=0\.1 is not known here.*vouched_for=\('logit_scale',\)"),
    "missing": ({"rms_norm_eps": None}, r"rms_norm_eps must be a number, got None"),
    "size": ({"hidden_size": -1}, r"hidden_size must be in 1"),
    "type": ({"num_hidden_layers": "2"}, r"num_hidden_layers must be an int, got '2'"),
    "heads": ({"num_key_value_heads": 3}, r"num_query_heads=4 is not a multiple of num_kv_heads=3"),
    "eos": ({"eos_token_id": [2, 272]}, r"DecoderConfig\.eos must be in 0\.\.271, got 272"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, name):
    changes, message = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(hf_config(**changes)))
    with pytest.raises(InvalidInputError, match=message):
        read_config(tmp_path)


def test_an_unknown_key_can_be_vouched_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(trained_on="a boat", eos_token_id=[2, 0])))
    assert read_config(tmp_path, ("trained_on",)) == CONFIG


def test_generation_config_has_the_last_word_on_the_end_of_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    assert read_config(tmp_path).eos == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2, 0]}')
    assert read_config(tmp_path).eos == (0, 2)


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_llama3_rope_scaling_is_the_published_formula(tmp_path, form):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    if form == "rope_parameters":
        scaling["rope_theta"] = 5e5
    changes = {form: scaling, "head_dim": 128, "rope_theta": 5e5 if form == "rope_scaling" else None}
    (tmp_path / "config.json").write_text(json.dumps(hf_config(**changes)))
    config = read_config(tmp_path)
    assert config.rope_theta == 5e5
    frequency = 5e5 ** (-np.arange(0, 128, 2) / 128)
    wavelength = 2 * np.pi / frequency
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    between = (1 - smooth) * frequency / 8.0 + smooth * frequency
    scaled = np.where(wavelength < 8192 / 4.0, frequency, np.where(wavelength > 8192 / 1.0, frequency / 8, between))
    np.testing.assert_allclose(frequency / np.asarray(config.rope_factors), scaled, rtol=1e-13)
    assert config.rope_factors[0] == 1.0
    assert config.rope_factors[-1] == 8.0


def test_llama3_factors_refuse_a_band_that_is_upside_down():
    with pytest.raises(
        InvalidInputError, match=r"low_freq_factor=4\.0 must be positive and below high_freq_factor=1\.0"
    ):
        llama3_rope_factors(
            theta=1e4, head_dim=8, factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0, original_max_positions=8192
        )


WRONG_TENSORS = {
    "missing": (
        lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
        r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing.*\(48, 32\)",
    ),
    "unknown": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}),
        r"'model\.layers\.0\.self_attn\.q_proj\.bias' is not part of this architecture",
    ),
    "more layers": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": np.zeros(32, np.float32)}),
        r"'model\.layers\.2\.input_layernorm\.weight' is not part",
    ),
    "shape": (
        lambda t: t.update({"model.norm.weight": np.zeros((1, 32), np.float32)}),
        r"'model\.norm\.weight' must have shape \(32,\) by the config, got \(1, 32\)",
    ),
    "dtype": (
        lambda t: t.update({"model.norm.weight": np.zeros(32, np.float64)}),
        r"'model\.norm\.weight' has dtype F64; read are F32, BF16, F16",
    ),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_tensors_are_checked_against_the_config(tmp_path, tensors, name):
    change, message = WRONG_TENSORS[name]
    mine = dict(tensors)
    change(mine)
    with pytest.raises(InvalidInputError, match=message):
        load_model(write_huggingface(tmp_path, mine))


def test_stored_rotary_frequencies_are_not_needed(tmp_path, model, tensors):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    assert same(load_model(write_huggingface(tmp_path, tensors | extra)).model, model)


def test_values_beyond_float16_are_refused(tmp_path, tensors):
    mine = tensors | {"model.norm.weight": np.full(32, 1e5, np.float32)}
    with pytest.raises(InvalidInputError, match=r"'model\.norm\.weight' holds 100000\.0, beyond float16"):
        load_model(write_huggingface(tmp_path, mine), dtype="float16")


def test_an_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match=r"load_model\.dtype must be one of bfloat16, float16, float32"):
        load_model(tmp_path, dtype="int8")


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, tensors):
    mine = tensors | {n: tensors[n][:200] for n in ("model.embed_tokens.weight", "lm_head.weight")}
    with pytest.raises(InvalidInputError, match=r"ids up to 262; the model's vocab_size is 200"):
        load_model(write_huggingface(tmp_path, mine, hf_config(vocab_size=200)))
