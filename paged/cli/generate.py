"""`paged generate`: continue prompts with a model on pages."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paged.cli.arguments import count, nonnegative, option
from paged.cli.backend import ready

if TYPE_CHECKING:
    from paged.backends.sharding import KvSharding
    from paged.cli.batch_file import Results
    from paged.cli.progress import Progress
    from paged.engine import BatchProgress, CompletionOutput, Delta, OfflineEngine, SamplingParams

EXIT_FAILED, EXIT_ERROR = 1, 2
_FEWEST_PAGES = 64
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `paged generate`."""
    add = parser.add_argument
    add("--model", required=True, help="smollm2, a Hugging Face directory, or a .gguf file")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; repeat it for a batch")
    source.add_argument(
        "--input",
        metavar="FILE",
        help="JSON lines: prompt (text or ids), and if wanted id and fields of SamplingParams, for which the options "
        "below are the defaults; a wrong line is named and nothing runs",
    )
    add("--output", metavar="FILE", help="with --input: a line of JSON for each completion as it ends (stdout)")
    add("--max-tokens", type=count, default=16, metavar="N", help="tokens to generate at most (16)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of weights and activations")
    add("--kv-dtype", metavar="NAME", help="element type of the pool (that of --dtype)")
    add("--backend", default="xla", metavar="NAME", help="attention backend (xla)")
    add("--option", type=option, action="append", default=[], metavar="NAME=VALUE", help="of the backend")
    add("--tensor-parallel", type=count, default=1, metavar="N", help="devices over which heads are laid (1)")
    add("--tokens-per-page", type=count, default=16, metavar="N", help="page size (16)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--pages", type=count, metavar="N", help="pages of the pool (a power of two they fit in)")
    size.add_argument("--memory", type=_bytes, metavar="BYTES", help="of each device for the pool, e.g. 512MiB")
    add("--max-requests", type=count, metavar="N", help="samples that run at once (all, up to 32)")
    add("--step-tokens", type=count, default=256, metavar="N", help="longest step; longer prompts run in chunks (256)")
    choose = parser.add_argument_group("choice of tokens").add_argument
    choose("--temperature", type=_number, default=0.0, metavar="T", help="0 takes the likeliest token (0)")
    choose("--top-k", type=nonnegative, default=0, metavar="K", help="only the K likeliest; 0 for all (0)")
    choose("--top-p", type=_number, default=1.0, metavar="P", help="only the likeliest that together reach P (1)")
    choose("--min-p", type=_number, default=0.0, metavar="P", help="only those P times as likely as the likeliest (0)")
    choose("--seed", type=nonnegative, metavar="N", help="draw the same tokens again (a fresh one)")
    choose("-n", "--samples", type=count, default=1, metavar="N", help="samples of each prompt (1)")
    choose("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    choose("--ignore-eos", action="store_true", help="go on past the end of the text")
    choose("--invariant", action="store_true", help="tokens that neighbours in the batch cannot move; slower")
    choose("--prefix-cache", action="store_true", help="compute what prompts begin with in common once")
    show = parser.add_argument_group("output").add_argument
    show("--top-logprobs", type=nonnegative, default=0, metavar="N", help="likeliest tokens, with --json or --input")
    show(
        "--prompt-logprobs", type=nonnegative, metavar="N", help="scores of the prompt's tokens, with --json or --input"
    )
    show("--json", action="store_true", help="print prompt ids, token ids and log probabilities as JSON")
    show("--stream", action="store_true", help="print each piece as it comes, as a line of JSON")
    show("--trace", action="store_true", help="say on stderr how host and device shared the time")
    show("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0; 1 if a request was refused or failed, which stderr says; 2 for what `paged.cli.main` reports in
    one line.

    After Ctrl-C or SIGTERM, what was done by then is printed, and the exception's note says what was not."""
    from paged.cli.progress import Progress

    progress = Progress(quiet=args.quiet)
    try:
        return _run(args, progress)
    except BrokenPipeError:
        # The reader of our output went away: nothing is left to say, and the interpreter must not try at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    finally:
        progress.clear()


def _run(args: argparse.Namespace, progress: Progress) -> int:
    from paged.common.errors import InvalidInputError

    for i, prompt in enumerate(args.prompt or ()):
        if not prompt:
            raise InvalidInputError(f"prompt {i} is empty: there is nothing to continue from. Give some text.")
    if args.stream and args.json:
        raise InvalidInputError("--stream prints pieces and --json whole completions; give one of the two.")
    if args.input is None and args.output is not None:
        raise InvalidInputError("--output is for the results of --input.")
    if args.input is not None and (args.stream or args.json):
        raise InvalidInputError("--input gives a line of JSON for each completion; leave --stream and --json out.")
    sharding = _sharding(args.tensor_parallel)
    from paged.engine import SamplingParams

    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        n=args.samples,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        logprobs=args.top_logprobs,
        prompt_logprobs=args.prompt_logprobs,
    )
    from paged.cli import batch_file

    if args.input is None:
        prompts = [batch_file.prompt_of(f"prompt {i}", prompt) for i, prompt in enumerate(args.prompt)]
        engine = _loaded(args, prompts, [params] * len(prompts), sharding, progress)
        started = time.perf_counter()
        try:
            outputs = _generate(args, params, engine, progress)
        except KeyboardInterrupt:
            progress.clear()
            if engine.interruption is not None:
                _print(args, engine.interruption.outputs)
            raise
    else:
        lines = batch_file.read(args.input, params)
        with batch_file.opened(args.output) as stream:
            engine = _loaded(args, [line.prompt for line in lines], [line.params for line in lines], sharding, progress)
            started = time.perf_counter()
            outputs = _generate_lines(args, engine, batch_file.Results(stream, lines), progress)
    seconds = time.perf_counter() - started
    progress.clear()
    if args.input is None:
        _print(args, outputs)
    generated = sum(len(o.token_ids) for o in outputs)
    progress.say(f"{generated} tokens in {seconds:.1f} s, compilation included")
    if args.trace:
        from paged.engine import Overlap

        print("\n".join(Overlap.of(engine.trace()).lines()), file=sys.stderr)
    bad = [output for output in outputs if output.error is not None]
    for output in bad:
        line = "" if args.input is None else f"line {output.request + 1} of {args.input}: "
        print(f"paged generate: {output.finish_reason}: {line}{output.error}", file=sys.stderr)
    return EXIT_FAILED if bad else 0


def _generate_lines(
    args: argparse.Namespace, engine: OfflineEngine, results: Results, progress: Progress
) -> list[CompletionOutput]:
    from paged.common.errors import InvalidInputError

    lines, where = results.lines, f"prompt i is line i + 1 of {args.input}"

    def on_step(done: BatchProgress) -> None:
        progress.update("completions", done.finished, done.total)

    try:
        prompts, params = [line.prompt for line in lines], [line.params for line in lines]
        return engine.batch_inference(prompts, params, on_output=results.put, on_step=on_step)
    except InvalidInputError as error:
        error.add_note(where)
        raise
    except KeyboardInterrupt as stopped:
        file = (args.output or "what was printed") if results.written else "no file"
        stopped.add_note(f"{results.written} completions are in {file}; {where}")
        raise


def _generate(
    args: argparse.Namespace, params: SamplingParams, engine: OfflineEngine, progress: Progress
) -> list[CompletionOutput]:
    from paged.cli.batch_file import as_json

    total = engine.check(args.prompt, params)
    plain = _streams_text(args)
    finished = 0

    def on_delta(delta: Delta) -> None:
        if plain:
            progress.clear()
            sys.stdout.write(delta.text)
        elif args.stream:
            progress.clear()
            print(as_json(_piece(delta), sys.stdout.encoding))
        sys.stdout.flush()

    def on_step(done: BatchProgress) -> None:
        nonlocal finished
        if total > args.step_tokens and done.prompt_tokens < total:
            progress.update("prompt tokens", done.prompt_tokens, total)
        elif done.finished > finished and done.total > 1:
            finished = done.finished
            progress.update("completions", finished, done.total)

    return engine.batch_inference(args.prompt, params, on_delta=on_delta, on_step=on_step)


def _streams_text(args: argparse.Namespace) -> bool:
    return len(args.prompt) == args.samples == 1 and not (args.json or args.stream)


def _piece(delta: Delta) -> dict[str, Any]:
    token = None if delta.token is None else delta.token.id
    piece = {"prompt": delta.request, "sample": delta.sample, "token_id": token, "text": delta.text}
    return piece | {"finish_reason": delta.finish_reason}


def _print(args: argparse.Namespace, outputs: Sequence[CompletionOutput]) -> None:
    """What is not printed yet. A completion that was stopped is marked as such."""
    if args.stream:
        return
    from paged.cli.batch_file import as_json

    if args.json:
        print(as_json(_document(args, outputs), sys.stdout.encoding))
    elif _streams_text(args):
        print()
    else:
        for output in outputs:
            number = f"{output.request}" + (f".{output.sample}" if args.samples > 1 else "")
            stopped = {"abort": " (stopped)", "error": " (failed)"}.get(output.finish_reason, "")
            print(f"--- {number}{stopped}: {args.prompt[output.request]}\n{output.text}")
    sys.stdout.flush()


def _sharding(shards: int) -> KvSharding | None:
    """A mesh of `shards` devices with one axis, or None. On CPU as many virtual devices are made."""
    import jax
    import numpy as np

    from paged.backends.sharding import KvSharding
    from paged.common.errors import InvalidInputError

    if shards == 1:
        return None
    with contextlib.suppress(RuntimeError):  # too late to say so: then the devices that exist must do
        jax.config.update("jax_num_cpu_devices", shards)
    devices = jax.devices()
    if len(devices) < shards:
        raise InvalidInputError(
            f"--tensor-parallel {shards} needs as many devices; {len(devices)} {devices[0].platform} found."
        )
    return KvSharding(jax.sharding.Mesh(np.array(devices[:shards]), ("tensor",)), ("tensor",))


def _loaded(
    args: argparse.Namespace,
    prompts: Sequence[str | list[int]],
    every: Sequence[SamplingParams],
    sharding: KvSharding | None,
    progress: Progress,
) -> OfflineEngine:
    """The model, in an engine with room for these requests."""
    from paged.engine.compile_cache import use_compile_cache
    from paged.models.checkpoint import load_model

    use_compile_cache()
    backend = ready(args.backend, args.option)
    started = time.perf_counter()
    loaded = load_model(
        args.model,
        dtype=args.dtype,
        sharding=sharding,
        progress=lambda name, done, total: progress.update("loading weights", done, total, name),
    )
    progress.say(f"loaded {args.model} in {time.perf_counter() - started:.1f} s")
    from paged.common.page_table import pages_for
    from paged.engine import OfflineEngine

    rows = args.max_requests or min(sum(params.n for params in every), 32)
    pages = args.pages
    if pages is None and args.memory is None:
        limit = loaded.config.max_positions
        lengths = [len(loaded.tokenizer.encode(p) if isinstance(p, str) else p) for p in prompts]
        tokens = [min(length + params.max_tokens, limit) for length, params in zip(lengths, every)]
        need = [
            pages_for(t, args.tokens_per_page) for t, params in zip(tokens, every) for _ in range(min(params.n, rows))
        ]
        need.sort(reverse=True)
        # A program is compiled for each pool size, so sizes are few: what earlier runs compiled may be cached.
        pages = max(_FEWEST_PAGES, 1 << sum(need[:rows]).bit_length())
    return OfflineEngine(
        loaded.model,
        loaded.tokenizer,
        backend,
        invariant=args.invariant,
        prefix_cache=args.prefix_cache,
        max_logprobs=max(params.num_top for params in every),
        num_pages=pages,
        memory_bytes=args.memory,
        tokens_per_page=args.tokens_per_page,
        max_requests=rows,
        max_step_tokens=args.step_tokens,
        kv_dtype=args.kv_dtype,
        sharding=sharding,
        fingerprint=loaded.fingerprint,
    )


def _document(args: argparse.Namespace, outputs: Sequence[CompletionOutput]) -> dict[str, Any]:
    from paged.cli.batch_file import fields_of

    entries = []
    for o in outputs:
        entry: dict[str, Any] = {"prompt": args.prompt[o.request], "prompt_ids": o.prompt_ids}
        if args.samples > 1:
            entry["sample"] = o.sample
        entries.append(entry | fields_of(o))
    return {"model": args.model, "backend": args.backend, "dtype": args.dtype, "completions": entries}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]*) ?([kmg]i?)?b?", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"must be bytes, such as 512MiB or 2GB, got {text!r}")
    return int(found[1]) * _UNITS[found[2] or ""]
