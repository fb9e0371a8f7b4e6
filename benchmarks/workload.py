"""Models, traces and the paged arm that several benchmarks share."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.decode_step import LLAMA_8B, llama_config
from paged.backends.protocol import AttentionBackend
from paged.cli.arguments import option
from paged.cli.backend import ready
from paged.common import AttentionSpec, CacheNamespace, StorageLayout
from paged.common.page_table import pages_for
from paged.control import ControlPlane, Driver, PrefixIndex, ShapeLadders
from paged.control.cost import sample_of
from paged.control.timeline import Timeline
from paged.control.trace import Arrival, read_trace
from paged.engine import DeviceRunner, Overlap, Runtime
from paged.models import Decoder, DecoderConfig, random_decoder

TRACES = Path(__file__).with_name("traces")
SMALL = DecoderConfig(
    vocab_size=8192,
    hidden_size=384,
    intermediate_size=1024,
    num_layers=8,
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rms_eps=1e-5,
    rope_theta=10000.0,
    max_positions=2048,
    tied_embeddings=True,
    eos=(0,),
    block=(AttentionSpec(scale=0.125),),
)
"""A random model of 16 million weights: small enough for many passes on two cores, wide enough that a step is not all
dispatch."""


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """`--model`, for `load_weights`, and who computes attention, for `backend_of`."""
    parser.add_argument(
        "--model",
        default="small",
        help="small (random, 16M weights), 8b (random bfloat16, Llama-3.1-8B sizes), or what load_model takes (small)",
    )
    parser.add_argument("--backend", default="xla", help="who computes the paged arm's attention (xla)")
    parser.add_argument(
        "--option", type=option, action="append", default=[], metavar="NAME=VALUE", help="of the backend"
    )


def load_weights(name: str) -> Decoder:
    """A random model (`small` in float32, `8b` in bfloat16), or a checkpoint by name or path, in float32."""
    if name == "small":
        return random_decoder(SMALL, jax.random.key(0))
    if name == "8b":
        return random_decoder(llama_config(LLAMA_8B), jax.random.key(0), "bfloat16")
    from paged.models.checkpoint import load_model

    return load_model(name, dtype="float32").model


def backend_of(args: argparse.Namespace) -> AttentionBackend:
    """The backend that `add_model_argument`'s options name."""
    return ready(args.backend, args.option)


def load_trace(name: str) -> list[Arrival]:
    """A committed trace."""
    path = TRACES / f"{name}.jsonl"
    with path.open(encoding="utf-8") as lines:
        return list(read_trace(lines, path.name))


def budgets() -> dict[str, Any]:
    """The committed budgets."""
    return json.loads((TRACES / "budgets.json").read_text(encoding="utf-8"))


def prompts_of(trace: Sequence[Arrival], vocabulary: int, seed: int = 0) -> list[np.ndarray]:
    """Random token ids for each prompt that is given as a count."""
    rng = np.random.default_rng(seed)
    found = []
    for arrival in trace:
        prompt = arrival.prompt_tokens
        ids = rng.integers(1, vocabulary, prompt) if isinstance(prompt, int) else prompt
        found.append(np.asarray(ids, np.int32))
    return found


