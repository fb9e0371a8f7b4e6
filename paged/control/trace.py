"""Arrivals to replay: generated from a seed, or read from JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from paged.common.checks import check_int, check_number, show
from paged.common.errors import InvalidInputError

_FIELDS = ("arrival_s", "prompt_tokens", "output_tokens", "priority")
_CHUNK = 4096


class Arrival(NamedTuple):
    """A request of a trace. `prompt_tokens`: a count, or the ids; `output_tokens`: how many it generates."""

    arrival_s: float
    prompt_tokens: int | list[int] | np.ndarray
    output_tokens: int
    priority: int = 0


def generate_trace(
    num_requests: int,
    *,
    rate: float,
    mean_prompt: float = 512,
    mean_output: float = 128,
    spread: float = 0.6,
    max_prompt: int | None = None,
    max_output: int | None = None,
    shared_prefix: int = 0,
    num_prefixes: int = 1,
    seed: int = 0,
) -> Iterator[Arrival]:
    """`num_requests` arrivals at random, `rate` a second on average (Poisson), with log-normal lengths.

    - `mean_prompt`, `mean_output`: in tokens. `spread`: standard deviation of the lengths' logarithm.
    - `max_prompt`, `max_output`: lengths are cut there, by default at eight times the mean.
    - `shared_prefix`: tokens before each prompt's own, the same for all that drew the same of `num_prefixes`.

    Equal arguments give equal traces. Raises `InvalidInputError` naming the argument.
    """
    owner = "generate_trace"
    num_requests = check_int(owner, "num_requests", num_requests, minimum=0)
    rate = check_number(owner, "rate", rate, positive=True)
    spread = check_number(owner, "spread", spread)
    means = [
        check_number(owner, n, m, positive=True)
        for n, m in (("mean_prompt", mean_prompt), ("mean_output", mean_output))
    ]
    tops = [
        check_int(owner, name, math.ceil(8 * mean) if top is None else top, minimum=1)
        for name, top, mean in (("max_prompt", max_prompt, means[0]), ("max_output", max_output, means[1]))
    ]
    rng = np.random.default_rng(check_int(owner, "seed", seed, minimum=0))
    trace = _generated(rng, num_requests, rate, means, tops, spread)
    shared_prefix = check_int(owner, "shared_prefix", shared_prefix, minimum=0)
    num_prefixes = check_int(owner, "num_prefixes", num_prefixes, minimum=1)
    if not shared_prefix:
        return trace
    return _with_prefixes(trace, np.random.default_rng([seed, 1]), shared_prefix, num_prefixes)


def own_ids(number: int, count: int) -> np.ndarray:
    """`count` token ids that no other number gives, so that prompts made of them share nothing."""
    return np.full(count, number, np.int32)


def _with_prefixes(
    trace: Iterator[Arrival], rng: np.random.Generator, shared_prefix: int, num_prefixes: int
) -> Iterator[Arrival]:
    for number, arrival in enumerate(trace):
        assert isinstance(arrival.prompt_tokens, int)
        prefix = own_ids(2**31 - 1 - int(rng.integers(num_prefixes)), shared_prefix)
        own = own_ids(number, arrival.prompt_tokens)
        yield arrival._replace(prompt_tokens=np.concatenate([prefix, own]))


def _generated(
    rng: np.random.Generator, num_requests: int, rate: float, means: list[float], tops: list[int], spread: float
) -> Iterator[Arrival]:
    now = 0.0
    for begin in range(0, num_requests, _CHUNK):
        arrivals = now + np.cumsum(rng.exponential(1 / rate, _CHUNK))
        prompts, outputs = (
            np.clip(np.rint(rng.lognormal(math.log(mean) - spread**2 / 2, spread, _CHUNK)), 1, top).astype(int)
            for mean, top in zip(means, tops)
        )
        now = float(arrivals[-1])
        chunk = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist())
        for _, (arrival, prompt, output) in zip(range(begin, num_requests), chunk):
            yield Arrival(arrival, prompt, output)


def trace_lines(trace: Iterable[Arrival]) -> Iterator[str]:
    """One JSON object a line, as `read_trace` takes them."""
    for arrival in trace:
        fields = arrival._asdict()
        if isinstance(arrival.prompt_tokens, np.ndarray):
            fields["prompt_tokens"] = arrival.prompt_tokens.tolist()
        if not arrival.priority:
            del fields["priority"]
        yield json.dumps(fields) + "\n"


def read_trace(lines: Iterable[str], name: str = "trace") -> Iterator[Arrival]:
    """Arrivals of JSON lines with `arrival_s` (seconds, not decreasing), `prompt_tokens` (a count, or ids),
    `output_tokens` and, if not 0, `priority`; empty lines are skipped. Read as they are needed.

    Raises `InvalidInputError` naming the line, the field and the value.
    """
    before = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        arrival = _parse(f"{name}, line {number}", line)
        if arrival.arrival_s < before:
            raise InvalidInputError(
                f"{name}, line {number}: arrival_s={arrival.arrival_s} is before the line above ({before}). Sort it."
            )
        before = arrival.arrival_s
        yield arrival


def _parse(where: str, line: str) -> Arrival:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} is not JSON ({error}).") from None
    if not isinstance(data, dict) or not set(_FIELDS[:3]) <= data.keys() <= set(_FIELDS):
        raise InvalidInputError(f"{where} must be an object with {', '.join(_FIELDS)}; got {show(data)}.")
    prompt = data["prompt_tokens"]
    if isinstance(prompt, list):
        prompt = [check_int(where, "prompt_tokens", token, minimum=0) for token in prompt]
    else:
        prompt = check_int(where, "prompt_tokens", prompt, minimum=1)
    if not prompt:
        raise InvalidInputError(f"{where}: prompt_tokens is empty.")
    arrival_s = check_number(where, "arrival_s", data["arrival_s"])
    if arrival_s < 0:
        raise InvalidInputError(f"{where}: arrival_s must not be negative, got {arrival_s}.")
    return Arrival(
        arrival_s,
        prompt,
        check_int(where, "output_tokens", data["output_tokens"], minimum=1),
        check_int(where, "priority", data.get("priority", 0), minimum=-(2**31)),
    )
