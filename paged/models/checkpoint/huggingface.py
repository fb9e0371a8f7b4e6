"""Hugging Face directories: `config.json`, safetensors (whole or in shards), `tokenizer.json`. No pickle is read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from paged.common import AttentionSpec
from paged.common.checks import check_int, check_number
from paged.common.errors import InvalidInputError
from paged.models.checkpoint.resolve import file_inside, own_file, read_json, read_text
from paged.models.checkpoint.weights import Naming, StoredTensor
from paged.models.config import DecoderConfig, llama3_rope_factors
from paged.models.tokenizer import Tokenizer, tokenizer_from_json

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = ("F32", "BF16", "F16")
"""Element types that are read, as safetensors names them."""

NAMING = Naming(
    layer={
        "attention_norm": "model.layers.{i}.input_layernorm.weight",
        "query": "model.layers.{i}.self_attn.q_proj.weight",
        "key": "model.layers.{i}.self_attn.k_proj.weight",
        "value": "model.layers.{i}.self_attn.v_proj.weight",
        "output": "model.layers.{i}.self_attn.o_proj.weight",
        "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "gate": "model.layers.{i}.mlp.gate_proj.weight",
        "up": "model.layers.{i}.mlp.up_proj.weight",
        "down": "model.layers.{i}.mlp.down_proj.weight",
    },
    model={"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"},
    # Old writers stored the rotary frequencies, which follow from the config.
    derived=lambda name: name.endswith(".rotary_emb.inv_freq"),
)

_IMPLEMENTED: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "quantization_config": None,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_llama_config": True,
}
"""Keys that would change the computation, with the one value that the decoder implements."""

_READ = frozenset(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    rms_norm_eps rope_theta rope_scaling rope_parameters max_position_embeddings tie_word_embeddings
    eos_token_id bos_token_id layer_types
    """.split()  # noqa: SIM905
)

_WITHOUT_EFFECT = frozenset(
    """
    _name_or_path _attn_implementation_autoset attention_dropout attn_implementation bad_words_ids
    chunk_size_feed_forward decoder_start_token_id do_sample dtype finetuning_task id2label initializer_range
    is_decoder label2id max_length max_window_layers min_length name_or_path num_beams output_attentions
    output_hidden_states pad_token_id prefix pretraining_tp problem_type repetition_penalty return_dict
    task_specific_params temperature tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version unk_token_id use_cache
    """.split()  # noqa: SIM905
)
"""Keys that do not touch the logits of inference: provenance, training, and defaults of sampling."""


