"""Prefill tokens that the prefix cache avoids: two arms of one engine over one trace (requirement T3).

24 prompts begin with the same 512 tokens and are admitted staggered, at given steps of the engine. One arm shares
cached prefixes, the other, the same runtime, does not. Every pass starts with a cold index.

*Avoided* is what the arms' counters of fed prompt tokens differ by. It has to equal, token for token, what `avoided`
says: a model of the trace that knows no page, no hash and no driver, only which prompts were in the cache when.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from benchmarks import workload
from benchmarks.harness import Figures, Spread, align, alternate, main
from paged.control.trace import Arrival

PAGE, STEP_TOKENS = 16, 256


@dataclasses.dataclass
class _Sequence:
    prompt: np.ndarray
    to_generate: int
    fed: int = 0
    generated: int = 0


def avoided(prompts: Sequence[np.ndarray], outputs: Sequence[int], arrival_steps: Sequence[int]) -> int:
    """Prompt tokens found cached, by a model of steps that finish before the next begins, rows and pages in plenty.

    A step feeds one token of every request that generates, then prompts in the order of arrival until `STEP_TOKENS` are
    full. A request joins when there is room in a step, and then finds the longest run of whole pages, short of its last
    token, that begins some prompt that is in the cache whole.
    """
    coming = list(zip(arrival_steps, prompts, outputs))
    running: list[_Sequence] = []
    cached: set[bytes] = set()  # every run of whole pages from the start of a prompt that is in the cache
    found, step = 0, 0
    while coming or running:
        generating = [r for r in running if r.fed == len(r.prompt)]
        room = STEP_TOKENS - len(generating)
        for request in generating:
            request.generated += 1
        fed = [r for r in running if r.fed < len(r.prompt)]
        for request in fed:
            count = min(room, len(request.prompt) - request.fed)
            request.fed += count
            room -= count
        while room and coming and coming[0][0] <= step:
            _, prompt, output = coming.pop(0)
            hit = 0
            while hit + PAGE <= len(prompt) - 1 and prompt[: hit + PAGE].tobytes() in cached:
                hit += PAGE
            found += hit
            count = min(room, len(prompt) - hit)
            room -= count
            request = _Sequence(prompt, output, hit + count)
            running.append(request)
            fed.append(request)
        for request in fed:
            if request.fed == len(request.prompt):
                request.generated += 1
                ends = range(PAGE, len(request.prompt) + 1, PAGE)
                cached |= {request.prompt[:end].tobytes() for end in ends}
        running = [r for r in running if r.generated < r.to_generate]
        step += 1
    return found


def load(vocabulary: int, name: str = "shared24") -> tuple[list[np.ndarray], list[int], list[int]]:
    """Prompts, tokens to generate and arrival steps of a committed trace."""
    trace = json.loads((workload.TRACES / f"{name}.json").read_text(encoding="utf-8"))
    rng = np.random.default_rng(0)
    shared = rng.integers(1, vocabulary, trace["shared_tokens"])
    requests = trace["requests"]
    prompts = [
        np.concatenate([shared, rng.integers(1, vocabulary, r["own_tokens"])]).astype(np.int32) for r in requests
    ]
    return prompts, [r["output_tokens"] for r in requests], [r["arrival_step"] for r in requests]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    workload.add_model_argument(parser)


def run(args: argparse.Namespace) -> Figures:
    """Measure both arms, and ask the model of the trace."""
    model = workload.load_weights(args.model)
    prompts, outputs, steps = load(model.config.vocab_size)
    longest = max(len(p) + n for p, n in zip(prompts, outputs))
    arm = workload.PagedArm(
        model,
        pages=sum(-(-(len(p) + n) // PAGE) for p, n in zip(prompts, outputs)),
        max_requests=len(prompts),
        max_request_tokens=-(-longest // 256) * 256,
        max_step_tokens=STEP_TOKENS,
        depth=1,
        backend=workload.backend_of(args),
        prefixes=True,
    )
    trace = [Arrival(0.0, len(p), n) for p, n in zip(prompts, outputs)]

    def one(share: bool) -> workload.Pass:
        return arm.run(trace, prompts, share=share, step_arrivals=steps)

    arms = {"cold": lambda: one(False), "shared": lambda: one(True)}
    arm.runtime.warm_up(strict=True)
    alternate(arms, 1)
    compiles = workload.Compiles()
    measured: dict[str, list[workload.Pass]] = alternate(arms, args.passes)
    told = {
        (c.prefill_tokens - s.prefill_tokens, s.prefix_tokens) for c, s in zip(measured["cold"], measured["shared"])
    }
    total, expected = sum(map(len, prompts)), avoided(prompts, outputs, steps)
    same = [c.tokens == s.tokens for c, s in zip(measured["cold"], measured["shared"])]
    figures: Figures = {
        "model": args.model,
        "prompt_tokens": total,
        "expected": expected,
        "avoided": sorted(told),
        "equal": told == {(expected, expected)},
        "same_tokens": all(same),
        "leaked": max(p.leaked for passes in measured.values() for p in passes),
        "compiles": compiles.count,
        "programs": len(arm.programs),
    }
    for name, passes in measured.items():
        ttft = [workload.milliseconds(p.first_token_s, 50)["p50"] for p in passes]
        figures[name] = {
            "prefill_tokens": passes[0].prefill_tokens,
            "seconds": Spread.of(p.seconds for p in passes)._asdict(),
            "first_token_p50_ms": Spread.of(ttft)._asdict(),
        }
    figures["broken"] = [key for key in ("leaked", "compiles") if figures[key]] + ["equal"] * (not figures["equal"])
    return figures


def lines(figures: Figures) -> list[str]:
    """Both arms, then the tokens avoided beside the model of the trace."""
    cells: list[list[object]] = [["arm", "prompt tokens fed", "seconds", "first token p50 ms"]]
    for name in ("cold", "shared"):
        a = figures[name]
        spreads = [Spread(**a["seconds"]).text(2), Spread(**a["first_token_p50_ms"]).text(0)]
        cells.append([name, a["prefill_tokens"], *spreads])
    expected, total = figures["expected"], figures["prompt_tokens"]
    got = figures["avoided"][0][0]
    return [
        *align(cells),
        f"avoided {got} of {total} prompt tokens, {100 * got / total:.1f} %; the model of the trace says {expected}: "
        f"{'equal in every pass' if figures['equal'] else 'NOT EQUAL, ' + str(figures['avoided'])}",
        f"{figures['programs']} programs, {figures['compiles']} compiled in measured passes, {figures['leaked']} pages "
        f"leaked; the arms' tokens are {'the same' if figures['same_tokens'] else 'not all the same'}",
    ]


if __name__ == "__main__":
    raise SystemExit(main("prefix"))