class Compiles:
    """Counts programs that jax compiles or loads from its cache, since it was made."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == self._EVENT


class Pass(NamedTuple):
    """One run of a trace by one arm. Times in seconds; `overhead`: slots of held pages over tokens in the cache.

    `overlap`: how long host and device waited for each other.
    """

    seconds: float
    tokens: dict[int, tuple[int, ...]]
    first_token_s: np.ndarray
    between_tokens_s: np.ndarray
    mean_running: float
    peak_running: int
    preemptions: int
    leaked: int
    overhead: float
    steps: int
    prefill_tokens: int
    prefix_tokens: int
    samples: list[dict[str, float]]
    overlap: Overlap

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return sum(map(len, self.tokens.values())) / self.seconds


class PagedArm:
    """A driver over a real model; every pass has a fresh plane, so it starts with a cold prefix cache.

    - `pages`: usable pages of the pool, the sentinel not counted.
    - `backend`: who computes attention.
    - `shapes` of a step: two rungs of rows, of tokens and of lengths, and with them at most seven programs for a trace.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        pages: int,
        max_requests: int,
        max_request_tokens: int,
        max_step_tokens: int = 256,
        tokens_per_page: int = 16,
        depth: int = 2,
        prefixes: bool = False,
        shapes: ShapeLadders | None = None,
        backend: str | AttentionBackend = "xla",
    ):
        self.max_requests, self.max_step_tokens = max_requests, max_step_tokens
        self.max_request_tokens = max_request_tokens
        self.shapes = shapes or ShapeLadders(
            tokens_per_page=tokens_per_page,
            max_rows=max_requests,
            max_tokens=max_step_tokens,
            max_kv_len=max_request_tokens,
            min_rows=min(max(8, max_requests // 4), max_requests),
            min_tokens=max_step_tokens,
            min_kv_len=max_request_tokens,
        )
        self.runtime = Runtime(
            model,
            backend,
            num_pages=pages + 1,
            tokens_per_page=tokens_per_page,
            max_requests=max_requests,
            max_step_tokens=max_step_tokens,
            shapes=self.shapes,
            depth=depth,
        )
        self.prefixes = prefixes
        self.programs: set[Any] = set()

    @property
    def layout(self) -> StorageLayout:
        """Geometry of the pool."""
        return self.runtime.layout

    def run(
        self,
        trace: Sequence[Arrival],
        prompts: Sequence[np.ndarray],
        *,
        share: bool = False,
        step_arrivals: Sequence[int] | None = None,
        record: bool = False,
    ) -> Pass:
        """Run a trace to its end. Requests arrive by the wall clock, or at given steps.

        - `share`: attach to published prefixes; needs `prefixes=True`.
        - `record`: note what each step was made of and how long it took, for a cost model; needs depth 1.
        """
        layout, runner = self.layout, self.runtime.runner
        plane = ControlPlane(
            layout,
            max_requests=self.max_requests,
            max_pages_per_request=pages_for(self.max_request_tokens, layout.tokens_per_page),
            shapes=self.shapes,
            prefixes=PrefixIndex(layout) if self.prefixes else None,
        )
        driver = Driver(plane, _Watched(self, runner), max_step_tokens=self.max_step_tokens)
        namespace = CacheNamespace(weights="bench", revision=0, tokenizer="", kv_dtype=layout.dtype) if share else None
        timeline, waiting = Timeline(), list(enumerate(trace))[::-1]
        running_s = held = live = 0.0
        peak = number_of_steps = 0
        samples: list[dict[str, float]] = []
        runner.traces.clear()
        runner.rest()
        began = time.perf_counter()

        def due(number: int, arrival: Arrival, now: float) -> bool:
            return arrival.arrival_s <= now if step_arrivals is None else step_arrivals[number] <= number_of_steps

        while True:
            now = time.perf_counter() - began
            while waiting and due(*waiting[-1], now):
                number, arrival = waiting.pop()
                driver.submit(prompts[number], arrival.output_tokens, request_id=number, namespace=namespace)
                timeline.arrive(number, arrival.arrival_s if step_arrivals is None else now)
            outcome = driver.step()
            after = time.perf_counter() - began
            number_of_steps += 1
            if outcome is None:
                if not waiting:
                    break
                if step_arrivals is None:
                    time.sleep(max(0.0, waiting[-1][1].arrival_s - after))
                continue
            timeline.observe(outcome, after)
            running = driver.num_running + len(outcome.finished)
            running_s += running * (after - now)
            peak = max(peak, running)
            held += (plane.held_pages - plane.pending_pages) * layout.tokens_per_page
            live += self._live_tokens(driver)
            if record:
                samples.append(sample_of(outcome, after - now))
        seconds = time.perf_counter() - began
        results = {number: driver.take(number) for number in range(len(trace))}
        plane.verify()
        return Pass(
            seconds=seconds,
            tokens={number: result.tokens for number, result in results.items()},
            first_token_s=timeline.time_to_first_token_s.copy(),
            between_tokens_s=timeline.between_tokens_s.copy(),
            mean_running=running_s / seconds,
            peak_running=peak,
            preemptions=driver.counters.preemptions,
            leaked=plane.leaked_pages(),
            overhead=held / live if live else 0.0,
            steps=driver.counters.steps,
            prefill_tokens=driver.counters.prefill_tokens,
            prefix_tokens=driver.counters.prefix_tokens,
            samples=samples,
            overlap=Overlap.of(runner.traces),
        )

    @staticmethod
    def _live_tokens(driver: Driver) -> int:
        return sum(r.cached for r in driver._requests.values() if r.handle is not None)


class _Watched:
    """A runner that notes the rung of every step: how many programs a trace needs."""

    def __init__(self, arm: PagedArm, runner: DeviceRunner):
        self._arm, self._runner = arm, runner
        self.depth, self.can_mix = runner.depth, runner.can_mix
        self.scrub, self.copy, self.collect = runner.scrub, runner.copy, runner.collect

    def dispatch(self, step: Any) -> Any:
        table = step.table
        rung = (table.num_rows, table.num_tokens, table.page_ids.shape[0], table.max_query_len, table.max_kv_len)
        self._arm.programs.add(rung)
        return self._runner.dispatch(step)


def milliseconds(seconds: np.ndarray, *percentiles: int) -> dict[str, float]:
    """Percentiles of times, in milliseconds; empty where there are no times."""
    if not seconds.shape[0]:
        return {}
    return {f"p{p}": float(np.percentile(seconds, p)) * 1e3 for p in percentiles}


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a call returned, and the wall and CPU seconds (of all threads) that it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = call()
    return found, time.perf_counter() - wall, time.process_time() - cpu