def read_config(directory: Path, vouched_for: Collection[str] = ()) -> DecoderConfig:
    """`config.json` and `generation_config.json` as a `DecoderConfig`.

    Every key is read, known to change no logit, of the value that the decoder implements, or null; anything else is
    refused by name, except keys in `vouched_for`. The end-of-text ids of `generation_config.json` come first.
    """
    where = own_file(directory, "config.json") or directory / "config.json"
    data = {k: v for k, v in read_json(where).items() if k not in vouched_for}
    _refuse_unimplemented(where, data)
    heads = _size(where, data, "num_attention_heads")
    head_dim, hidden = data.get("head_dim"), _size(where, data, "hidden_size")
    if head_dim is None:
        if hidden % heads:
            raise InvalidInputError(
                f"{where} gives no head_dim, and hidden_size={hidden} is not a multiple of num_attention_heads={heads}."
            )
        head_dim = hidden // heads
    head_dim = check_int(str(where), "head_dim", head_dim, minimum=2)
    theta, factors = _rope(where, data, head_dim)
    return DecoderConfig(
        vocab_size=_size(where, data, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(where, data, "intermediate_size"),
        num_layers=_size(where, data, "num_hidden_layers"),
        num_query_heads=heads,
        num_kv_heads=heads if data.get("num_key_value_heads") is None else _size(where, data, "num_key_value_heads"),
        head_dim=head_dim,
        rms_eps=_number(where, data, "rms_norm_eps"),
        rope_theta=theta,
        rope_factors=factors,
        max_positions=_size(where, data, "max_position_embeddings"),
        tied_embeddings=bool(data.get("tie_word_embeddings", False)),
        eos=_end_of_text(directory, data),
        bos=data.get("bos_token_id"),
        block=(AttentionSpec(scale=head_dim**-0.5),),
    )


def _refuse_unimplemented(where: Path, data: Mapping[str, Any]) -> None:
    if data.get("model_type") is None and data.get("architectures") is None:
        raise InvalidInputError(f"{where} names neither model_type nor architectures; it is no model's config.")
    for key, value in data.items():
        if value is None or key in _READ or key in _WITHOUT_EFFECT:
            continue
        if key not in _IMPLEMENTED:
            raise InvalidInputError(
                f"{where}: {key}={value!r} is not known here, so it may change what the model computes. If it does "
                f"not, pass vouched_for=({key!r},)."
            )
        if value != _IMPLEMENTED[key]:
            raise InvalidInputError(f"{where}: {key}={value!r} is not implemented, only {_IMPLEMENTED[key]!r} is.")
    kinds = data.get("layer_types") or []
    for layer, kind in enumerate(kinds):
        if kind != "full_attention":
            raise InvalidInputError(
                f"{where}: layer_types[{layer}]={kind!r} is not implemented, only 'full_attention' is."
            )


def _rope(where: Path, data: Mapping[str, Any], head_dim: int) -> tuple[float, tuple[float, ...] | None]:
    """Theta and frequency divisors; newer writers keep both in `rope_parameters`, older ones in two keys."""
    key = "rope_parameters" if data.get("rope_parameters") is not None else "rope_scaling"
    scaling = data.get(key) or {}
    if not isinstance(scaling, dict):
        raise InvalidInputError(f"{where}: {key} must be an object, got {scaling!r}.")
    theta = check_number(
        str(where), "rope_theta", scaling.get("rope_theta", data.get("rope_theta", 1e4)), positive=True
    )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    original, numbers = "original_max_position_embeddings", ("factor", "low_freq_factor", "high_freq_factor")
    used = {"rope_theta", "rope_type", "type"} | ({original, *numbers} if kind == "llama3" else set())
    if kind not in ("default", "llama3"):
        raise InvalidInputError(f"{where}: {key} of type {kind!r} is not implemented, only 'llama3' is.")
    if unknown := sorted(set(scaling) - used):
        raise InvalidInputError(f"{where}: {key}.{unknown[0]}={scaling[unknown[0]]!r} is not implemented.")
    if kind == "default":
        return theta, None
    return theta, llama3_rope_factors(
        theta=theta,
        head_dim=head_dim,
        original_max_positions=check_int(str(where), f"{key}.{original}", scaling.get(original), minimum=1),
        **{n: check_number(str(where), f"{key}.{n}", scaling.get(n), positive=True) for n in numbers},
    )


def _size(where: Path, data: Mapping[str, Any], key: str) -> int:
    return check_int(str(where), key, data.get(key), minimum=1)


def _number(where: Path, data: Mapping[str, Any], key: str) -> float:
    return check_number(str(where), key, data.get(key), positive=True)


def _end_of_text(directory: Path, data: Mapping[str, Any]) -> tuple[int, ...]:
    generation = own_file(directory, "generation_config.json")
    ids = read_json(generation).get("eos_token_id") if generation else None
    ids = data.get("eos_token_id") if ids is None else ids
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def weight_files(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files, and the index's tensor -> file name where there is one.

    Names in an index are file names inside the directory and nothing else (requirement X3).
    """
    single, index = own_file(directory, _WEIGHTS), own_file(directory, _INDEX)
    if single:
        return [single], None
    if not index:
        pickles = [p.name for p in directory.glob("*.bin")] + [p.name for p in directory.glob("*.pt*")]
        found = f" ({sorted(pickles)[0]} is a pickle, which is never read: convert it)" if pickles else ""
        raise InvalidInputError(f"{directory} has neither {_WEIGHTS} nor {_INDEX}{found}.")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise InvalidInputError(f"{index}: weight_map must be an object that names a file for each tensor.")
    files = {name: file_inside(directory, name, why=f"{index}: weight_map") for name in _distinct(shards)}
    return list(files.values()), shards


def _distinct(shards: Mapping[str, Any]) -> list[Any]:
    return list(dict.fromkeys(v if isinstance(v, str) else repr(v) for v in shards.values()))


def read_tensors(
    files: list[Path], shards: Mapping[str, str] | None, stack: contextlib.ExitStack
) -> dict[str, StoredTensor]:
    """Declared tensors of all files, unread; the files stay open until `stack` closes.

    The safetensors reader compares every declared size with the file before anything is allocated.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        try:
            handle = stack.enter_context(safe_open(path, framework="np"))
            names = list(handle.keys())
        except SafetensorError as error:
            raise InvalidInputError(f"{path} is damaged or no safetensors file: {error}.") from None
        for name in names:
            if shards is not None and shards.get(name) != path.name:
                raise InvalidInputError(
                    f"{path} holds tensor {name!r}, which the index places in {shards.get(name)!r}."
                )
            part = handle.get_slice(name)
            read = functools.partial(handle.get_tensor, name)
            tensors[name] = StoredTensor(tuple(part.get_shape()), part.get_dtype(), read)
    for name, shard in (shards or {}).items():
        if name not in tensors:
            raise InvalidInputError(f"the index places tensor {name!r} in {shard!r}, which does not hold it.")
    return tensors


def read_tokenizer(directory: Path, config: DecoderConfig) -> Tokenizer:
    """`tokenizer.json`, with the chat template of `chat_template.jinja` or `tokenizer_config.json` as text."""
    path = own_file(directory, "tokenizer.json")
    if not path:
        raise InvalidInputError(f"{directory} has no tokenizer.json. Save the tokenizer in its fast form there.")
    template = _chat_template(directory)
    tokenizer = tokenizer_from_json(path, eos=config.eos, bos=config.bos, chat_template=template)
    if tokenizer.vocab_size > config.vocab_size:
        raise InvalidInputError(
            f"{path} has ids up to {tokenizer.vocab_size - 1}; the model's vocab_size is {config.vocab_size}."
        )
    return tokenizer


def _chat_template(directory: Path) -> str | None:
    template, settings = own_file(directory, "chat_template.jinja"), own_file(directory, "tokenizer_config.json")
    if template:
        return read_text(template)
    value = read_json(settings).get("chat_template") if settings else None
    if isinstance(value, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
