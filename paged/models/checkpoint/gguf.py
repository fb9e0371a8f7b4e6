"""GGUF files of the Llama architecture: config, weights and tokenizer in one file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from paged.common import AttentionSpec
from paged.common.checks import check_bool, check_int, check_number
from paged.common.errors import InvalidInputError
from paged.models.checkpoint.gguf_file import GgufFile
from paged.models.checkpoint.weights import Naming, StoredTensor
from paged.models.config import DecoderConfig
from paged.models.tokenizer import Tokenizer, byte_level_tokenizer

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of frequency divisors that converters write for Llama 3.1 and later."""

NAMING = Naming(
    layer={
        "attention_norm": "blk.{i}.attn_norm.weight",
        "query": "blk.{i}.attn_q.weight",
        "key": "blk.{i}.attn_k.weight",
        "value": "blk.{i}.attn_v.weight",
        "output": "blk.{i}.attn_output.weight",
        "mlp_norm": "blk.{i}.ffn_norm.weight",
        "gate": "blk.{i}.ffn_gate.weight",
        "up": "blk.{i}.ffn_up.weight",
        "down": "blk.{i}.ffn_down.weight",
    },
    model={"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"},
    derived=lambda name: name == ROPE_FACTORS,
)

DTYPES = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
)
"""Tensor types that are dequantised, as GGUF names them."""

