"""Tier 4: a backend against itself. Each relation turns one problem into others whose outputs must have the same bits.

No relation can see an error that both sides share, so none stands alone: tiers 1 to 3 are the absolute anchors.
`repeat`, `relabel`, `poison`, `padding`, `table_tail` and `warm` bind everyone. `rung`, `batch`, `chunk`, `shard` and
`masked_nan` bind on generic data only where they are promised; on exact vectors, whose bits every honest kernel gives,
they bind everyone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from conformance.case import AttendProblem
from conformance.execute import VllmMetadata, finite, poison_word
from conformance.formats import format_of, quiet
from conformance.stream import Stream
from conformance.vectors import owned_slots
from paged.common import Capabilities, PageTable, pages_for
from paged.common.errors import InvalidInputError

PADDING = -1


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Axis -> size, and the axes over which KV heads lie."""

    sizes: Mapping[str, int]
    kv_axes: tuple[str, ...]

    def __str__(self) -> str:
        sizes = " × ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"{' and '.join(self.kv_axes)} of a mesh {sizes}"


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One attend call: the problem, the base's token of each of its tokens (`PADDING` for a token that is padding),
    and where it runs."""

    problem: AttendProblem
    tokens: np.ndarray
    vllm: VllmMetadata | None = None
    mesh: Mesh | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """Calls whose outputs together must be the base's. `what` ends the sentence "the bits moved when …"."""

    what: str
    calls: tuple[Call, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Relation:
    """A base call and the variants that must agree with it."""

    base: Call
    variants: tuple[Variant, ...]


Builder = Callable[[AttendProblem, Stream, Capabilities, Mapping[str, Any]], Relation]
RELATIONS: dict[str, Builder] = {}
"""Name in a case's parameter `relation` -> builder. A closed list."""


def build(
    name: str,
    case_id: str,
    problem: AttendProblem,
    capabilities: Capabilities,
    options: Mapping[str, Any] | None = None,
) -> Relation:
    """The relation `name` over `problem`; whatever it draws at random is keyed by the case's id."""
    if name not in RELATIONS:
        raise InvalidInputError(f"params.relation must be one of {', '.join(sorted(RELATIONS))}; got {name!r}.")
    return RELATIONS[name](problem, Stream(case_id, f"relation {name}"), capabilities, options or {})


def _relation(builder: Builder) -> Builder:
    RELATIONS[builder.__name__.lstrip("_")] = builder
    return builder


def _same(problem: AttendProblem, **where: Any) -> Call:
    """A call whose tokens are the base's, one for one."""
    return Call(problem, np.arange(problem.table.num_tokens), **where)


@_relation
def repeat(problem, draw, capabilities, options) -> Relation:
    """The same call again, twice (invariant.1)."""
    again = Variant("the same call was made again", (_same(problem),))
    return Relation(_same(problem), (again, again))


@_relation
def relabel(problem, draw, capabilities, options) -> Relation:
    """Physical pages renumbered, contents and table with them (invariant.2): at random, and in reverse."""
    pages = problem.table.num_pages
    orders = {
        "physical pages were renumbered at random": 1 + draw.permutation(pages - 1),
        "physical pages were numbered in reverse": np.arange(pages - 1, 0, -1),
    }
    variants = [
        Variant(what, (_same(renumber(problem, np.concatenate([[0], order]))),)) for what, order in orders.items()
    ]
    return Relation(_same(problem), tuple(variants))


@_relation
def poison(problem, draw, capabilities, options) -> Relation:
    """Other bits in every slot that must not be read (attend.7), and large finite ones in slots that masks hide."""
    variants = []
    if capabilities.poison == "any_bits":
        noise = [random_words(draw, x.shape, problem.kv_dtype) for x in (problem.keys, problem.values)]
        variants.append(
            Variant("unowned slots held random bits, NaN and infinities included", (_spoil(problem, noise),))
        )
    huge = [np.full_like(x, format_of(problem.kv_dtype).max_word) for x in (problem.keys, problem.values)]
    variants.append(Variant("unowned slots held the largest finite value", (_spoil(problem, huge),)))
    zero = [np.zeros_like(x) for x in (problem.keys, problem.values)]
    variants.append(Variant("unowned slots held zeros", (_spoil(problem, zero),)))
    hidden = ~visible_slots(problem) & owned_slots(problem)
    if hidden.any():
        masked = dataclasses.replace(problem, **_fill(problem, hidden, huge))
        variants.append(Variant("slots hidden by a mask held the largest finite value", (_same(masked),)))
    return Relation(_same(problem), tuple(variants))


@_relation
def masked_nan(problem, draw, capabilities, options) -> Relation:
    """NaN in slots of the row that causality or the window hides: promised by few (`masked_nan`)."""
    hidden = ~visible_slots(problem) & owned_slots(problem)
    if not hidden.any():
        raise InvalidInputError("masked_nan needs a case in which a mask hides a slot from every token.")
    nan = [np.full_like(x, format_of(problem.kv_dtype).nan) for x in (problem.keys, problem.values)]
    spoilt = dataclasses.replace(problem, **_fill(problem, hidden, nan))
    return Relation(_same(problem), (Variant("slots hidden by a mask held NaN", (_same(spoilt),)),))


@_relation
def padding(problem, draw, capabilities, options) -> Relation:
    """Padding rows, tokens and page-list entries added, alone and together (invariant.3, attend.9).

    More of them is another rung, for which a kernel may split rows in other ways: that is held against those alone who
    promise `batch_invariant`. Of the others it is asked at one rung: what padding tokens hold changes nothing.
    """
    table = problem.table
    more = {"rows": 3, "tokens": 5, "listed_pages": 7}
    have = {"rows": table.num_rows, "tokens": table.num_tokens, "listed_pages": len(table.page_ids)}

    def padded(names) -> Call:
        sizes = {name: have[name] + (more[name] if name in names else 0) for name in have}
        wider = table.pad(**sizes, max_query_len=table.max_query_len, max_kv_len=table.max_kv_len)
        extra = sizes["tokens"] - have["tokens"]
        junk = random_words(draw, (extra, *problem.query.shape[1:]), problem.dtype)
        query = np.concatenate([problem.query, finite(junk, problem.dtype)])
        tokens = np.concatenate([np.arange(have["tokens"]), np.full(extra, PADDING)])
        return Call(dataclasses.replace(problem, table=wider, query=query), tokens)

    kinds = (("tokens",), ("rows", "tokens", "listed_pages"))
    if "batch_invariant" in capabilities.promises:
        base = _same(problem)
        variants = [(f"padding was added ({', '.join(names).replace('_', ' ')})", padded(names)) for names in kinds]
    else:
        base = padded(kinds[1])
        variants = [("padding tokens held something else", padded(kinds[1]))]
    return Relation(base, tuple(Variant(what, (call,)) for what, call in variants))


@_relation
def rung(problem, draw, capabilities, options) -> Relation:
    """The same step compiled for longer rows: host bounds on lengths change no bit (promise batch_invariant)."""
    table = problem.table
    longer = table.pad(
        rows=table.num_rows,
        tokens=table.num_tokens,
        listed_pages=len(table.page_ids),
        max_query_len=2 * table.max_query_len + 1,
        max_kv_len=4 * table.max_kv_len,
    )
    variant = Variant("the bounds on row lengths were raised", (_same(dataclasses.replace(problem, table=longer)),))
    return Relation(_same(problem), (variant,))


@_relation
def table_tail(problem, draw, capabilities, options) -> Relation:
    """vLLM-shaped metadata whose table entries past a row's pages name anything at all (invariant.3, attend.7)."""
    table = problem.table
    base = _same(problem, vllm=vllm_metadata(table, np.zeros(0, np.int32), draw))
    tails = {
        "table entries past the used pages named live pages of others": table.page_ids[: table.page_offsets[-1]],
        "table entries past the used pages were out of range": np.array([-1, 2**31 - 1, -(2**31), table.num_pages]),
    }
    variants = [
        Variant(what, (_same(problem, vllm=vllm_metadata(table, np.asarray(tail, np.int32), draw)),))
        for what, tail in tails.items()
    ]
    return Relation(base, tuple(variants))


@_relation
def warm(problem, draw, capabilities, options) -> Relation:
    """Two requests with one prefix: each on pages of its own, then the second on pages the first filled (invariant.4).

    Only whole pages that neither request writes in this step are shared, so the plan is the same.
    """
    cold, shared = _with_common_prefix(problem)
    table = cold.table
    ids = np.array(table.page_ids)
    first, second = (int(table.page_offsets[r]) for r in shared.rows)
    ids[second : second + shared.pages] = ids[first : first + shared.pages]
    reused = dataclasses.replace(cold, table=dataclasses.replace(table, page_ids=ids))
    what = "a row's prefix lay in pages that another request had filled"
    return Relation(_same(cold), (Variant(what, (_same(reused),)),))


@_relation
def batch(problem, draw, capabilities, options) -> Relation:
    """Each row alone, rows in another order, and half of the rows (invariant.5)."""
    lens = problem.table.query_lens
    rows = np.flatnonzero(lens > 0)
    order = rows[np.roll(draw.permutation(len(rows)), 1)]
    alone = [cut(problem, [(int(r), 0, int(lens[r]))]) for r in rows]
    turned = cut(problem, [(int(r), 0, int(lens[r])) for r in order])
    half = cut(problem, [(int(r), 0, int(lens[r])) for r in rows[::2]])
    variants = (
        Variant("each row ran alone", pad_alike(alone)),
        Variant("the rows ran in another order", pad_alike([turned], problem.table)),
        Variant("every other row was left out", pad_alike([half], problem.table)),
    )
    return Relation(_same(problem), variants)


@_relation
def chunk(problem, draw, capabilities, options) -> Relation:
    """Every row's new tokens in steps of a few (invariant.6), later tokens not yet written."""
    lens = problem.table.query_lens
    word = poison_word(problem.kv_dtype, capabilities.poison)
    later = [np.full_like(x, word) for x in (problem.keys, problem.values)]
    variants = []
    for size in options.get("chunks", [1, 4]):
        calls = []
        for begin in range(0, int(lens.max()), size):
            pieces = [(r, begin, min(begin + size, int(q))) for r, q in enumerate(lens) if q > begin]
            step = cut(problem, pieces)
            calls.append(Call(_spoil(step.problem, later).problem, step.tokens))
        variants.append(Variant(f"the new tokens came in steps of {size}", pad_alike(calls)))
    return Relation(_same(problem), tuple(variants))


def pad_alike(calls: Sequence[Call], table: PageTable | None = None) -> tuple[Call, ...]:
    """The calls padded to one rung, so that they share a program: the largest among them, or that of `table`."""
    tables = [call.problem.table for call in calls] if table is None else [table]
    rung = {
        "rows": max(t.num_rows for t in tables),
        "tokens": max(t.num_tokens for t in tables),
        "listed_pages": max(len(t.page_ids) for t in tables),
        "max_query_len": max(t.max_query_len for t in tables),
        "max_kv_len": max(t.max_kv_len for t in tables),
    }
    out = []
    for call in calls:
        missing = rung["tokens"] - call.problem.table.num_tokens
        query = np.pad(call.problem.query, ((0, missing), (0, 0), (0, 0)))
        padded = dataclasses.replace(call.problem, table=call.problem.table.pad(**rung), query=query)
        out.append(
            dataclasses.replace(call, problem=padded, tokens=np.pad(call.tokens, (0, missing), constant_values=PADDING))
        )
    return tuple(out)


@_relation
def shard(problem, draw, capabilities, options) -> Relation:
    """KV heads laid over 2, 4 and 8 devices, on meshes of one, two and three axes, under two namings (invariant.7)."""
    heads = problem.keys.shape[2]
    meshes = [Mesh({"tensor": n}, ("tensor",)) for n in (2, 8) if heads % n == 0]
    if heads % 4 == 0:
        meshes.append(Mesh({"tensor": 4, "fsdp": 2}, ("tensor",)))
        meshes.append(Mesh({"data": 2, "expert": 2, "model": 2}, ("model", "expert")))
    variants = [Variant(f"heads lay over {m}", (_same(problem, mesh=m),)) for m in meshes]
    return Relation(_same(problem), tuple(variants))


def renumber(problem: AttendProblem, new_id: np.ndarray) -> AttendProblem:
    """The problem with physical page p of every layer moved to `new_id[p]`."""
    table = problem.table
    pages, size = table.num_pages, table.tokens_per_page
    order = (np.arange(problem.num_layers)[:, None] * pages + np.argsort(new_id)[None, :]).reshape(-1)
    slots = np.array(table.write_slots)
    live = slots >= 0
    slots[live] = new_id[slots[live] // size] * size + slots[live] % size
    moved = dataclasses.replace(table, page_ids=new_id[table.page_ids], write_slots=slots)
    return dataclasses.replace(problem, table=moved, keys=problem.keys[order], values=problem.values[order])


def visible_slots(problem: AttendProblem) -> np.ndarray:
    """(pool rows, slots) of those that at least one token sees through the masks."""
    table, spec = problem.table, problem.spec
    visible = np.zeros(problem.keys.shape[:2], bool)
    base, size = problem.layer * table.num_pages, table.tokens_per_page
    for row in range(table.num_rows):
        n, q = int(table.kv_lens[row]), int(table.query_lens[row])
        if n == 0 or q == 0:
            continue
        first = 0 if spec.window is None else max(0, n - q - spec.window + 1)
        position = np.arange(first, n)
        visible[base + table.pages_of(row)[position // size], position % size] = True
    return visible


def _fill(problem: AttendProblem, where: np.ndarray, words: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    keys, values = (
        np.where(where[..., None, None], new, old) for new, old in zip(words, (problem.keys, problem.values))
    )
    return {"keys": keys, "values": values}


def _spoil(problem: AttendProblem, words: Sequence[np.ndarray]) -> Call:
    """The problem with other words wherever nothing may be read; sentinel pages stay finite."""
    elsewhere = ~owned_slots(problem)
    sentinels = np.arange(problem.num_layers) * problem.table.num_pages
    filled = _fill(problem, elsewhere, words)
    for name, array in filled.items():
        array[sentinels] = finite(array[sentinels], problem.kv_dtype)
        filled[name] = array
    return _same(dataclasses.replace(problem, **filled))


def unpoisoned(problem: AttendProblem) -> AttendProblem:
    """The problem with zeros in every slot that must not be read."""
    return _spoil(problem, [np.zeros_like(x) for x in (problem.keys, problem.values)]).problem


def random_words(draw: Stream, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Any bits at all; signalling NaNs are made quiet, which a typed pool may do by itself."""
    found = format_of(dtype)
    return quiet((draw.words(shape) & np.uint64((1 << found.bits) - 1)).astype(found.word_type), dtype)


def cut(problem: AttendProblem, pieces: Sequence[tuple[int, int, int]]) -> Call:
    """The step in which row r runs its new tokens begin .. end only, for each (r, begin, end), rows in that order."""
    table, size = problem.table, problem.table.tokens_per_page
    starts, lens, kv = table.query_offsets, table.query_lens, table.kv_lens
    tokens = [np.arange(starts[r] + begin, starts[r] + end) for r, begin, end in pieces]
    kv_lens = np.array([kv[r] - lens[r] + end if kv[r] else 0 for r, _, end in pieces])
    pages = [table.pages_of(r)[: pages_for(n, size)] for (r, _, _), n in zip(pieces, kv_lens.tolist())]
    query_lens = np.array([end - begin for _, begin, end in pieces])
    index = np.concatenate(tokens)
    part = PageTable(
        query_offsets=np.concatenate([[0], np.cumsum(query_lens)]),
        page_offsets=np.concatenate([[0], np.cumsum([len(p) for p in pages])]),
        page_ids=np.concatenate([*pages, np.zeros(0, np.int32)]),
        last_page_len=np.where(kv_lens > 0, kv_lens - size * (np.maximum(pages_for(kv_lens, size), 1) - 1), 0),
        kv_lens=kv_lens,
        write_slots=table.write_slots[index],
        max_query_len=int(query_lens.max(initial=0)),
        max_kv_len=int(kv_lens.max(initial=0)),
        tokens_per_page=size,
        num_pages=table.num_pages,
    )
    return Call(dataclasses.replace(problem, table=part, query=problem.query[index]), index)


def vllm_metadata(table: PageTable, tail: np.ndarray, draw: Stream) -> VllmMetadata:
    """The table in vLLM's shape, two entries wider than needed; entries past a row's pages are drawn from `tail`."""
    counts = np.diff(table.page_offsets)
    width = int(counts.max(initial=0)) + 2
    shape = (table.num_rows, width)
    tables = draw.choice(tail, shape) if len(tail) else np.zeros(shape, np.int32)
    for row in range(table.num_rows):
        tables[row, : counts[row]] = table.pages_of(row)
    return VllmMetadata(tables.astype(np.int32), np.array(table.kv_lens), np.array(table.query_offsets))


@dataclasses.dataclass(frozen=True)
class _Shared:
    rows: tuple[int, int]
    pages: int


def _with_common_prefix(problem: AttendProblem) -> tuple[AttendProblem, _Shared]:
    """The problem with the longest whole-page prefix of one row copied into another's, and which rows those are."""
    table, size = problem.table, problem.table.tokens_per_page
    whole = (table.kv_lens - table.query_lens) // size
    order = np.argsort(-whole, kind="stable")[:2]
    if len(order) < 2 or whole[order].min() < 1:
        raise InvalidInputError("warm needs two rows with a whole page before their new tokens.")
    first, second = sorted(int(r) for r in order)
    count = int(whole[[first, second]].min())
    base = problem.layer * table.num_pages
    source, target = (base + table.pages_of(r)[:count] for r in (first, second))
    keys, values = np.array(problem.keys), np.array(problem.values)
    keys[target], values[target] = keys[source], values[source]
    return dataclasses.replace(problem, keys=keys, values=values), _Shared((first, second), count)
