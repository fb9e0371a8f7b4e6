"""The clauses of docs/semantics.md in a line each, for whoever reads a failure without the document at hand.

The document is what binds; a test holds that this list has exactly its clauses.
"""

from __future__ import annotations

from collections.abc import Mapping

CLAUSES: Mapping[str, str] = {
    "append.1": "a token is stored at its write slot, bit for bit",
    "append.2": "a padding token changes nothing outside the sentinel pages",
    "append.3": "nothing else changes: other pages, layers and slots",
    "append.4": "movement computes nothing: −0, subnormals, infinities and NaN stay",
    "append.5": "append comes before the attention of the same step",
    "pages.1": "scrub sets the named pages to +0 and changes nothing else",
    "pages.2": "copy_pages makes targets equal to what the sources were before",
    "pages.3": "position j lives in listed page j // tokens_per_page, slot j mod tokens_per_page",
    "pages.4": "page ids have their full width; layer offset and addresses do not wrap",
    "attend.1": "the output is Σ softmax(logits) · v, a sink adding to the sum only, rounded once",
    "attend.2": "a logit is scale · (q · k) over all elements, the scale applied exactly once",
    "attend.3": "the causal mask is bottom-right aligned and includes the token itself",
    "attend.4": "a window W leaves the last W positions, the token's own included",
    "attend.5": "the soft cap c · tanh(s / c) comes after the scale and before the mask",
    "attend.6": "query head h reads KV head h // group, keys and values alike",
    "attend.7": "what lies past a row's length or outside its pages is never read",
    "attend.8": "an empty row gives +0 and LSE −∞",
    "attend.9": "padding tokens give +0 and LSE −∞",
    "attend.10": "a computed zero is +0",
    "attend.11": "the LSE is ln Z with the sink's term, rounded once to float32",
    "attend.12": "a row sees its own keys and values alone",
    "attend.13": "without causality a token sees positions 0 .. n − 1, cut by the window",
    "attend.14": "an 8-bit element is its dtype's number times its scale, applied once",
    "steps.1": "nothing is kept from an earlier step, layer or owner of a page",
    "steps.2": "rows that list the same pages each read them as their own",
    "steps.3": "a request placed, cut or shared otherwise has the same outputs",
    "invariant.1": "the same call on the same bits gives the same bits",
    "invariant.2": "renumbering physical pages changes no bit",
    "invariant.3": "padding changes no bit of the others",
    "invariant.4": "a prefix filled by another request gives the bits of one's own",
    "invariant.5": "neighbours and their order change no bit (batch_invariant)",
    "invariant.6": "the cut of a prompt into steps changes no bit (chunk_invariant)",
    "invariant.7": "the number of shards changes no bit (shard_invariant)",
    "sharded.1": "on any mesh append and attend mean what they mean on one device",
    "sharded.2": "copies of the pool stay equal on axes that shard no heads",
    "sharded.3": "no collective runs in a layer's append, in its attention or between them",
    "sharded.4": "the pool's buffers keep their addresses through a step",
    "sharded.5": "a head axis over more devices than KV heads is refused",
    "refuse.1": "what is outside the declaration is refused by name, never ignored",
}


def said(clause: str | None) -> str:
    """A clause with its line, e.g. `attend.10: a computed zero is +0`; empty for None."""
    if clause is None:
        return ""
    text = CLAUSES.get(clause)
    return clause if text is None else f"{clause}: {text}"
