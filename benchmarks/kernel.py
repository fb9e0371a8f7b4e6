"""Attention kernels on a GPU: achieved bytes/s and FLOP/s beside the ceilings measured in the same run.

    python -m benchmarks.kernel [--directory MODULES] [--parts decode,prefill] [--json FILE]

Times are slopes: chains of 8 and 40 calls inside one program, each call reading other pages of a pool several times the
size of the cache; the difference over 32 leaves dispatch out. Three passes; the median is printed with the spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from paged import AttentionSpec, build_page_table, get_backend
from paged.backends.metadata import table_arrays
from paged.backends.protocol import AttentionExtras, KvArrays, Rung
from paged.backends.step import plan_step

QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
SHORT, LONG, PASSES = 8, 40, 3
DECODE = [(64, 4096), (16, 16384), (4, 32768), (16, 4096), (1, 32768)]
PREFILL = [(8, 4096), (1, 4096), (4, 16384)]


def seconds(run: Callable[[], object], repeat: int = 5) -> float:
    """Best of `repeat` synchronised calls."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)


def slope(make: Callable[[int], Callable[[], object]]) -> tuple[float, float]:
    """Seconds of one call, median over passes, and (largest − smallest) / median."""
    short, long = make(SHORT), make(LONG)
    found = sorted((seconds(long) - seconds(short)) / (LONG - SHORT) for _ in range(PASSES))
    middle = statistics.median(found)
    return middle, (found[-1] - found[0]) / middle


def copy_bandwidth() -> float:
    """Bytes/s, read plus written, of a device-to-device copy of 4 GiB, by torch's copy where torch is installed.

    XLA has no plain copy to time: its elementwise loop reaches 0.8 of what the copy engine's kernel does on an H200.
    On CPU: of that loop over 8 MiB.
    """
    on_gpu = jax.default_backend() == "gpu"
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        torch = None
    if torch is None or not on_gpu:
        x = jax.random.normal(jax.random.key(0), (1 << (31 if on_gpu else 22),), jnp.bfloat16)

        def copies(n: int) -> Callable[[], object]:
            f = jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda _, x: -x, x))
            return lambda: f(x)

        return 2 * x.nbytes / slope(copies)[0]
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times[2:])


def ceilings() -> dict[str, float]:
    """Copy bandwidth (bytes/s, read plus written) and bf16 matrix rate (FLOP/s) of this device, in this run."""
    a = jax.random.normal(jax.random.key(1), (8192, 8192), jnp.bfloat16)

    def chain(n: int) -> Callable[[], object]:
        f = jax.jit(lambda a: jax.lax.fori_loop(0, n, lambda _, b: a @ b, a * jnp.bfloat16(0.01)))
        return lambda: f(a)

    product, _ = slope(chain)
    return {"copy_bytes_per_s": copy_bandwidth(), "matmul_flop_per_s": 2 * 8192**3 / product}


def attention(backend, rows: int, context: int, query_len: int) -> tuple[float, float]:
    """Seconds of one attend over `rows` requests of `context` tokens with `query_len` new ones, and the spread."""
    each = -(-context // PAGE)
    pages = rows * each + 1
    layers = max(2, int(3e9 // (pages * PAGE * KV_HEADS * HEAD_DIM * 4)))
    ids = np.random.default_rng(0).permutation(np.arange(1, pages)).reshape(rows, each).tolist()
    table = build_page_table(
        query_lens=[query_len] * rows,
        kv_lens=[context] * rows,
        pages=ids,
        tokens_per_page=PAGE,
        num_pages=pages,
    )
    rung = Rung.of(table).with_heads(group_size=QUERY_HEADS // KV_HEADS, head_dim=HEAD_DIM, kv_dtype="bfloat16")
    spec, arrays = AttentionSpec(scale=HEAD_DIM**-0.5), table_arrays(table)
    shape = (layers * pages, PAGE, KV_HEADS, HEAD_DIM)
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    pool = KvArrays(draw(jax.random.key(2), shape), draw(jax.random.key(3), shape))
    query = draw(jax.random.key(4), (rows * query_len, QUERY_HEADS, HEAD_DIM))

    def chain(n: int) -> Callable[[], object]:
        @jax.jit
        def run(query, pool, arrays):
            plan = plan_step(backend, arrays, rung, spec)

            def body(i, query):
                out, _ = backend.attend(
                    query, pool, (i % layers) * pages, plan.static, plan.arrays, spec, AttentionExtras()
                )
                return out

            return jax.lax.fori_loop(0, n, body, query)

        return lambda: run(query, pool, arrays)

    return slope(chain)


def torch_attention(rows: int, context: int) -> dict[str, float]:
    """Seconds of torch's causal attention over dense keys and values, by kernel; empty where torch is not installed."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    query = torch.randn(rows, QUERY_HEADS, context, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, rows, KV_HEADS, context, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    found = {}
    for name, kernel in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        times = []
        for _ in range(13):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            with sdpa_kernel(kernel):
                attend(query, keys, values, is_causal=True, enable_gqa=True)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        found[name] = statistics.median(times[3:])
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory")
    parser.add_argument("--parts", default="decode,prefill")
    parser.add_argument("--json")
    args = parser.parse_args()
    parts, top = args.parts.split(","), ceilings()
    print(f"copy {top['copy_bytes_per_s'] / 1e12:.2f} TB/s, bf16 matmul {top['matmul_flop_per_s'] / 1e12:.0f} TFLOP/s")
    rows: list[dict[str, object]] = []
    kinds = (("exact", "paged"), ("fast", "paged"), ("exact", "flashinfer"), ("fast", "flashinfer"))
    for tier, decode in kinds if "decode" in parts else ():
        backend = get_backend("flashinfer", tier=tier, decode=decode, directory=args.directory)
        for batch, context in DECODE:
            took, spread = attention(backend, batch, context, 1)
            size = batch * context * KV_HEADS * HEAD_DIM * 4
            share = size / took / top["copy_bytes_per_s"]
            rows.append(
                {
                    "what": f"decode {tier} {decode}",
                    "rows": batch,
                    "context": context,
                    "us": took * 1e6,
                    "share": share,
                }
            )
            name = f"decode {tier:5} {decode:10} {batch:3} × {context:5}"
            print(f"{name}: {took * 1e6:8.1f} µs, {share:.2f} of copy, ±{spread:.2f}")
    backend = get_backend("flashinfer", directory=args.directory)
    for batch, context in PREFILL if "prefill" in parts else ():
        took, spread = attention(backend, batch, context, context)
        flop = 4 * batch * QUERY_HEADS * HEAD_DIM * context * (context + 1) / 2
        share = flop / took / top["matmul_flop_per_s"]
        rows.append({"what": "prefill", "rows": batch, "context": context, "us": took * 1e6, "share": share})
        beside = torch_attention(batch, context)
        told = ", ".join(
            f"torch's {name} {s * 1e6:.1f} µs, {flop / s / 1e12:.0f} TFLOP/s" for name, s in beside.items()
        )
        own = f"{took * 1e6:8.1f} µs, {flop / took / 1e12:.0f} TFLOP/s, {share:.2f} of matmul, ±{spread:.2f}"
        print(f"prefill {batch:3} × {context:5}: {own}; {told or 'torch is not installed'}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"ceilings": top, "rows": rows, "device": jax.devices()[0].device_kind}, file, indent=1)


if __name__ == "__main__":
    main()
