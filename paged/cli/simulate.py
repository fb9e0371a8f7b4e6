"""`paged simulate`: the driver on a clock instead of a device."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paged.cli.arguments import count, nonnegative, option, positive

if TYPE_CHECKING:
    from paged.control.cost import CostModel
    from paged.control.trace import Arrival


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `paged simulate`."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="JSON lines: arrival_s, prompt_tokens, output_tokens, priority")
    source.add_argument("--requests", type=count, metavar="N", help="make up a trace of this many requests")
    add("--rate", type=positive, default=10.0, metavar="R", help="arrivals a second, at random (10)")
    add("--mean-prompt", type=positive, default=512.0, metavar="N", help="tokens, log-normal (512)")
    add("--mean-output", type=positive, default=128.0, metavar="N", help="tokens, log-normal (128)")
    add("--shared-prefix", type=nonnegative, default=0, metavar="N", help="tokens before each prompt's own (0)")
    add("--prefixes", type=count, default=1, metavar="N", help="how many different ones there are (1)")
    add("--seed", type=nonnegative, default=0, metavar="N", help="of the made-up trace (0)")
    add("--save-trace", metavar="FILE", help="write the made-up trace there")
    add("--num-pages", type=count, required=True, metavar="N", help="pages of the pool, the sentinel included")
    add("--tokens-per-page", type=count, default=16, metavar="N", help="page size (16)")
    add("--prefix-cache", action="store_true", help="share cached prefixes among all requests")
    add("--max-requests", type=count, default=256, metavar="N", help="requests that run at once at most (256)")
    add("--step-tokens", type=count, default=2048, metavar="N", help="token budget of a step (2048)")
    add("--schedule", choices=("mixed", "prefill_first"), default="mixed", help="prompts beside or before decoding")
    add("--depth", type=count, default=1, metavar="N", help="steps under way at once; 2 plans during a step (1)")
    cost = parser.add_mutually_exclusive_group()
    cost.add_argument("--cost", metavar="FILE", help="JSON with coefficients, or measured steps to fit (made up)")
    cost.add_argument(
        "--measure",
        metavar="MODEL",
        help="fit the cost to a run of the trace's first requests with this model on this machine, and print that run "
        "beside its simulation; smollm2, a Hugging Face directory, or a .gguf file",
    )
    add("--measure-requests", type=count, metavar="N", help="how many of them (8)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of that model (float32)")
    add("--backend", metavar="NAME", help="attention backend of that model (xla)")
    add("--option", type=option, action="append", metavar="NAME=VALUE", help="of that backend")
    add("--write-cost", metavar="FILE", help="with --measure: keep the fitted cost there, for --cost")
    add("--json", action="store_true", help="print the report as JSON")
    add("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 2 for what `paged.cli.main` reports in one line."""
    from paged.cli.progress import Progress
    from paged.common.errors import InvalidInputError
    from paged.common.layout import StorageLayout
    from paged.control import ControlPlane, PrefixIndex
    from paged.control.simulate import simulate

    if args.save_trace and args.trace:
        raise InvalidInputError("--save-trace writes a made-up trace; it does not go with --trace.")
    _of_the_measured_run(args)
    if args.measure and args.trace and Path(args.trace).exists() and not Path(args.trace).is_file():
        raise InvalidInputError(f"--measure reads the trace twice; {args.trace} is no regular file. Save it first.")
    if args.measure is not None and args.depth > 2:
        raise InvalidInputError(f"--measure runs at depth 1 or 2, got --depth {args.depth}.")
    if args.write_cost and not Path(args.write_cost).parent.is_dir():  # said now, not after minutes
        raise InvalidInputError(f"cannot write {args.write_cost}: {Path(args.write_cost).parent} is no directory.")
    # Only page counts matter here, so the layout has the smallest heads there are.
    layout = StorageLayout(
        num_layers=1,
        num_pages=args.num_pages,
        tokens_per_page=args.tokens_per_page,
        num_kv_heads=1,
        head_dim=1,
        dtype="int8",
    )
    prefixes = PrefixIndex(layout) if args.prefix_cache else None
    plane = ControlPlane(layout, max_requests=args.max_requests, prefixes=prefixes)
    progress = Progress(quiet=args.quiet)
    measured = None
    try:
        if args.measure is None:
            cost = _cost(args.cost)
        else:
            from paged.cli.measured import measured_run

            with _trace(args) as trace:
                short = list(itertools.islice(trace, args.measure_requests))
            if not short:
                raise InvalidInputError(f"--measure: {args.trace} has no request to run.")
            measured = measured_run(args, short, progress)
            cost = measured.cost
            if args.write_cost:
                _save(Path(args.write_cost), [measured.cost_json()])
        with _trace(args) as trace:
            report = simulate(
                trace,
                plane,
                cost,
                max_step_tokens=args.step_tokens,
                schedule=args.schedule,
                depth=args.depth,
                on_progress=lambda arrived: progress.update("arrived", arrived, args.requests or arrived),
            )
    finally:
        progress.clear()
    if args.json:
        found = {} if measured is None else {"measured": measured.as_dict()}
        print(json.dumps({"cost": vars(cost), **found, **report.as_dict()}, allow_nan=False))
    else:
        if measured is not None:
            print("\n".join([*measured.lines(), "", "the whole trace, simulated with that cost:"]))
        print(f"cost          {cost}")
        print("\n".join(report.lines()))
    return 0


