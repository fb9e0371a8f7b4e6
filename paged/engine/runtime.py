"""Running a model on pages, step by step: requests go in by prompt and are named by handle, never by slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paged.backends.protocol import AttentionBackend
from paged.backends.registry import get_backend
from paged.backends.sharding import KvSharding
from paged.backends.step import check_step
from paged.common.checks import check_int
from paged.common.errors import InvalidInputError, PoolExhaustedError
from paged.common.namespace import CacheNamespace
from paged.common.page_table import pages_for
from paged.control import ControlPlane, FixedShape, Handle, PinnedShapes, PrefixIndex, ShapeLadders, Shapes, Slice
from paged.control.schedule import chunk_tokens
from paged.engine.limits import (
    build_pool,
    check_ids,
    check_prompt,
    check_same_structure,
    device_of,
    layout_for,
    shortage,
)
from paged.engine.namespace import Namespaces
from paged.engine.params import SamplingParams
from paged.engine.pool import KvPool
from paged.engine.prepared import PreparedStep, PreparedSteps
from paged.engine.request_sampling import RequestSampling
from paged.engine.runner import DeviceRunner, Token
from paged.engine.step import Program
from paged.engine.warm_up import Say, WarmUp, warm_up
from paged.models import Decoder
from paged.models.decoder import runs_layers

_LONG_KV_LEN = 2048

OnChunk = Callable[[int, int], object]
"""on_chunk(tokens done, tokens in all), after each step of a prefill."""


class Runtime:
    """A decoder, its pool and the pages' bookkeeping.

    - `model`: its weights lie on `sharding`'s mesh, or on one device if that is None.
    - `backend`: a name of the registry, or a backend.
    - `num_pages`: pages of one layer, the sentinel included; or `memory_bytes`: bytes of one device that the pool may
      take. Exactly one of the two.
    - `max_requests`: requests that can be open at once. `max_step_tokens`: longest step; longer prompts run in chunks.
      `max_request_tokens`: tokens that one request may have, if that is fewer than the pool and the model have room
      for; fewer mean fewer programs.
    - `kv_dtype`: element type of the pool; the model's by default. `num_top`: likeliest tokens that a request may ask
      for, and that are reported to those that come without `SamplingParams`.
    - `shapes`: padding policy; by default `ShapeLadders`, with `few_programs` at its coarsest, and with `pinned`
      `PinnedShapes`. `scan`: layers as one loop; by default wherever the backend's pool is stacked, except on one
      CPU, where every block of layers runs by itself, see `Apart`.
    - `poison_freed`: debugging, fills freed pages with NaN.
    - `prefix_cache`: whether a `Driver` may share cached prefixes between requests of one `namespace`. `fingerprint`:
      of the weights, see `LoadedModel.fingerprint`; by default that of `weights_fingerprint`, which reads them all.
      `tokenizer_fingerprint`: of the tokenizer that made the prompts.

    Everything the backend does not declare is refused here, before the pool is built, and what it compiles or loads
    before its first step is there. Raises `UnsupportedError` naming the capability, `BackendUnavailableError`,
    `InvalidInputError`, or `PoolExhaustedError` with the arithmetic of a pool that does not fit.

    Three ways in, all of them the same steps: one dispatch, one transfer to the device.

    - By request: `add`, `prefill`, `decode`, `release`.
    - By slices: `plane.open`, `prepare_step`, `run`, `plane.release`; the caller keeps the tokens.
    - By a `paged.control.Driver(runtime.plane, runtime.runner, …)`, which then has the plane for itself; `depth` is the
      runner's, see `DeviceRunner`.
    """

    def __init__(
        self,
        model: Decoder,
        backend: str | AttentionBackend = "xla",
        *,
        num_pages: int | None = None,
        memory_bytes: int | None = None,
        tokens_per_page: int = 16,
        max_requests: int = 8,
        max_step_tokens: int = 256,
        kv_dtype: str | None = None,
        num_top: int = 0,
        sharding: KvSharding | None = None,
        shapes: Shapes | None = None,
        scan: bool | None = None,
        depth: int = 1,
        max_request_tokens: int | None = None,
        few_programs: bool = False,
        pinned: bool = False,
        prefix_cache: bool = False,
        fingerprint: str | None = None,
        tokenizer_fingerprint: str = "",
        poison_freed: bool = False,
    ):
        backend = get_backend(backend) if isinstance(backend, str) else backend
        self.model = model
        self.sharding = sharding
        self.max_step_tokens = check_int("Runtime", "max_step_tokens", max_step_tokens, minimum=1)
        num_top = check_int("Runtime", "num_top", num_top, minimum=0, maximum=model.config.vocab_size)
        dtype = model.embedding.dtype.name
        self.layout = layout_for(
            model.config,
            num_pages=num_pages,
            memory_bytes=memory_bytes,
            tokens_per_page=tokens_per_page,
            dtype=kv_dtype or dtype,
            sharding=sharding,
        )
        device = device_of(model, sharding)
        check_step(
            backend,
            self.layout,
            model.config.block,
            num_query_heads=model.config.num_query_heads,
            dtype=dtype,
            sharding=sharding,
            batches=("prefill", "decode"),
            platform=device.platform,
        )
        if (prepare := getattr(backend, "prepare", None)) is not None:
            prepare()
        stacked = backend.capabilities.pool_layout == "stacked"
        alone = scan is not False and stacked and sharding is None
        kernels = alone and runs_layers(backend, model.config, dtype, self.layout.dtype)
        apart = alone and scan is None and not kernels and device.platform == "cpu"
        scan = stacked if scan is None else scan
        program = Program(backend, sharding, device.platform, scan, num_top, apart=apart, kernels=kernels)
        self.max_tokens = min(self.layout.usable_pages * tokens_per_page, model.config.max_positions)
        if max_request_tokens is not None:
            most = check_int("Runtime", "max_request_tokens", max_request_tokens, minimum=1)
            self.max_tokens = min(self.max_tokens, most)
        if shapes is None:
            sizes = {"tokens_per_page": tokens_per_page, "max_rows": max_requests, "max_tokens": max_step_tokens}
            sizes["max_kv_len"] = self.max_tokens
            few: Any = {"min_kv_len": _LONG_KV_LEN, "wide_mixed": True} if few_programs else {}
            shapes = PinnedShapes.of(**sizes) if pinned else ShapeLadders(**sizes, **few)
        self.plane = ControlPlane(
            self.layout,
            max_requests=max_requests,
            max_pages_per_request=pages_for(self.max_tokens, tokens_per_page),
            shapes=shapes,
            prefixes=PrefixIndex(self.layout) if prefix_cache else None,
            poison_freed=(lambda pages: self.runner.poison(pages)) if poison_freed else None,
        )
        pool = build_pool(self.layout, backend, sharding, device)
        self.runner = DeviceRunner(model, pool, program, max_rows=max_requests, depth=depth)
        self.poisons = poison_freed
        hashed = {"fingerprint": fingerprint, "tokenizer": tokenizer_fingerprint}
        self._namespaces = Namespaces(self.layout, backend, sharding, kernels=kernels, **hashed)
        self._tokens: dict[Handle, list[int]] = {}
        self._steps = PreparedSteps(self.plane, self.runner, self.max_tokens)

    @property
    def backend(self) -> AttentionBackend:
        """The backend that computes attention."""
        return self.runner.program.backend

    @property
    def pool(self) -> KvPool:
        """The pool as it is now; every step replaces it."""
        return self.runner.pool

    def add(self, prompt: Sequence[int] | np.ndarray, params: SamplingParams | None = None) -> Handle:
        """A handle for a new request; nothing runs and no page is taken yet.

        - `params`: how its tokens are chosen, by default greedily. When it ends is the caller's matter here, and `n`
          must be 1; scores of its prompt are in `prompt_scores` after the prefill.

        Raises `InvalidInputError` for an empty prompt or a token outside the vocabulary, and `PoolExhaustedError` with
        the arithmetic if the prompt can never fit, or if `max_requests` are open.
        """
        tokens = self.check_prompt(prompt)
        sampling = None if params is None else self.sampling(params, len(tokens))
        handle = self.plane.open()
        if handle is None:
            raise PoolExhaustedError(
                f"Runtime.add: all {self.plane.max_requests} requests are open. Release one, or build the runtime with "
                f"a larger max_requests."
            )
        self._tokens[handle] = tokens
        if sampling is not None:
            self.runner.sampling[handle] = sampling
        return handle

    def sampling(
        self, params: SamplingParams, num_prompt: int, *, seed: int | None = None, sample: int = 0, name: str = "prompt"
    ) -> RequestSampling:
        """What the runner wants to know of a request with a prompt of `num_prompt` tokens.

        - `seed`: what to use where the parameters have none; by default a fresh one. `sample`: its number, 0 .. n − 1.

        Raises `InvalidInputError` naming the field for log probabilities or ids that this runtime does not have.
        """
        return RequestSampling.of(
            params,
            num_prompt,
            seed=seed,
            sample=sample,
            vocabulary=self.model.config.vocab_size,
            most_top=self.runner.program.num_top,
            name=name,
        )

    def prompt_scores(self, handle: Handle) -> list[Token | None]:
        """Scores of the prompt's tokens, for a request that asked for them, once it was prefilled: None for the first,
        which nothing comes before."""
        scores = self.runner.prompt_scores.get(handle, {})
        return [scores.get(i) for i in range(self.runner.sampling[handle].num_prompt)]

    def check_prompt(self, prompt: Sequence[int] | np.ndarray, *, name: str = "prompt", more: int = 0) -> list[int]:
        """The prompt as a list of ints, if it and `more` tokens can ever be cached; raises what `add` raises.

        `name` is what messages call it. Tokens past the model's last position are not counted in.
        """
        return check_prompt(self.model.config, self.layout, prompt, name=name, more=more)

    def check_ids(self, prompt: Sequence[int] | np.ndarray, *, name: str = "prompt") -> list[int]:
        """The prompt as a list of ints, whether or not it fits; raises `InvalidInputError` as `add` does."""
        return check_ids(self.model.config, prompt, name=name)

    def namespace(
        self, *, tenant: str | None = None, adapter: str | None = None, salt: str | None = None
    ) -> CacheNamespace:
        """With whom a request shares cached prefixes: those of the same tenant (and adapter, and salt), computed from
        the same weights in the same way."""
        return self._namespaces.of(self.model, tenant, adapter, salt)

    def update_weights(self, model: Decoder, *, fingerprint: str | None = None) -> None:
        """Go on with other weights of the same model: nothing that the old ones computed is used again (scenario C8).

        - `fingerprint`: of the new weights, as in the constructor.

        The namespace moves on, and cached prefixes are forgotten. Raises `InvalidInputError` for another structure,
        shape, dtype or config, and while requests are open: their keys and values are of the old weights.
        """
        if self.plane.num_open:
            raise InvalidInputError(
                f"update_weights: {self.plane.num_open} requests are open, and what is cached for them comes from the "
                f"old weights. Finish or abort them first."
            )
        check_same_structure(self.model, model)
        self.model = self.runner.model = model
        self.bump(fingerprint=fingerprint)

    def bump(self, *, fingerprint: str | None = None) -> None:
        """The weights were changed in place: move the namespace on and forget what is cached."""
        self._namespaces.move_on(fingerprint)
        if self.plane.prefixes is not None:
            self.plane.forget_prefixes()

    def warm_up(self, *params: SamplingParams, strict: bool = False, say: Say | None = None) -> WarmUp:
        """Compile, and run once on padding alone, every program that steps for such requests can need.

        - `params`: what requests will ask for; by default greedy ones without log probabilities beside their tokens.
        - `strict`: from now on a step that would compile raises `LateCompileError`.
        - `say`: called with a line that tells how many programs it was and how long it took.

        Raises `InvalidInputError` while requests are open or prefixes are cached: pages are overwritten.
        """
        return warm_up(self, params or (SamplingParams(),), strict=strict, say=say)

    def tokens(self, handle: Handle) -> tuple[int, ...]:
        """Prompt and generated tokens of a request that `add` opened."""
        self.plane.length(handle)  # a stale handle is refused there
        return tuple(self._tokens[handle])

    def prefill(self, handles: Sequence[Handle], *, on_chunk: OnChunk | None = None) -> list[Token]:
        """Run what is not cached yet of each request, packed and in chunks; the next token of each, in order.

        Raises `PoolExhaustedError` with the arithmetic if pages run out; what ran until then is kept, and the same call
        goes on from there once pages were released.
        """
        total = sum(self._uncached(h) for h in handles)
        done: dict[Handle, Token] = {}
        ran = 0
        while pending := [h for h in handles if h not in done]:
            slices = self._pack(pending)
            done |= self._advance(slices, None if self._pinned is None else self._pinned.prefill)
            ran += sum(s.num_tokens for s in slices)
            if on_chunk is not None:
                on_chunk(ran, total)
        return [done[h] for h in handles]

    def decode(self, handles: Sequence[Handle]) -> list[Token]:
        """One step: feed each request's latest token; the next token of each, in order.

        Raises `InvalidInputError` for a request that was not prefilled or that is at the model's last position,
        `PoolExhaustedError` with the arithmetic if pages run out; then nothing changed.
        """
        slices = []
        for handle in handles:
            uncached = self._uncached(handle)
            if uncached != 1 or not self.plane.length(handle):
                raise InvalidInputError(
                    f"Runtime.decode: {handle} has {uncached} tokens that are not cached; decode feeds exactly one "
                    f"after a prefill. Call prefill([handle]) first."
                )
            slices.append(Slice(handle, self.plane.length(handle), 1))
        done = self._advance(slices, None if self._pinned is None else self._pinned.decode)
        return [done[h] for h in handles]

    def release(self, handle: Handle) -> np.ndarray:
        """Forget a request, at any point; returns the pages (int32) that became free."""
        freed = self.plane.release(handle)
        for table in (self._tokens, self.runner.sampling, self.runner.prompt_scores):
            table.pop(handle, None)
        return freed

    def prepare_step(
        self,
        slices: Sequence[Slice],
        known: Sequence[Sequence[int] | np.ndarray] | None = None,
        *,
        shape: FixedShape | None = None,
    ) -> PreparedStep | None:
        """Reserve and clean the pages of one step and build its inputs; None is backpressure, and nothing changed.

        - `known[i]`: all tokens known of the request of `slices[i]`; by default those that `add` and the steps kept.
        - `shape`: what to pad the step to; by default what `plane.shapes` says.

        Raises `InvalidInputError` naming the row of a slice past the known tokens or past the model's positions, and
        `UnsupportedError` for a batch that mixes prefill and decode if the backend does not declare `mixed`.
        """
        if known is None:
            known = [self._known(s.handle) for s in slices]
        return self._steps.prepare(slices, known, shape)

    def cancel(self, prepared: PreparedStep) -> None:
        """Give up a prepared step: the requests are as they were before it. Raises what `run` raises."""
        self._steps.cancel(prepared)

    def run(self, prepared: PreparedStep) -> list[Token | None]:
        """Run a prepared step and wait for it: for each slice the sampled token, or None where its prompt goes on.

        If it fails, the requests are as they were before `prepare_step`; the pool too, unless it was given away
        already. Raises `InvalidInputError` for a step that ran or was cancelled, and if the logits are not finite.
        """
        return self._steps.run(prepared)

    @property
    def _pinned(self) -> PinnedShapes | None:
        return self.plane.shapes if isinstance(self.plane.shapes, PinnedShapes) else None

    def _advance(self, slices: list[Slice], shape: FixedShape | None) -> dict[Handle, Token]:
        """Run one step of requests that `add` opened, and append what it sampled to their tokens."""
        prepared = self.prepare_step(slices, shape=shape)
        if prepared is None:
            raise PoolExhaustedError(shortage(self.plane, slices))
        sampled = {s.handle: t for s, t in zip(slices, self.run(prepared)) if t is not None}
        for handle, token in sampled.items():
            self._tokens[handle].append(token.id)
        return sampled

    def _pack(self, pending: Sequence[Handle]) -> list[Slice]:
        """Slices of one prefill step, in order, as many tokens as a step may have."""
        slices: list[Slice] = []
        room = self.max_step_tokens
        for handle in pending:
            left = self._uncached(handle)
            count = left and chunk_tokens(left, room, 1 if self._pinned is None else 2)
            if not count:
                continue
            if not self.runner.can_mix and slices and (count == 1) != (slices[0].num_tokens == 1):
                continue
            slices.append(Slice(handle, self.plane.length(handle), count))
            room -= count
        return slices

    def _uncached(self, handle: Handle) -> int:
        return len(self._known(handle)) - self.plane.length(handle)

    def _known(self, handle: Handle) -> list[int]:
        self.plane.length(handle)  # a stale handle is refused there
        if handle not in self._tokens:
            raise InvalidInputError(f"Runtime: {handle} was not opened by add(); pass its tokens as `known`.")
        return self._tokens[handle]
