"""What a driver refuses before anything runs: requests that are wrong or can never fit, and shapes that are short."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from paged.common.checks import check_int, check_int32_vector, refuse_rows, show
from paged.common.errors import InvalidInputError, PoolExhaustedError
from paged.common.namespace import CacheNamespace
from paged.common.page_table import pages_for
from paged.control.plane import ControlPlane
from paged.control.shapes import FixedShape


def check_tokens(prompt_tokens: Sequence[int] | np.ndarray) -> array[int]:
    """A prompt's ids; raises `InvalidInputError` if there is none or one is negative."""
    tokens = check_int32_vector("submit", "prompt_tokens", prompt_tokens)
    refuse_rows("submit", "prompt_tokens", tokens, tokens < 0, "must not be negative", "token")
    if not tokens.shape[0]:
        raise InvalidInputError("submit.prompt_tokens is empty: there is nothing to continue. Give one token or more.")
    return array("i", tokens.tobytes())


def check_ends(eos: Iterable[int]) -> frozenset[int]:
    """Ids that end a generation."""
    return frozenset(check_int("submit", "eos", token, minimum=0) for token in eos)


def check_namespace(plane: ControlPlane, namespace: CacheNamespace | None) -> None:
    """Raises `InvalidInputError` for what is no namespace, or one over a plane without an index."""
    if namespace is not None and (not isinstance(namespace, CacheNamespace) or plane.prefixes is None):
        raise InvalidInputError(
            f"submit.namespace must be a CacheNamespace, over a plane with prefixes=; got {show(namespace)} over "
            f"{'none' if plane.prefixes is None else 'one'}."
        )


def refuse_too_long(plane: ControlPlane, num_prompt: int, max_tokens: int, most: int) -> None:
    """Raises `PoolExhaustedError` with the arithmetic if a request could need more than `most` cached tokens (H6)."""
    need = num_prompt + max_tokens - 1
    if need <= most:
        return
    layout = plane.layout
    raise PoolExhaustedError(
        f"submit: a prompt of {num_prompt} tokens and {max_tokens} to generate, of which the last is never fed, are "
        f"{need} tokens to cache, {pages_for(need, layout.tokens_per_page)} pages of {layout.tokens_per_page}. A "
        f"request can have {most} here: the pool has {layout.usable_pages} pages ({layout.num_pages} less the "
        f"sentinel), a row of the map {plane.capacity_tokens} tokens. Ask for {need - most} tokens less, or build a "
        f"larger pool."
    )


def refuse_short_shapes(plane: ControlPlane, max_step_tokens: int, max_request_tokens: int) -> None:
    """Refuse now what `plane.shapes` would refuse in the middle of a run: the largest step of such a driver."""
    if plane.shapes is None:
        return
    rows = min(plane.max_requests, max_step_tokens)
    longest = min(max_step_tokens, max_request_tokens)
    pages = rows * pages_for(max_request_tokens, plane.layout.tokens_per_page)
    if plane.prefixes is None:  # otherwise a page may be listed by several
        pages = min(pages, plane.layout.usable_pages)
    plane.shapes.shape_for(FixedShape(rows, max_step_tokens, pages, longest, max_request_tokens))
