"""A whole decode step of an 8B-geometry model on a GPU, beside the byte floor measured in the same run.

    python -m benchmarks.step [--directory MODULES] [--json FILE]

Llama-3.1-8B sizes, random bf16 weights. The floor is (weights + KV read) / copy bandwidth. A step's tokens stay on the
device and steps are queued, as the engine would with its host work hidden: 12 steps, three passes, median and spread.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax

from benchmarks.decode_step import LLAMA_8B, DecodeStep, llama_config
from benchmarks.kernel import ceilings
from paged import get_backend
from paged.engine.compile_options import compiler_options
from paged.models import Decoder, random_decoder


def measure(model: Decoder, backend: Any, rows: int, context: int, options: dict) -> dict[str, object]:
    """Compile one decode step and time it queued."""
    case = DecodeStep(model, backend, rows, context, options=options)
    address = case.pool.addresses()
    took, spread = case.time()
    return {
        "rows": rows,
        "context": context,
        "layers": model.config.num_layers,
        "compile_s": case.compile_s,
        "step_ms": took * 1e3,
        "spread": spread,
        "floor_bytes": case.floor_bytes(),
        "temp_bytes": case.compiled.memory_analysis().temp_size_in_bytes,
        "in_place": address == case.pool.addresses(),
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory")
    parser.add_argument("--json")
    args = parser.parse_args()
    top = ceilings()
    bandwidth, rows = top["copy_bytes_per_s"], []
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    options = compiler_options("gpu")
    small = {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_query_heads": 8,
        "num_kv_heads": 2,
        "vocab_size": 32000,
        "eos": (2,),
    }

    def show(label, found):
        floor = found["floor_bytes"] / bandwidth * 1e3
        rows.append({"label": label, "floor_ms": floor, **found})
        print(
            f"{label:28} {found['layers']:3} layers {found['rows']:3} × {found['context']:5}: compile "
            f"{found['compile_s']:5.1f} s, step {found['step_ms']:7.3f} ms ±{found['spread']:.2f}, floor {floor:6.3f}, "
            f"ratio {found['step_ms'] / floor:.2f}, temp {found['temp_bytes'] / 1e6:.0f} MB, in place "
            f"{found['in_place']}",
            flush=True,
        )

    for layers in (4, 80):
        model = random_decoder(llama_config(LLAMA_8B, **small, num_layers=layers), jax.random.key(0), "bfloat16")
        show("small", measure(model, get_backend("flashinfer", directory=args.directory), 16, 1024, options))
    model = random_decoder(llama_config(LLAMA_8B), jax.random.key(0), "bfloat16")
    for tier in ("fast", "exact"):
        backend = get_backend("flashinfer", tier=tier, directory=args.directory)
        for count, context in ((2, 1024), (16, 1024), (64, 2048)):
            show(f"8B {tier}", measure(model, backend, count, context, options))
    show(
        "8B fast, default flags",
        measure(model, get_backend("flashinfer", tier="fast", directory=args.directory), 16, 1024, {}),
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"ceilings": top, "rows": rows, "device": jax.devices()[0].device_kind}, file, indent=1)


if __name__ == "__main__":
    main()
