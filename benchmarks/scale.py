"""Tensor-parallel decode steps of a 70B geometry on several devices, beside the byte floor and the measured all-reduce.

    python -m benchmarks.scale [--backend flashinfer] [--directory MODULES] [--shards 8] [--geometry 70b] [--json FILE]

What one run does, in this order, each part by name in `--parts`:

- `certify`: `paged certify BACKEND --level sharded` in a process of its own, its last line printed. Cases that need
  more devices than there are count as not claimed.
- `bits`: the logits of the same step over 1 device and over `--shards`, for a geometry small enough to lie on one.
  Equal logits are not promised (partial sums meet in an all-reduce); equal pools of the first layer are.
- `mesh`: the same over two-dimensional meshes of all devices, tensor × fsdp, where every fsdp row holds the pool whole:
  replicas of a shard are equal bit for bit, in all layers, and stay where they are.
- `step`: decode steps at batch 1, 16 and 64 with a context of 1024, queued as an engine queues them. Weights are
  random, drawn on the devices, never whole on one; the pool is built sharded. The floor of a step is (weights + KV) of
  one device / copy bandwidth, plus two all-reduces a layer of the size and dtype that the compiled step holds,
  measured alone in the same run.
- `capacity`: requests of two lengths, half prompt and half generated, more than the pool holds, through the offline
  engine over the mesh: how many ran while others waited, beside the budget over three quarters of the length and beside
  the slots that a dense cache has for the same budget; preemptions and leaked pages are counted.

On CPU: `--geometry small --shards 8` runs every line on virtual devices; its times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from benchmarks.decode_step import LLAMA_8B, STEPS, DecodeStep, llama_config, queued
from benchmarks.kernel import copy_bandwidth
from paged import KvSharding, get_backend
from paged.engine import OfflineEngine, SamplingParams
from paged.engine.compile_options import compiler_options
from paged.models import DecoderConfig, random_decoder

SIZES = {
    # Llama-3.3-70B.
    "70b": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_layers": 80,
        "num_query_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_positions": 131072,
        "eos": (128001,),
    },
    "8b": LLAMA_8B,
    "small": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_layers": 4,
        "num_query_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "max_positions": 4096,
        "eos": (2,),
    },
}
CAPACITY = {
    "70b": (16 * 2048, (1024, 2048), 48),
    "8b": (16 * 2048, (1024, 2048), 48),
    "small": (16 * 64, (64, 128), 24),
}
"""Tokens that the pool holds, mean lengths, and requests of each."""

BATCHES = {
    "70b": ((1, 1024), (16, 1024), (64, 1024)),
    "8b": ((1, 1024), (16, 1024), (64, 1024)),
    "small": ((1, 64), (4, 64)),
}


def config_of(geometry: str) -> DecoderConfig:
    """The geometry, see `llama_config`."""
    return llama_config(SIZES[geometry])


def sharding_over(shards: int, replicas: int = 1) -> KvSharding:
    """KV heads over the first `shards` × `replicas` devices, each shard on `replicas` of them."""
    devices = np.array(jax.devices()[: shards * replicas]).reshape(replicas, shards)
    if replicas == 1:
        return KvSharding(jax.sharding.Mesh(devices[0], ("tensor",)), ("tensor",))
    return KvSharding(jax.sharding.Mesh(devices, ("fsdp", "tensor")), ("tensor",))


def all_reduce(sharding: KvSharding, shape: tuple[int, int], dtype: str, count: int, options: dict) -> float:
    """Seconds of one all-reduce of `shape` over the mesh, from a chain of `count` in one program."""

    def chain(x):
        def body(_, x):
            return jax.lax.psum(x, sharding.kv_axes) * jnp.asarray(1 / sharding.kv_head_shards, dtype)

        return jax.lax.fori_loop(0, count, body, x)

    spec = PartitionSpec()
    mapped = jax.shard_map(chain, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    run = jax.jit(mapped, compiler_options=options or None)
    x = jax.device_put(jnp.ones(shape, dtype), sharding.named(spec))
    return queued(run, x, 1)[0] / count


def measure_steps(args, backend, sharding: KvSharding) -> list[dict[str, object]]:
    """The table of part `step`."""
    config, dtype = config_of(args.geometry), args.dtype
    options = compiler_options(jax.default_backend())
    start = time.perf_counter()
    model = jax.block_until_ready(random_decoder(config, jax.random.key(0), dtype, sharding))
    print(f"weights drawn on {sharding.mesh.size} devices in {time.perf_counter() - start:.1f} s", flush=True)
    bandwidth = copy_bandwidth()
    print(f"copy on one device {bandwidth / 1e12:.3f} TB/s", flush=True)
    found = []
    for rows, context in BATCHES[args.geometry]:
        step = DecodeStep(model, backend, rows, context, dtype=dtype, sharding=sharding)
        before = step.pool.addresses()
        seconds, spread = queued(step, step.tokens, STEPS)
        wide = step.reduces_in_float32()
        reduce = all_reduce(sharding, (rows, config.hidden_size), "float32" if wide else dtype, 64, options)
        memory = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in sharding.mesh.devices.flat]
        bytes_floor = step.floor_bytes() / bandwidth
        floor = bytes_floor + 2 * config.num_layers * reduce
        row = {
            "rows": rows,
            "context": context,
            "shards": sharding.mesh.size,
            "compile_s": step.compile_s,
            "step_ms": seconds * 1e3,
            "spread": spread,
            "byte_floor_ms": bytes_floor * 1e3,
            "all_reduce_us": reduce * 1e6,
            "all_reduce_float32": wide,
            "floor_ms": floor * 1e3,
            "ratio": seconds / floor,
            "peak_bytes": max((m for m in memory if m is not None), default=None),
            "in_place": before == step.pool.addresses(),
            "finite": bool(jnp.isfinite(step.logits).all()),
        }
        found.append(row)
        peak = "?" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f} GiB"
        print(
            f"batch {rows:3} × {context}: compile {step.compile_s:.1f} s, step {seconds * 1e3:.3f} ms ±{spread:.2f}, "
            f"bytes {bytes_floor * 1e3:.3f} ms + 2 × {config.num_layers} all-reduces of {reduce * 1e6:.1f} µs, ratio "
            f"{seconds / floor:.2f}, peak {peak}, in place {row['in_place']}, finite {row['finite']}",
            flush=True,
        )
        del step
    return found


def compare_bits(args, backend, sharding: KvSharding) -> dict[str, object]:
    """Part `bits`: one step of the small geometry over one device and over the mesh, from equal weights and pools."""
    many = _small_step(args, backend, sharding)
    result = _against_one(_small_step(args, backend, sharding_over(1)), many)
    print(f"small geometry, 1 against {sharding.mesh.size} devices: {result}", flush=True)
    return result


def compare_meshes(args, backend, devices: int) -> list[dict[str, object]]:
    """Part `mesh`: a step of 4 KV heads over every tensor × fsdp mesh of the devices, beside one device."""
    one, found = _small_step(args, backend, sharding_over(1), num_kv_heads=4), []
    for replicas in range(2, devices + 1):
        shards = devices // replicas
        if shards * replicas != devices or 4 % shards:
            continue
        step = _small_step(args, backend, sharding_over(shards, replicas), num_kv_heads=4)
        row = {"tensor": shards, "fsdp": replicas, **_against_one(one, step)}
        before = step.pool.addresses()
        step.step()
        row["replicas_equal"] = all(_replicas_equal(leaf) for leaf in jax.tree.leaves(step.pool.arrays))
        row["in_place"] = before == step.pool.addresses()
        found.append(row)
        print(f"small geometry of 4 KV heads: {row}", flush=True)
    return found


def _small_step(args, backend, sharding: KvSharding, **sizes: int) -> DecodeStep:
    """A step of the small geometry, run once."""
    config = llama_config(SIZES["small"], **sizes)
    model = random_decoder(config, jax.random.key(1), args.dtype, sharding)
    step = DecodeStep(model, backend, 4, 64, dtype=args.dtype, sharding=sharding)
    step.step()
    return step


def _against_one(one: DecodeStep, many: DecodeStep) -> dict[str, object]:
    # Page 0 takes what padding writes; pages of the first layer see no all-reduce before them.
    equal = all(
        np.array_equal(a[0].view(np.uint8), b[0].view(np.uint8))
        for page in range(1, one.pool.layout.num_pages)
        for a, b in zip(one.pool.read(page), many.pool.read(page))
    )
    logits = np.abs(np.asarray(one.logits) - np.asarray(many.logits))
    return {"first_layer_pool_equal": equal, "largest_logit_difference": float(logits.max())}


def _replicas_equal(leaf: jax.Array) -> bool:
    """Whether all devices that hold the same part of an array hold the same bytes."""
    seen: dict[str, bytes] = {}
    parts = [(str(s.index), np.asarray(s.data).tobytes()) for s in leaf.addressable_shards]
    return all(seen.setdefault(index, data) == data for index, data in parts)


def measure_capacity(args, backend, sharding: KvSharding) -> list[dict[str, object]]:
    """Part `capacity`: concurrency by length at one budget, with a real model and real steps."""
    budget, lengths, count = CAPACITY[args.geometry]
    config, size, found = config_of(args.geometry), 16, []
    model = random_decoder(config, jax.random.key(0), args.dtype, sharding)
    for length in lengths:
        engine = OfflineEngine(
            model,
            backend=backend,
            sharding=sharding,
            num_pages=budget // size + 1,
            tokens_per_page=size,
            max_requests=count,
            max_step_tokens=512,
            max_request_tokens=2 * max(lengths),
        )
        rng = np.random.default_rng(length)
        for whole in rng.integers(length // 2, length * 3 // 2 + 1, count).tolist():
            prompt = rng.integers(0, config.vocab_size, whole // 2).tolist()
            engine.submit(prompt, SamplingParams(max_tokens=whole - whole // 2, ignore_eos=True))
        running, leaked, start = [], 0, time.perf_counter()
        while not engine.idle:
            engine.step()
            leaked = max(leaked, engine.runtime.plane.leaked_pages())
            if engine.driver.num_waiting:
                running.append(engine.driver.num_running)
        engine.runtime.plane.verify()
        row = {
            "length": length,
            "mean_running": float(np.mean(running)),
            "peak_running": max(running),
            "ideal": budget / (0.75 * length),
            "dense_slots": budget // (2 * max(lengths)),
            "preemptions": engine.driver.counters.preemptions,
            "leaked": leaked,
            "seconds": time.perf_counter() - start,
        }
        found.append(row)
        print(
            f"{count} requests of {length} tokens in a pool of {budget}: {row['mean_running']:.1f} ran at once (peak "
            f"{row['peak_running']}), ideal {row['ideal']:.1f}, a dense cache of {2 * max(lengths)} tokens a slot has "
            f"{row['dense_slots']}; {row['preemptions']} preempted, {leaked} pages leaked, {row['seconds']:.0f} s",
            flush=True,
        )
        del engine
    return found


def certify(args) -> dict[str, object]:
    """Part `certify`: the sharded level in a process of its own; its exit code and last line."""
    command = [sys.executable, "-m", "paged.cli", "certify", args.backend, "--level", "sharded"]
    if args.directory:
        command += ["--option", f"directory={args.directory}"]
    if args.certificate:
        command += ["--output", args.certificate]
    run = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    last = (run.stdout.strip().splitlines() or [""])[-1]
    print(f"certify --level sharded: exit {run.returncode}: {last}", flush=True)
    if run.returncode:
        print((run.stdout + run.stderr)[-3000:], flush=True)
    return {"exit": run.returncode, "line": last}


def main() -> None:
    """Run the parts and print what each found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="flashinfer")
    parser.add_argument("--directory", help="FlashInfer's modules")
    parser.add_argument("--shards", type=int, help="devices over which KV heads lie; by default all")
    parser.add_argument("--geometry", choices=sorted(SIZES), default="70b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", default="certify,bits,mesh,step,capacity")
    parser.add_argument("--certificate", help="where the certificate of part certify goes")
    parser.add_argument("--json")
    args = parser.parse_args()
    parts, result = args.parts.split(","), {}
    if "certify" in parts:  # first, while this process has not taken the devices' memory
        result["certify"] = certify(args)
    shards = args.shards or len(jax.devices())
    sharding = sharding_over(shards)
    options = {} if args.directory is None else {"directory": args.directory}
    backend = get_backend(args.backend, **options)
    print(f"{shards} × {jax.devices()[0].device_kind}, {args.backend}, {args.geometry}, {args.dtype}", flush=True)
    if "bits" in parts:
        result["bits"] = compare_bits(args, backend, sharding)
    if "mesh" in parts:
        result["mesh"] = compare_meshes(args, backend, len(jax.devices()))
    if "step" in parts:
        result["step"] = measure_steps(args, backend, sharding)
    if "capacity" in parts:
        result["capacity"] = measure_capacity(args, backend, sharding)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": jax.devices()[0].device_kind, "shards": shards, **result}, file, indent=1)


if __name__ == "__main__":
    main()
