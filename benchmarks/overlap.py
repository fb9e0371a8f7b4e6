"""How much of an engine's time a GPU has nothing to run, by the profiler: kernels' intervals over the wall clock.

    python -m benchmarks.overlap [--model 8b] [--backend flashinfer] [--option directory=MODULES] [--trace mixed56]

The paged arm of `benchmarks/serving.py` runs a trace once to compile, once measured by the engine's own step trace, and
once under the profiler, which also slows the host down. Told are the engine's bound, the share of the profiled time in
which some kernel ran, and the same for the decode steps at the end, which are the short ones.
"""

from __future__ import annotations

import argparse
import tempfile

import jax

from benchmarks import workload
from benchmarks.profile_step import intervals


def busy(spans: list[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the (start, end) spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workload.add_model_argument(parser)
    parser.add_argument("--trace", default="mixed56")
    parser.add_argument("--step-tokens", type=int, default=2048)
    args = parser.parse_args()
    model, trace = workload.load_weights(args.model), workload.load_trace(args.trace)
    prompts = workload.prompts_of(trace, model.config.vocab_size)
    longest = max(a.prompt_tokens if isinstance(a.prompt_tokens, int) else len(a.prompt_tokens) for a in trace)
    longest = -(-(longest + max(a.output_tokens for a in trace)) // 64) * 64
    arm = workload.PagedArm(
        model,
        pages=len(trace) * longest // 16,
        max_requests=len(trace),
        max_request_tokens=longest,
        max_step_tokens=args.step_tokens,
        backend=workload.backend_of(args),
    )
    arm.run(trace, prompts)
    measured = arm.run(trace, prompts)
    print(f"{measured.steps} steps, {measured.tokens_per_s:.0f} tokens/s, {measured.preemptions} preemptions")
    print("\n".join(measured.overlap.lines()))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            profiled = arm.run(trace, prompts)
        spans = intervals(folder)
    if not spans:
        print("the profiler saw no kernel: no GPU here")
        return
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    middle = (first + last) / 2
    tail = [(max(s, middle), e) for s, e in spans if e > middle]
    print(
        f"profiled: {profiled.seconds:.3f} s; from the first kernel to the last {last - first:.3f} s, a kernel ran in "
        f"{busy(spans) / (last - first):.4f} of it; in its second half, decode steps alone, in "
        f"{busy(tail) / (last - middle):.4f}"
    )


if __name__ == "__main__":
    main()