_READ = frozenset(
    """
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor
    """.split()  # noqa: SIM905
)
_IMPLEMENTED = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "rope.scaling.finetuned": False}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_config(file: GgufFile, vouched_for: Collection[str] = ()) -> DecoderConfig:
    """The metadata as a `DecoderConfig`.

    Keys under `llama.` that are not implemented are refused by name, except those in `vouched_for`.
    """
    where, data = str(file.path), {k: v for k, v in file.metadata.items() if k not in vouched_for}
    architecture = data.get("general.architecture")
    if architecture != "llama":
        raise InvalidInputError(f"{where}: general.architecture={architecture!r} is not implemented, only 'llama' is.")
    own = {key.removeprefix("llama."): value for key, value in data.items() if key.startswith("llama.")}
    _refuse_unimplemented(where, own)
    sizes = {
        field: check_int(where, f"llama.{key}", own.get(key), minimum=1)
        for field, key in (
            ("num_layers", "block_count"),
            ("hidden_size", "embedding_length"),
            ("intermediate_size", "feed_forward_length"),
            ("max_positions", "context_length"),
            ("num_query_heads", "attention.head_count"),
        )
    }
    heads = sizes["num_query_heads"]
    tokens = _strings(where, data, "tokenizer.ggml.tokens")
    # The format's own default where key_length is absent is embedding_length / head_count.
    head_dim = own.get("attention.key_length", sizes["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise InvalidInputError(f"{where}: llama.{key}={own[key]} is not implemented, only head_dim={head_dim} is.")
    return DecoderConfig(
        **sizes,
        vocab_size=check_int(where, "llama.vocab_size", own.get("vocab_size", len(tokens)), minimum=1),
        num_kv_heads=check_int(
            where, "llama.attention.head_count_kv", own.get("attention.head_count_kv", heads), minimum=1
        ),
        head_dim=check_int(where, "llama.attention.key_length", head_dim, minimum=2),
        rms_eps=_number(where, own, "attention.layer_norm_rms_epsilon"),
        rope_theta=check_number(where, "llama.rope.freq_base", own.get("rope.freq_base", 1e4), positive=True),
        rope_factors=_rope_factors(where, file.tensors.get(ROPE_FACTORS), head_dim),
        tied_embeddings=NAMING.model["head"] not in file.tensors,
        eos=tuple(i for key in _END_KEYS if (i := data.get(f"tokenizer.ggml.{key}")) is not None),
        bos=data.get("tokenizer.ggml.bos_token_id"),
        block=(AttentionSpec(scale=head_dim**-0.5),),
    )


def _refuse_unimplemented(where: str, own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        if key in _IMPLEMENTED and value == _IMPLEMENTED[key]:
            continue
        if key not in _READ:
            raise InvalidInputError(
                f"{where}: llama.{key}={value!r} is not implemented, so it may change what the model computes. If it "
                f"does not, pass vouched_for=('llama.{key}',)."
            )
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", 1.0)
    if kind != "none" and not (kind == "linear" and factor == 1.0):
        raise InvalidInputError(f"{where}: llama.rope.scaling.type={kind!r} with factor {factor} is not implemented.")


def _rope_factors(where: str, stored: StoredTensor | None, head_dim: int) -> tuple[float, ...] | None:
    if stored is None:
        return None
    if stored.shape != (head_dim // 2,):
        raise InvalidInputError(
            f"{where}: tensor {ROPE_FACTORS!r} must have shape {(head_dim // 2,)} by the config, got {stored.shape}."
        )
    return tuple(stored.read().tolist())


def unpermuted(config: DecoderConfig, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Query and key rows back in the order of halves: the converter interleaves the pairs that rotary turns.

    GGUF row 2i + s of a head is row i + s · head_dim / 2 here (s = 0, 1).
    """
    fixed = dict(tensors)
    for ours in ("query", "key"):
        for layer in range(config.num_layers):
            name = NAMING.layer[ours].format(i=layer)
            stored = fixed[name]
            fixed[name] = StoredTensor(stored.shape, stored.dtype, _Halves(stored, config.head_dim))
    return fixed


class _Halves:
    def __init__(self, stored: StoredTensor, head_dim: int):
        self.stored, self.head_dim = stored, head_dim

    def __call__(self) -> np.ndarray:
        rows = self.stored.read()
        pairs = rows.reshape(-1, self.head_dim // 2, 2, rows.shape[1])
        return pairs.swapaxes(1, 2).reshape(rows.shape)


def read_tokenizer(file: GgufFile, config: DecoderConfig) -> Tokenizer:
    """The tokenizer in the metadata: byte-level BPE (`gpt2`). Raises `InvalidInputError` for other models."""
    where, data = str(file.path), file.metadata
    kind = data.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise InvalidInputError(
            f"{where}: tokenizer.ggml.model={kind!r} is not implemented, only 'gpt2' (byte-level BPE) is. Use the "
            f"Hugging Face directory of this model, which has a tokenizer.json."
        )
    tokens = _strings(where, data, "tokenizer.ggml.tokens")
    types = data.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(types) != len(tokens) or len(tokens) > config.vocab_size:
        raise InvalidInputError(
            f"{where}: {len(tokens)} tokens, {len(types)} token types and vocab_size={config.vocab_size} do not agree."
        )
    split = data.get("tokenizer.ggml.pre")
    if not isinstance(split, str) or data.get("tokenizer.ggml.add_eos_token", False):
        raise InvalidInputError(
            f"{where}: tokenizer.ggml.pre={split!r} with add_eos_token={data.get('tokenizer.ggml.add_eos_token')!r} is "
            f"not implemented: the cut before merges must be named, and no text is ended by the tokenizer."
        )
    add_bos = data.get("tokenizer.ggml.add_bos_token", split == "llama-bpe")
    return byte_level_tokenizer(
        tokens,
        _strings(where, data, "tokenizer.ggml.merges"),
        split=split,
        special=[i for i, t in enumerate(types) if t == _CONTROL],
        verbatim=[i for i, t in enumerate(types) if t == _USER_DEFINED],
        eos=config.eos,
        bos=config.bos,
        add_bos=check_bool(where, "tokenizer.ggml.add_bos_token", add_bos),
        chat_template=data.get("tokenizer.chat_template"),
    )


def _strings(where: str, data: Mapping[str, Any], key: str) -> list[str]:
    value = data.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidInputError(f"{where}: {key} must be an array of strings, got {type(value).__name__}.")
    return value


def _number(where: str, own: Mapping[str, Any], key: str) -> float:
    return check_number(where, f"llama.{key}", own.get(key), positive=True)
