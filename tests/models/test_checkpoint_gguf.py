"""GGUF files (requirement M2): weights, config and tokenizer out of one file, written here by the gguf package."""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import drawn_decoder
from tiny_checkpoints import CONFIG, gguf_tensors, interleaved, write_gguf

from paged.common import InvalidInputError
from paged.models.checkpoint import load_model
from paged.models.checkpoint.gguf import read_config
from paged.models.checkpoint.gguf_file import GgufFile


@pytest.fixture(scope="module")
def model():
    return drawn_decoder(CONFIG, 3)


@pytest.fixture(scope="module")
def tensors(model):
    return gguf_tensors(model)


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def test_float32_weights_come_back_with_their_rows_in_order(tmp_path, model, tensors):
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", tensors))
    # GGUF keeps numbers as float32.
    assert loaded.config == dataclasses.replace(CONFIG, rms_eps=float(np.float32(1e-5)))
    assert same(loaded.model, model)
    assert loaded.tokenizer.chat_template == "{{ messages }}"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello w 42")) == "hello w 42"


def test_quantised_rows_are_dequantised(tmp_path, model, tensors):
    names = {n for n in tensors if n.startswith("blk.") and tensors[n].ndim == 2 and tensors[n].shape[1] == 32}
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", tensors, quantise=names)).model
    query, got = (np.asarray(m.layers[0].attention.query) for m in (model, loaded))
    assert 0 < np.abs(query - got).max() < 0.02 * np.abs(query).max()
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = gguf.quants.dequantize(gguf.quants.quantize(tensors["blk.0.attn_v.weight"], kind), kind)
    assert np.array_equal(loaded.layers[0].attention.value[0], stored)


def test_rotary_turns_halves_after_the_rows_were_put_back(tmp_path, model, tensors):
    """The logits, which see a wrong row order, against the model that was written."""
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", tensors)).model
    dense = jax.jit(lambda m, t: m.dense(t))
    tokens = jnp.arange(3, 15, dtype=jnp.int32)
    assert np.array_equal(dense(loaded, tokens), dense(model, tokens))


def test_interleaving_moves_row_j_of_the_second_half_behind_row_j_of_the_first():
    rows = np.arange(8.0)[:, None]
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_without_an_output_tensor_embeddings_are_tied(tmp_path, tensors):
    tied = {n: t for n, t in tensors.items() if n != "output.weight"}
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", tied))
    assert loaded.config.tied_embeddings
    assert loaded.model.head is None


def test_frequency_divisors_stored_as_a_tensor_are_used(tmp_path, tensors):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "tiny.gguf", tensors | {"rope_freqs.weight": factors})
    assert load_model(path).config.rope_factors == tuple(factors.tolist())
    path = write_gguf(tmp_path / "wrong.gguf", tensors | {"rope_freqs.weight": factors[:4]})
    with pytest.raises(
        InvalidInputError, match=r"'rope_freqs\.weight' must have shape \(8,\) by the config, got \(4,\)"
    ):
        load_model(path)


REFUSED = {
    "architecture": ({"arch": "qwen2"}, r"general\.architecture='qwen2' is not implemented, only 'llama'"),
    "scaling": ({"llama__rope__scaling__type": "yarn"}, r"rope\.scaling\.type='yarn' with factor 1\.0 is not"),
    "window": ({"llama__attention__sliding_window": 128}, r"llama\.attention\.sliding_window=128 is not implemented"),
    "experts": ({"llama__expert_count": 8}, r"llama\.expert_count=8 is not implemented"),
    "value heads": ({"llama__attention__value_length": 8}, r"attention\.value_length=8 is not implemented"),
    "partial rotary": ({"llama__rope__dimension_count": 8}, r"rope\.dimension_count=8 is not implemented"),
    "sentencepiece": ({"tokenizer__ggml__model": "llama"}, r"tokenizer\.ggml\.model='llama' is not implemented"),
    "no split": ({"skip": ("tokenizer.ggml.pre",)}, r"tokenizer\.ggml\.pre=None .* must be named"),
    "ended": ({"tokenizer__ggml__add_eos_token": True}, r"with add_eos_token=True is not implemented"),
    "split": ({"tokenizer__ggml__pre": "tekken"}, r"pre-tokenizer 'tekken' is not implemented"),
    "heads": ({"llama__attention__head_count_kv": 3}, r"num_query_heads=4 is not a multiple of num_kv_heads=3"),
    "head dim": (
        {"llama__attention__key_length": 8},
        r"attention\.value_length=16 is not implemented, only head_dim=8",
    ),
    "vocabulary": ({"llama__vocab_size": 100}, r"263 tokens, 263 token types and vocab_size=100 do not agree"),
    "no layers": ({"skip": ("llama.block_count",)}, r"llama\.block_count must be an int, got None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, tensors, name):
    changes, message = REFUSED[name]
    with pytest.raises(InvalidInputError, match=message):
        load_model(write_gguf(tmp_path / "tiny.gguf", tensors, **changes))


def test_an_unknown_key_can_be_vouched_for(tmp_path, tensors):
    path = write_gguf(tmp_path / "tiny.gguf", tensors, llama__trained_on="a boat")
    with pytest.raises(InvalidInputError, match=r"llama\.trained_on='a boat' .*vouched_for=\('llama\.trained_on',\)"):
        load_model(path)
    assert load_model(path, vouched_for=("llama.trained_on",)).config.num_layers == 2


def test_head_dim_defaults_as_the_format_says_and_the_weights_are_asked(tmp_path, tensors):
    keys = ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count")
    path = write_gguf(tmp_path / "tiny.gguf", tensors, skip=keys)
    assert read_config(GgufFile(path)).head_dim == 8
    with pytest.raises(InvalidInputError, match=r"'blk\.0\.attn_q\.weight' must have shape \(32, 32\).*got \(64, 32\)"):
        load_model(path)


def test_missing_and_unknown_tensors_are_named(tmp_path, tensors):
    without = {n: t for n, t in tensors.items() if n != "blk.1.ffn_up.weight"}
    with pytest.raises(InvalidInputError, match=r"'blk\.1\.ffn_up\.weight' is missing"):
        load_model(write_gguf(tmp_path / "a.gguf", without))
    with pytest.raises(InvalidInputError, match=r"'blk\.0\.attn_q\.bias' is not part of this architecture"):
        load_model(write_gguf(tmp_path / "b.gguf", tensors | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}))


def test_every_listed_type_can_be_dequantised():
    from paged.models.checkpoint.gguf import DTYPES

    for name in DTYPES:
        kind = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        row = np.zeros((1, 256 // block * size), np.uint8)
        assert gguf.quants.dequantize(row, kind).shape == (1, 256), name
