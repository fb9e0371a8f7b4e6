"""Deliberately wrong backends, one per known fault: what each breaks, and whether the suite saw it.

Names and clauses only; `conformance.faults` builds them. A mutant must be caught by every case that lists it in its
`kills`, by at least one, and with a diagnosis that names the clause it breaks. A crash or a wrong shape is no catch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from conformance.case import Case, Result


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A named fault: `breaks` says what it does, `clause` what a diagnosis must name."""

    name: str
    clause: str
    breaks: str


MUTANTS: dict[str, Mutant] = {
    m.name: m
    for m in (
        Mutant("double_scale", "attend.2", "multiplies logits by 1/sqrt(head dim) once more"),
        Mutant("no_scale", "attend.2", "uses a scale of 1"),
        Mutant("scale_padded_head_dim", "attend.2", "derives the scale from a padded head dim"),
        Mutant("scale_bf16", "attend.2", "rounds the scale to bfloat16"),
        Mutant("log2e_twice", "attend.2", "multiplies logits by log2 e once too often"),
        Mutant("last_page_len_minus_1", "pages.3", "leaves out the last token of every row"),
        Mutant("last_page_len_plus_1", "attend.7", "reads one slot past the row"),
        Mutant("reads_padding", "attend.7", "reads the last page to its end"),
        Mutant("no_causal_offset", "attend.3", "aligns the causal mask at the top left"),
        Mutant("causal_strict", "attend.3", "hides a token from itself"),
        Mutant("not_causal", "attend.3", "masks nothing"),
        Mutant("window_plus_1", "attend.4", "does not count the token itself in the window"),
        Mutant("window_minus_1", "attend.4", "counts the token itself twice in the window"),
        Mutant("no_window", "attend.4", "ignores the window"),
        Mutant("no_soft_cap", "attend.5", "ignores the soft cap"),
        Mutant("cap_before_scale", "attend.5", "applies the soft cap before the scale"),
        Mutant("no_sinks", "attend.1", "ignores the sinks"),
        Mutant("sinks_scaled", "attend.1", "multiplies the sinks by the scale"),
        Mutant("sink_per_split", "attend.1", "counts the sink once in each of two splits"),
        Mutant("sink_not_rescaled", "attend.1", "lets a sink above the largest logit into the denominator only"),
        Mutant("gqa_modulo", "attend.6", "lets query head h read KV head h mod KV heads"),
        Mutant("v_head0", "attend.6", "takes all values from KV head 0"),
        Mutant("k_as_v", "attend.1", "uses keys as values"),
        Mutant("v_next_slot", "pages.3", "takes the value of the token before"),
        Mutant("sorted_pages", "pages.3", "reads pages in the order of their ids"),
        Mutant("stale_table", "pages.3", "reads the first page where the last is due"),
        Mutant("row0_table", "attend.12", "uses the pages of row 0 for every row"),
        Mutant("page_id_7_bits", "pages.4", "cuts page ids to 7 bits"),
        Mutant("page_id_16_bits", "pages.4", "cuts page ids to 16 bits"),
        Mutant("page_base_missing", "pages.4", "reads layer 0 whatever the layer"),
        Mutant("key_scale_ignored", "attend.14", "ignores the scale of the keys"),
        Mutant("value_scale_ignored", "attend.14", "ignores the scale of the values"),
        Mutant("lse_base2", "attend.11", "returns the LSE to base 2"),
        Mutant("lse_without_max", "attend.11", "returns an LSE that lacks a term"),
        Mutant("empty_row_nan", "attend.8", "returns NaN for an empty row"),
        Mutant("empty_row_lse", "attend.8", "returns +inf as the LSE of an empty row"),
        Mutant("padding_not_zeroed", "attend.9", "leaves another token's output on padding tokens"),
        Mutant("minus_zero", "attend.10", "returns -0 for a computed zero"),
        Mutant("append_padding_wraps", "append.2", "writes padding to the last slot of the pool"),
        Mutant("append_padding_slot0", "append.2", "writes padding to the first slot after the sentinel"),
        Mutant("append_slot_off_by_one", "append.1", "writes every token one slot further"),
        Mutant("append_drops_last", "append.1", "does not write the last token"),
        Mutant("append_head_swapped", "append.1", "writes heads in reverse"),
        Mutant("append_adds", "append.1", "adds to what the slot held"),
        Mutant("append_page_not_looked_up", "append.1", "writes to the next page"),
        Mutant("append_canonicalises_zero", "append.4", "stores -0 as +0"),
        Mutant("append_clears_page", "append.3", "clears the rest of the page"),
        Mutant("append_keys_only", "append.1", "does not write values"),
        Mutant("layer_offset_missing", "append.1", "writes to layer 0 whatever the layer"),
        Mutant("scrub_misses_values", "pages.1", "scrubs keys only"),
        Mutant("scrub_padding_wraps", "pages.1", "scrubs the last row for a padding entry"),
        Mutant("copy_reversed", "pages.2", "copies from target to source"),
        Mutant("copy_in_turn", "pages.2", "reads pages that it has already written"),
        Mutant("nan_times_zero", "attend.7", "multiplies a weight of zero with what lies past the row"),
        Mutant("mask_zero", "attend.7", "gives masked logits 0 instead of minus infinity"),
        Mutant("mask_before_cap", "attend.5", "masks before the soft cap"),
        Mutant("online_max_stale", "attend.1", "never raises the running maximum"),
        Mutant("accumulator_not_rescaled", "attend.1", "does not rescale the accumulator when the maximum rises"),
        Mutant("unweighted_merge", "attend.1", "merges splits without their weights"),
        Mutant("bf16_accumulator", "attend.1", "accumulates in bfloat16"),
        Mutant("p_4_bits", "attend.1", "rounds the weights to 4 bits"),
        Mutant("batch_splits", "invariant.5", "splits a row by the number of rows"),
        Mutant("rung_splits", "invariant.3", "splits a row by the bound on row lengths"),
        Mutant("chunk_splits", "invariant.6", "splits a row by the number of new tokens"),
        Mutant("shard_splits", "invariant.7", "splits a row by the number of heads it sees"),
        Mutant("empty_split_nan", "attend.1", "divides zero by zero where a split of a row sees no token"),
        Mutant("full_last_page_empty", "pages.3", "takes a last page that is full for empty"),
        Mutant("power_of_two_short", "pages.3", "leaves out the last token of rows of 2^k tokens"),
        Mutant("prefix_ignored", "attend.3", "lets a chunk of a prompt see its own tokens only"),
        Mutant("rows_without_tokens_shift", "attend.12", "counts rows without the ones that have no new token"),
        Mutant("short_row_zero", "attend.1", "returns zeros for rows shorter than a page"),
        Mutant("page_over_128", "pages.3", "counts the slots of a page modulo 128"),
        Mutant("head_dim_cut", "attend.2", "leaves out of q·k what does not fill a tile of 64"),
        Mutant("window_last_of_group", "attend.4", "gives the last head of a group a smaller window"),
        Mutant("lse_base2_under_cap", "attend.11", "returns the LSE to base 2 where there is a soft cap"),
        Mutant("lse_negated", "attend.11", "returns the LSE with the wrong sign"),
        Mutant("key_scale_twice", "attend.14", "applies the scale of the keys twice"),
        Mutant("value_scale_twice", "attend.14", "applies the scale of the values twice"),
        Mutant("fnuz_as_fn", "attend.14", "takes the bytes of an fnuz type for those of its sibling"),
        Mutant("kept_page_list", "steps.1", "uses the page list of the call before"),
        Mutant("kept_lengths", "steps.1", "uses the row lengths of the call before"),
        Mutant("kept_pages", "steps.1", "attends to what the pool held at the call before"),
        Mutant("shared_page_once", "steps.2", "lets only one of several rows read a page that they share"),
        Mutant("shard_heads_turned", "sharded.1", "returns the heads of all shards but the first in reverse"),
        Mutant("replica_drifts", "sharded.2", "writes other keys on the copies of a shard"),
        Mutant("gathers_heads", "sharded.3", "adds up over the head axis between append and attention"),
        Mutant("gathers_pool", "sharded.3", "gathers all heads of the pool on every device and reads its own"),
        Mutant("reduces_over_heads", "sharded.3", "takes the maximum of its LSE over all heads of all devices"),
        Mutant("append_new_pool", "sharded.4", "appends to a pool of its own making and lets go of the one given"),
        Mutant("nondeterministic", "invariant.1", "sums in another order every other time"),
    )
}

