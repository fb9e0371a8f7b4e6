"""Paged against dense: one trace of mixed lengths, the same weights, the same bytes of KV cache.

The dense arm (`benchmarks/dense.py`) has a number of slots, each as long as any request may get; the paged arm's pool
has as many tokens in pages of 16, the sentinel page not counted. All requests arrive at once, so neither arm ever waits
for work. Both arms queue one step ahead, sample greedily and run the same layers; the arms take turns, and every pass
starts with an empty cache. A warm-up pass of each compiles everything; compiles in the measured passes are counted.

- *throughput*: generated tokens a second over the whole pass. A pass with preemptions tells none (requirement T1).
- *a CPU second*: the same over the CPU time of all threads, which a busy machine moves less.
- *first token*: from arrival, by request.
- *page overhead*: slots of all held pages over tokens in the cache, summed over the steps of a pass.
- *programs*: different static shapes that the paged arm's steps had.
- *single stream*: one request of 100 + 64 tokens alone in either arm; far from 1, the other ratios would mean little.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import workload
from benchmarks.dense import DenseEngine, DenseRun, run_all
from benchmarks.harness import Figures, Spread, align, alternate, main
from paged.control.trace import Arrival

SINGLE = Arrival(0.0, 100, 64)
PERCENTILES = (50, 90, 99)
_BUDGET_OPTIONS = {
    "slot_tokens": "tokens of a dense slot",
    "max_requests": "requests that the paged arm may run at once",
    "max_step_tokens": "tokens of a step of either arm",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    workload.add_model_argument(parser)
    parser.add_argument("--trace", default="mixed24", help="name of a file in benchmarks/traces (mixed24)")
    parser.add_argument("--slots", type=int, nargs="+", metavar="N", help="budgets in dense slots (2 4 8)")
    for name, what in _BUDGET_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{what} (the committed one)")


def run(args: argparse.Namespace) -> Figures:
    """Measure every budget; the arms take turns."""
    model, budgets, backend = workload.load_weights(args.model), workload.budgets(), workload.backend_of(args)
    budgets |= {name: value for name in _BUDGET_OPTIONS if (value := getattr(args, name)) is not None}
    trace = workload.load_trace(args.trace)
    prompts = workload.prompts_of(trace, model.config.vocab_size)
    compiles = workload.Compiles()
    found = []
    for slots in args.slots or budgets["serving_slots"]:
        found.append(_budget(model, backend, budgets, trace, prompts, slots, args.passes, compiles))
    single = _single_stream(model, backend, budgets, max(3, args.passes))
    broken = [r["slots"] for r in found if r["leaked"] or r["compiles"] or r["programs"] > 7 or r["overhead"] > 1.14]
    return {"model": args.model, "trace": args.trace, "single_stream": single, "rows": found, "broken": broken}


def _budget(
    model: Any,
    backend: Any,
    budgets: dict,
    trace: list,
    prompts: list,
    slots: int,
    passes: int,
    compiles: workload.Compiles,
) -> dict[str, Any]:
    new = [arrival.output_tokens for arrival in trace]
    arm = _paged(model, backend, budgets, slots)
    arms = {
        "paged": lambda: workload.timed(lambda: arm.run(trace, prompts)),
        "dense": lambda: workload.timed(lambda: run_all(_dense(model, budgets, slots), prompts, new)),
    }
    arm.runtime.warm_up(strict=True)
    alternate(arms, 1)
    before = compiles.count
    measured = alternate(arms, passes)
    paged: list[workload.Pass] = [found for found, _, _ in measured["paged"]]
    dense: list[DenseRun] = [found for found, _, _ in measured["dense"]]
    cpu = {name: [seconds for _, _, seconds in found] for name, found in measured.items()}
    return {
        "slots": slots,
        "budget_tokens": slots * budgets["slot_tokens"],
        "paged": {**_arm(paged), "tokens_per_cpu_s": Spread.of(sum(new) / s for s in cpu["paged"])._asdict()},
        "dense": {**_arm(dense), "tokens_per_cpu_s": Spread.of(sum(new) / s for s in cpu["dense"])._asdict()},
        "cpu_ratio": None
        if paged[0].preemptions
        else Spread.of(d / p for p, d in zip(cpu["paged"], cpu["dense"]))._asdict(),
        "throughput_ratio": None if paged[0].preemptions else Spread.of(_ratios(paged, dense))._asdict(),
        "first_token_ratio": Spread.of(float(_p50(d) / _p50(p)) for p, d in zip(paged, dense))._asdict(),
        "overhead": max(p.overhead for p in paged),
        "preemptions": max(p.preemptions for p in paged),
        "leaked": max(p.leaked for p in paged),
        "programs": len(arm.programs),
        "compiles": compiles.count - before,
        "same_tokens": sum(paged[0].tokens[n] == dense[0].tokens[n] for n in range(len(trace))),
        "requests": len(trace),
        "overlap": paged[-1].overlap.lines(),
    }


def _paged(model: Any, backend: Any, budgets: dict, slots: int) -> workload.PagedArm:
    return workload.PagedArm(
        model,
        pages=slots * budgets["slot_tokens"] // budgets["tokens_per_page"],
        max_requests=budgets["max_requests"],
        max_request_tokens=budgets["slot_tokens"],
        max_step_tokens=budgets["max_step_tokens"],
        tokens_per_page=budgets["tokens_per_page"],
        backend=backend,
    )


def _dense(model: Any, budgets: dict, slots: int) -> DenseEngine:
    return DenseEngine(model, slots=slots, max_len=budgets["slot_tokens"], max_step_tokens=budgets["max_step_tokens"])


def _single_stream(model: Any, backend: Any, budgets: dict, passes: int) -> dict[str, Any]:
    prompts = workload.prompts_of([SINGLE], model.config.vocab_size)
    arm, engine = _paged(model, backend, budgets, 4), _dense(model, budgets, 4)
    arms = {
        "paged": lambda: workload.timed(lambda: arm.run([SINGLE], prompts)),
        "dense": lambda: workload.timed(lambda: run_all(engine, prompts, [SINGLE.output_tokens])),
    }
    alternate(arms, 1)
    measured = alternate(arms, passes)
    out: dict[str, Any] = {"tokens": SINGLE.output_tokens}
    for name, found in measured.items():
        out[name] = {
            "tokens_per_s": Spread.of(SINGLE.output_tokens / wall for _, wall, _ in found)._asdict(),
            "cpu_ms_per_token": Spread.of(1e3 * cpu / SINGLE.output_tokens for _, _, cpu in found)._asdict(),
        }
    pairs = list(zip(measured["paged"], measured["dense"]))
    out["wall_ratio"] = Spread.of(d[1] / p[1] for p, d in pairs)._asdict()
    out["cpu_ratio"] = Spread.of(d[2] / p[2] for p, d in pairs)._asdict()
    return out


def _ratios(paged: list[workload.Pass], dense: list[DenseRun]) -> list[float]:
    return [p.tokens_per_s / d.tokens_per_s for p, d in zip(paged, dense)]


def _p50(one: Any) -> float:
    return workload.milliseconds(one.first_token_s, 50)["p50"]


def _arm(passes: list[Any]) -> dict[str, Any]:
    middle = sorted(passes, key=lambda one: one.seconds)[len(passes) // 2]
    return {
        "tokens_per_s": Spread.of(one.tokens_per_s for one in passes)._asdict(),
        "first_token_ms": workload.milliseconds(middle.first_token_s, *PERCENTILES),
        "between_tokens_ms": workload.milliseconds(middle.between_tokens_s, *PERCENTILES),
        "mean_running": Spread.of(one.mean_running for one in passes)._asdict(),
        "peak_running": max(one.peak_running for one in passes),
    }


def lines(figures: Figures) -> list[str]:
    """Each arm's own figures, then the ratios, then what was promised."""
    head = ["slots", "arm", "tokens/s", "a CPU second", "first token p50/p90/p99 ms", "between p50/p90/p99 ms"]
    head.append("running mean, peak")
    cells: list[list[object]] = [[*head]]
    for row in figures["rows"]:
        for arm in ("paged", "dense"):
            a = row[arm]
            told = [Spread(**a[key]).text() for key in ("tokens_per_s", "tokens_per_cpu_s")]
            if arm == "paged" and row["preemptions"]:
                told = [f"capacity only, {row['preemptions']} preemptions", "–"]
            times = [" / ".join(f"{v:.0f}" for v in a[key].values()) for key in ("first_token_ms", "between_tokens_ms")]
            cells.append([row["slots"], arm, *told, *times, f"{a['mean_running']['median']:.1f}, {a['peak_running']}"])
    out = align(cells)
    for row in figures["rows"]:
        ratio = row["throughput_ratio"]
        out.append(
            f"{row['slots']} slots: paged / dense throughput {Spread(**ratio).text(2) if ratio else 'not told'}, by "
            f"CPU time {Spread(**row['cpu_ratio']).text(2) if ratio else 'not told'}; "
            f"dense / paged first token p50 {Spread(**row['first_token_ratio']).text(2)}; "
            f"page overhead {row['overhead']:.3f}, "
            f"{row['programs']} programs, {row['compiles']} compiled in measured passes, {row['leaked']} pages leaked; "
            f"{row['same_tokens']} of {row['requests']} requests got the same tokens in both arms"
        )
        out += [f"  paged, last pass: {line}" for line in row.get("overlap", ())]
    s = figures["single_stream"]
    out.append(
        f"single stream: paged {Spread(**s['paged']['tokens_per_s']).text()} tokens/s, dense "
        f"{Spread(**s['dense']['tokens_per_s']).text()}; paged / dense {Spread(**s['wall_ratio']).text(2)} by wall "
        f"time, {Spread(**s['cpu_ratio']).text(2)} by CPU time"
    )
    if figures["broken"]:
        out.append(f"a promise does not hold at {figures['broken']} slots")
    return out


def plot(figures: Figures, axes: Any) -> None:
    """Tokens a second of both arms over the budget."""
    for arm in ("paged", "dense"):
        rows = [r for r in figures["rows"] if arm == "dense" or not r["preemptions"]]
        found = [Spread(**r[arm]["tokens_per_s"]) for r in rows]
        spread = [[f.median - f.low for f in found], [f.high - f.median for f in found]]
        axes.errorbar(
            [r["slots"] for r in rows], [f.median for f in found], yerr=spread, marker="o", capsize=3, label=arm
        )
    axes.set(xlabel="KV budget, in dense slots", ylabel="generated tokens a second", ylim=(0, None))
    axes.legend()


if __name__ == "__main__":
    raise SystemExit(main("serving"))
