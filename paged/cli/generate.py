"""`paged generate`: continue prompts greedily with a model on pages."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from paged.cli.arguments import count, nonnegative

if TYPE_CHECKING:
    from paged.backends.sharding import KvSharding
    from paged.cli.progress import Progress
    from paged.engine import Completion, Generator
    from paged.models.checkpoint import LoadedModel

EXIT_ERROR = 2
_FEWEST_PAGES = 64
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `paged generate`."""
    add = parser.add_argument
    add("--model", required=True, help="smollm2, a Hugging Face directory, or a .gguf file")
    add("--prompt", required=True, action="append", metavar="TEXT", help="text to continue; repeat it for a batch")
    add("--max-tokens", type=count, default=16, metavar="N", help="tokens to generate at most (16)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of weights and activations")
    add("--kv-dtype", metavar="NAME", help="element type of the pool (that of --dtype)")
    add("--backend", default="xla", metavar="NAME", help="attention backend (xla)")
    add("--tensor-parallel", type=count, default=1, metavar="N", help="devices over which heads are laid (1)")
    add("--tokens-per-page", type=count, default=16, metavar="N", help="page size (16)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--pages", type=count, metavar="N", help="pages of the pool (a power of two they fit in)")
    size.add_argument("--memory", type=_bytes, metavar="BYTES", help="of each device for the pool, e.g. 512MiB")
    add("--max-requests", type=count, metavar="N", help="prompts that run at once (all, up to 32)")
    add("--step-tokens", type=count, default=256, metavar="N", help="longest step; longer prompts run in chunks (256)")
    add("--ignore-eos", action="store_true", help="go on past the end of the text")
    add("--top-logprobs", type=nonnegative, default=0, metavar="N", help="likeliest tokens to report with --json")
    add("--json", action="store_true", help="print prompt ids, token ids and log probabilities as JSON")
    add("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 2 for what `paged.cli.main` reports in one line."""
    from paged.cli.progress import Progress

    progress = Progress(quiet=args.quiet)
    try:
        return _run(args, progress)
    except KeyboardInterrupt:
        progress.say("interrupted")
        raise
    except BrokenPipeError:
        # The reader of our output went away: nothing is left to say, and the interpreter must not try at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    finally:
        progress.clear()


def _run(args: argparse.Namespace, progress: Progress) -> int:
    from paged.common.errors import InvalidInputError

    for i, prompt in enumerate(args.prompt):
        if not prompt:
            raise InvalidInputError(f"prompt {i} is empty: there is nothing to continue from. Give some text.")
    sharding = _sharding(args.tensor_parallel)
    from paged.models.checkpoint import load_model

    started = time.perf_counter()
    loaded = load_model(
        args.model,
        dtype=args.dtype,
        sharding=sharding,
        progress=lambda name, done, total: progress.update("loading weights", done, total, name),
    )
    progress.say(f"loaded {args.model} in {time.perf_counter() - started:.1f} s")
    generator = _generator(args, loaded, sharding)
    streaming = len(args.prompt) == 1 and not args.json

    def on_token(_index: int, _token: Any, piece: str) -> None:
        if streaming:
            progress.clear()
            sys.stdout.write(piece)
            sys.stdout.flush()

    def on_chunk(done: int, total: int) -> None:
        if total > args.step_tokens:
            progress.update("prompt tokens", done, total)

    started = time.perf_counter()
    completions = generator.generate(
        args.prompt,
        max_tokens=args.max_tokens,
        eos=() if args.ignore_eos else None,
        on_token=on_token,
        on_chunk=on_chunk,
    )
    seconds = time.perf_counter() - started
    progress.clear()
    if args.json:
        print(json.dumps(_document(args, completions), ensure_ascii=False, allow_nan=False))
    elif streaming:
        print()
    else:
        for i, (prompt, completion) in enumerate(zip(args.prompt, completions)):
            print(f"--- {i}: {prompt}\n{completion.text}")
    generated = sum(len(c.token_ids) for c in completions)
    progress.say(f"{generated} tokens in {seconds:.1f} s, compilation included")
    return 0


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


def _generator(args: argparse.Namespace, loaded: LoadedModel, sharding: KvSharding | None) -> Generator:
    from paged.common.page_table import pages_for
    from paged.engine import Generator

    rows = args.max_requests or min(len(args.prompt), 32)
    pages = args.pages
    if pages is None and args.memory is None:
        limit = loaded.config.max_positions
        tokens = [min(len(loaded.tokenizer.encode(p)) + args.max_tokens, limit) for p in args.prompt]
        need = sorted((pages_for(t, args.tokens_per_page) for t in tokens), reverse=True)
        # A program is compiled for each pool size, so sizes are few: what earlier runs compiled may be cached.
        pages = max(_FEWEST_PAGES, 1 << sum(need[:rows]).bit_length())
    return Generator(
        loaded.model,
        loaded.tokenizer,
        args.backend,
        num_pages=pages,
        memory_bytes=args.memory,
        tokens_per_page=args.tokens_per_page,
        max_requests=rows,
        max_step_tokens=args.step_tokens,
        kv_dtype=args.kv_dtype,
        num_top=args.top_logprobs,
        sharding=sharding,
    )


def _document(args: argparse.Namespace, completions: list[Completion]) -> dict[str, Any]:
    entries = []
    for prompt, c in zip(args.prompt, completions):
        entry: dict[str, Any] = {"prompt": prompt, "prompt_ids": c.prompt_ids, "text": c.text}
        entry |= {"token_ids": c.token_ids, "logprobs": c.logprobs, "finish_reason": c.finish_reason}
        if args.top_logprobs:
            entry["top_logprobs"] = c.top_logprobs
        entries.append(entry)
    return {"model": args.model, "backend": args.backend, "dtype": args.dtype, "completions": entries}


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]*) ?([kmg]i?)?b?", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"must be bytes, such as 512MiB or 2GB, got {text!r}")
    return int(found[1]) * _UNITS[found[2] or ""]
