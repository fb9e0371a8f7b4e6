"""Writes small checkpoints the way other programs do, names and row orders spelled out a second time here."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paged.common import AttentionSpec
from paged.models import Decoder, DecoderConfig

SPECIALS = ["<|end|>", "<|start|>", "<|im_end|>"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "Ġ w"]
TOKENS = [*SPECIALS, *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]

CONFIG = DecoderConfig(
    vocab_size=272,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_eps=1e-5,
    rope_theta=5e5,
    max_positions=64,
    tied_embeddings=False,
    eos=(2, 0),
    bos=1,
    block=(AttentionSpec(scale=0.25),),
)
"""head_dim is 16 where hidden / heads is 8 (scenario A7)."""


def hf_config(**changes):
    """CONFIG as a config.json; a change to None removes the key."""
    data = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "use_cache": True,
        "sliding_window": None,
    }
    return {k: v for k, v in (data | changes).items() if v is not None}


def hf_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """Weights under Hugging Face's names."""
    out = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    if model.head is not None:
        out["lm_head.weight"] = model.head
    layer = model.layers[0]
    for i in range(model.config.num_layers):
        prefix = f"model.layers.{i}."
        out[prefix + "input_layernorm.weight"] = layer.attention_norm[i]
        out[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm[i]
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
            out[prefix + f"self_attn.{theirs}_proj.weight"] = getattr(layer.attention, ours)[i]
        for name in ("gate", "up", "down"):
            out[prefix + f"mlp.{name}_proj.weight"] = getattr(layer.mlp, name)[i]
    return {name: np.array(value) for name, value in out.items()}


def write_tokenizer(directory: Path) -> None:
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=[tuple(m.split()) for m in MERGES])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    backend.save(str(directory / "tokenizer.json"))


def write_huggingface(directory: Path, tensors: dict[str, np.ndarray], config=None, *, shards: int = 1) -> Path:
    """A directory with config.json, tokenizer.json and one or more safetensors files."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config() if config is None else config))
    write_tokenizer(directory)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def as_bfloat16(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q or K as converters to GGUF write them: the two halves of a head taken in turns."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """Weights under GGUF's names, Q and K interleaved."""
    c, layer = model.config, model.layers[0]
    out = {"token_embd.weight": model.embedding, "output_norm.weight": model.norm}
    if model.head is not None:
        out["output.weight"] = model.head
    for i in range(c.num_layers):
        prefix = f"blk.{i}."
        out[prefix + "attn_norm.weight"] = layer.attention_norm[i]
        out[prefix + "ffn_norm.weight"] = layer.mlp_norm[i]
        out[prefix + "attn_q.weight"] = interleaved(np.asarray(layer.attention.query[i]), c.num_query_heads)
        out[prefix + "attn_k.weight"] = interleaved(np.asarray(layer.attention.key[i]), c.num_kv_heads)
        out[prefix + "attn_v.weight"] = layer.attention.value[i]
        out[prefix + "attn_output.weight"] = layer.attention.output[i]
        for name in ("gate", "up", "down"):
            out[prefix + f"ffn_{name}.weight"] = getattr(layer.mlp, name)[i]
    return {name: np.array(value) for name, value in out.items()}


def write_gguf(path: Path, tensors: dict[str, np.ndarray], *, quantise=(), arch="llama", skip=(), **changes) -> Path:
    """CONFIG as a GGUF file; `changes` override or add metadata (dots written as two underscores)."""
    writer = gguf.GGUFWriter(path, arch)
    data = {
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5e5,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": 272,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    for key, value in (data | {k.replace("__", "."): v for k, v in changes.items()}).items():
        if key in skip:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in tensors.items():
        if name in quantise:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