def _of_the_measured_run(args: argparse.Namespace) -> None:
    """Fill in what was left out of the measured run's arguments, or refuse them where nothing is measured."""
    from paged.common.errors import InvalidInputError

    if args.measure is None:
        if args.write_cost:
            raise InvalidInputError("--write-cost keeps what --measure fits; give --measure MODEL.")
        for name in ("measure_requests", "dtype", "backend", "option"):
            if getattr(args, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidInputError(f"{flag} is of the run that --measure makes; give --measure MODEL.")
    args.measure_requests = args.measure_requests or 8
    args.dtype = args.dtype or "float32"
    args.backend, args.option = args.backend or "xla", args.option or []


def _cost(path: str | None) -> CostModel:
    from paged.control.cost import CostModel

    if path is None:
        return CostModel()
    with _readable(path) as lines:
        return CostModel.from_json("".join(lines))


@contextlib.contextmanager
def _trace(args: argparse.Namespace) -> Iterator[Iterable[Arrival]]:
    from paged.control.trace import generate_trace, read_trace, trace_lines

    if args.trace is not None:
        with _readable(args.trace) as lines:
            yield read_trace(lines, args.trace)
        return

    def made_up() -> Iterator[Arrival]:
        return generate_trace(
            args.requests,
            rate=args.rate,
            mean_prompt=args.mean_prompt,
            mean_output=args.mean_output,
            shared_prefix=args.shared_prefix,
            num_prefixes=args.prefixes,
            seed=args.seed,
        )

    if args.save_trace is not None:
        _save(Path(args.save_trace), trace_lines(made_up()))
        args.save_trace = None  # once, though the trace may be read again
    yield made_up()


def _save(path: Path, lines: Iterable[str]) -> None:
    """Write whole or not at all: a trace that was cut off reads like a shorter one."""
    from paged.common.errors import InvalidInputError

    if path.exists() and not path.is_file():  # a pipe, say, cannot be put in place at the end
        part = path
    else:
        part = path.with_name(f"{path.name}.part")
    try:
        try:
            with part.open("w", encoding="utf-8") as file:
                file.writelines(lines)
            if part is not path:
                part.replace(path)
        except BaseException as error:
            error.add_note(f"{path} was not written")
            if part is not path:
                part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}.") from None


@contextlib.contextmanager
def _readable(path: str) -> Iterator[Iterable[str]]:
    from paged.common.errors import InvalidInputError

    try:
        with Path(path).open(encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}. Give a file.") from None
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8 text ({error.reason}).") from None