GATED: dict[str, tuple[str, ...]] = {
    "single": (
        *("double_scale", "scale_bf16", "last_page_len_minus_1", "reads_padding"),
        *("window_plus_1", "window_minus_1", "no_window", "window_last_of_group"),
        *("no_soft_cap", "cap_before_scale", "mask_before_cap", "lse_base2_under_cap"),
        *("no_sinks", "sinks_scaled", "sink_per_split", "sink_not_rescaled"),
        *("key_scale_ignored", "value_scale_ignored", "key_scale_twice", "fnuz_as_fn"),
        *("gqa_modulo", "v_next_slot", "sorted_pages", "stale_table", "row0_table", "page_base_missing"),
        *("page_id_16_bits", "shared_page_once", "rows_without_tokens_shift", "full_last_page_empty"),
        *("lse_base2", "empty_row_lse", "padding_not_zeroed", "nan_times_zero", "accumulator_not_rescaled"),
        *("append_slot_off_by_one", "append_padding_wraps", "append_keys_only"),
    ),
    "several": ("no_window", "no_soft_cap", "append_slot_off_by_one"),
    "single_narrow": ("double_scale", "no_window"),
    "single_wide_page": ("value_scale_twice", "no_soft_cap"),
    "single_long": ("unweighted_merge", "no_window"),
    "single_row": ("window_plus_1",),
    "single_8_bit": ("no_sinks", "no_soft_cap"),
    "single_window": ("no_soft_cap", "no_sinks"),
}
"""Which steps a fault is confined to, see `conformance.faults_gated` -> faults that are mutants of their own so."""

_ONLY = {
    "single": "in steps of single tokens only",
    "several": "only where a row may feed several tokens",
    "single_narrow": "in steps of single tokens with fewer than 128 elements a head",
    "single_wide_page": "in steps of single tokens with pages of 64 tokens or more",
    "single_long": "in steps of single tokens whose rows may have more than 512",
    "single_row": "in steps of one token in all",
    "single_8_bit": "in steps of single tokens over pools of 8 bits",
    "single_window": "in steps of single tokens with a window",
}


def _confined(name: str, gate: str) -> Mutant:
    found = MUTANTS[name]
    return Mutant(f"{name}_{gate}", found.clause, f"{found.breaks}, {_ONLY[gate]}")


MUTANTS.update((m.name, m) for gate, names in GATED.items() for m in [_confined(name, gate) for name in names])


def verdicts(names: Sequence[str], runs: Iterable[tuple[str, Case, Result]]) -> dict[str, list[str]]:
    """Mutant -> what is wrong with how the suite saw it; an empty list is a catch.

    `runs` are (mutant, case, result) for every case that lists the mutant.
    """
    out: dict[str, list[str]] = {name: [] for name in names}
    seen = set()
    for name, case, result in runs:
        seen.add(name)
        clause = MUTANTS[name].clause
        if result.status != "fail":
            why = f": {result.diagnosis}" if result.diagnosis else ""
            out[name].append(f"survived {case.id}, which lists it ({result.status}{why})")
        elif result.clause != clause:
            out[name].append(f"{case.id} names {result.clause} and not {clause}: {result.diagnosis}")
    for name in out:
        if name not in seen:
            out[name].append("no case lists it")
    return out
