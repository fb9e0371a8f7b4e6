"""Traces: many steps over one pool, as an engine runs them, every step predicted or bounded like a single call.

What a token holds depends on whose token it is, its position and its layer, never on where it lies: a prompt that is
computed again on other pages, in other chunks, over a prefix that another request filled or behind a fork holds the
same keys and values and asks the same queries. Two families:

- `address`: as `conformance.vectors.address`, but a value spells request, position, KV head and layer;
- `generic`: normal numbers, judged by interval.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.case import AttendProblem
from conformance.formats import encode
from conformance.stream import Stream
from conformance.vectors.address import GAP, digit_base
from conformance.vectors.params import (
    ATTEND,
    MAX_LOGITS,
    MAX_POOL_ELEMENTS,
    RUNG,
    Param,
    one_of,
    optional,
    refuse,
    several,
    validate,
)
from conformance.vectors.pools import poison_words, sinks_of, spec_of, visible_range
from conformance.vectors.script import MAX_LETTERS, Engine, Row, Step, parse
from conformance.vectors.vector import Facts, Operation, Trace, TraceStep, Vector
from paged.common import PageTable, build_page_table
from paged.common.errors import InvalidInputError

_DROPPED = ("query_lens", "kv_lens", "page_order", "share", "layer", "causal", "rung")
SCHEMA = {
    **{name: param for name, param in ATTEND.items() if name not in _DROPPED},
    "layer": ATTEND["layer"],
    "rung": dataclasses.replace(ATTEND["rung"], default=...),
    "family": Param(one_of("address", "generic")),
    "reuse": Param(one_of("scrub", "poison", "stale"), "scrub"),
    "script": Param(parse),
    "ladder": Param(optional(several(RUNG, most=8)), None),
}
FIELDS = ("request", "position", "head", "layer")


def trace(case_id: str, params: Mapping[str, Any], poison: str) -> Vector:
    """The steps of `params.script`, see `conformance.vectors.script`.

    `reuse` says what a freed page holds until its next owner writes: `poison`; `stale`, the bits of its last owner; or
    `scrub`, zeros, the backend's `scrub` having cleared it before the step.

    Every step is padded to the first rung of `ladder` that holds it, as an engine chooses its programs, and to `rung`
    if none does; without a ladder all have the one shape. Only a step whose rows feed one token each, or none, fits a
    rung with `max_query_len` 1.
    """
    p = validate(params, SCHEMA)
    refuse(p, "a trace", "value_head_dim")
    if p["rung"] is None:
        raise InvalidInputError("params.rung must be given: an engine's steps share a shape.")
    for i, rung in enumerate(p["ladder"] or ()):
        for name, most in p["rung"].items():
            if rung[name] > most:
                raise InvalidInputError(f"params.ladder[{i}].{name} = {rung[name]} is above params.rung's, {most}.")
    return Vector(family="trace", problem=_Trace(case_id, {**p, "causal": True}, poison).play())


class _Trace:
    def __init__(self, case_id: str, p: dict[str, Any], poison: str):
        self.id, self.p, self.poison = case_id, p, poison
        self.kv_dtype = p["kv_dtype"] or p["dtype"]
        self.shape = p["layers"] * p["num_pages"], p["page"], p["kv_heads"], p["head_dim"]
        self.pools = []
        for name in ("keys", "values"):
            pool = poison_words(Stream(case_id, f"poison {name}"), self.shape, self.kv_dtype, poison)
            sentinels = pool[:: p["num_pages"]]
            sentinels[...] = poison_words(Stream(case_id, f"sentinel {name}"), sentinels.shape, self.kv_dtype, "finite")
            self.pools.append(pool)
        self.longest = p["rung"]["max_kv_len"]
        self.tokens: dict[tuple[str, int], Any] = {}
        self.address = _Address(p, self.kv_dtype, self.longest) if p["family"] == "address" else None

    def play(self) -> Trace:
        """All steps."""
        p = self.p
        first = [pool.copy() for pool in self.pools]
        engine = Engine(p["page"], (1 + Stream(self.id, "pages").permutation(p["num_pages"] - 1)).tolist())
        plans = [engine.step(text, f"params.script[{i}]") for i, text in enumerate(p["script"])]
        seen = sum(row.fed * row.length for plan in plans for row in plan.rows) * p["q_heads"] * p["layers"]
        held = int(np.prod(self.shape)) * len(plans) * p["layers"]
        for what, count, most in (("logits", seen, MAX_LOGITS), ("snapshots", held, 4 * MAX_POOL_ELEMENTS)):
            if count > most:
                raise InvalidInputError(f"params.script: {count} {what} in all, at most {most}. Use a shorter script.")
        steps = tuple(self._step(plan, i) for i, plan in enumerate(plans))
        return Trace(dtype=p["dtype"], kv_dtype=self.kv_dtype, num_layers=p["layers"], num_pages=p["num_pages"],
                     keys=first[0], values=first[1], steps=steps)  # fmt: skip

    def _step(self, plan: Step, index: int) -> TraceStep:
        p = self.p
        operations = self._between(plan, index)
        table = build_page_table(
            query_lens=[row.fed for row in plan.rows],
            kv_lens=[row.length for row in plan.rows],
            pages=[list(row.pages) for row in plan.rows],
            tokens_per_page=p["page"],
            num_pages=p["num_pages"],
        )
        table = table.pad(**_rung_of(p, table))
        layers = tuple(self._layer(plan, table, layer, index) for layer in range(p["layers"]))
        names = [row.request.key(i) for row in plan.rows for i in range(row.length - row.fed, row.length)]
        return TraceStep(text=plan.text, operations=operations, layers=layers, tokens=tuple(names))

    def _between(self, plan: Step, index: int) -> tuple[Operation, ...]:
        """What happens to pages before the step; the pool follows."""
        rows = np.arange(self.p["layers"])[:, None] * self.p["num_pages"]
        out = []
        if self.p["reuse"] == "poison" and plan.freed:
            pages = (rows + np.array(plan.freed)).ravel()
            words = []
            for name, pool in zip(("keys", "values"), self.pools):
                stream = Stream(self.id, f"freed {name} {index}")
                words.append(poison_words(stream, (len(pages), *self.shape[1:]), self.kv_dtype, self.poison))
                pool[pages] = words[-1]
            out.append(Operation("write", pages, keys=words[0], values=words[1]))
        copied = np.array(plan.copied, np.int64).reshape(-1, 2)
        fresh = np.setdiff1d(np.array(plan.taken, np.int64), copied[:, 1])
        if self.p["reuse"] == "scrub" and len(fresh):
            pages = (rows + fresh).ravel()
            for pool in self.pools:
                pool[pages] = 0
            out.append(Operation("scrub", pages))
        if len(copied):
            source, target = ((rows + copied[:, i]).ravel() for i in (0, 1))
            for pool in self.pools:
                pool[target] = pool[source]
            out.append(Operation("copy_pages", target, source=source))
        return tuple(out)

    def _layer(self, plan: Step, table: PageTable, layer: int, index: int) -> Vector:
        p, spec = self.p, spec_of(self.p)
        shape = table.num_tokens, p["q_heads"], p["head_dim"]
        query = poison_words(Stream(self.id, f"poison query {index} {layer}"), shape, p["dtype"], "finite")
        answer = np.zeros(shape)
        target = np.full(shape[:2], -1)
        at = 0
        for r, row in enumerate(plan.rows):
            for position in range(row.length - row.fed, row.length):
                keys, values, queries = self._tokens(row.request.origin(position), layer)
                page = layer * p["num_pages"] + row.pages[position // p["page"]]
                self.pools[0][page, position % p["page"]] = keys[position]
                self.pools[1][page, position % p["page"]] = values[position]
                if self.address is None:
                    query[at] = queries[position]
                else:
                    window = visible_range(table, r, position, spec)
                    query[at], answer[at], target[at] = self._asked(row, layer, position, *window)
                at += 1
        problem = AttendProblem(
            dtype=p["dtype"],
            kv_dtype=self.kv_dtype,
            table=table,
            spec=spec,
            query=query,
            keys=self.pools[0].copy(),
            values=self.pools[1].copy(),
            num_layers=p["layers"],
            layer=layer,
            sinks=sinks_of(self.id, p),
            key_scale=p["key_scale"],
            value_scale=p["value_scale"],
        )
        if self.address is None:
            return Vector(family="generic", problem=problem)
        scale = p["value_scale"] or 1.0
        words = encode(answer * scale, p["dtype"])
        origins = [[row.request.origin(j) for j in range(row.length)] for row in plan.rows]
        explain = {"fields": self.address.fields, "base": self.address.base, "target": target, "value_scale": scale}
        return Vector(
            family="trace",
            problem=problem,
            predicted=(words, words),
            facts=Facts(exact_logits=True),
            explain={**explain, "origins": origins},
        )

    def _tokens(self, letter: str, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Words of all keys, values and (generic) queries that a request may ever have in a layer."""
        if (letter, layer) not in self.tokens:
            p = self.p
            n, kv, q = self.longest, (p["kv_heads"], p["head_dim"]), (p["q_heads"], p["head_dim"])
            if self.address is None:
                draw = Stream(self.id, f"request {letter} layer {layer}")
                keys, values, queries = (draw.normal((n, *each)) for each in (kv, kv, q))
                keys, values = keys / (p["key_scale"] or 1.0), values / (p["value_scale"] or 1.0)
            else:
                keys = self.address.keys(p["kv_heads"])
                values, queries = self.address.values(letter, layer, p["kv_heads"]), np.zeros((n, *q))
            found = encode(keys, self.kv_dtype), encode(values, self.kv_dtype), encode(queries, p["dtype"])
            self.tokens[letter, layer] = found
        return self.tokens[letter, layer]

    def _asked(self, row: Row, layer: int, position: int, first: int, end: int) -> tuple[Any, Any, Any]:
        """Query words, answers and target positions of one token, by head: edges mostly, as in an address vector."""
        assert self.address is not None
        p = self.p
        draws = Stream(self.id, f"target {row.request.key(position)} {layer}").words(p["q_heads"])
        border = (end - 1) // p["page"] * p["page"]
        queries, answers, targets = [], [], []
        for head in range(p["q_heads"]):
            anywhere = first + int(draws[head] % np.uint64(end - first))
            edges = (end - 1, first, border, border - 1, (first + end - 1) // 2, anywhere)
            j = min(max(edges[(position + head) % len(edges)], first), end - 1)
            kv_head = head // (p["q_heads"] // p["kv_heads"])
            queries.append(self.address.query(j))
            answers.append(self.address.values(row.request.origin(j), layer, p["kv_heads"])[j, kv_head])
            targets.append(j)
        return encode(np.stack(queries), p["dtype"]), np.stack(answers), np.array(targets)


class _Address:
    """Keys that spell a position, queries that ask for one, values that spell whose token it is."""

    def __init__(self, p: Mapping[str, Any], kv_dtype: str, longest: int):
        d = p["head_dim"]
        width = max(4, int(longest - 1).bit_length())
        repeats = d // (2 * width)
        if repeats == 0:
            raise InvalidInputError(f"params.head_dim = {d} cannot address {longest} tokens: it takes {2 * width}.")
        if p["sinks"] is not None or p["soft_cap"] is not None:
            raise InvalidInputError("params.sinks and params.soft_cap must be absent from traces of addresses.")
        self.d, self.base, self.longest = d, digit_base(kv_dtype), longest
        scale = float(np.float32(p["scale"])) * (p["key_scale"] or 1.0)
        self.used = width * repeats
        self.amplitude = 2.0 ** np.ceil(np.log2(np.sqrt(GAP / (2 * repeats * scale))))
        bits = (np.arange(longest)[:, None] >> np.arange(width)) & 1
        self.code = np.repeat(1.0 - 2.0 * bits, repeats, axis=-1) * self.amplitude
        limits = {"request": MAX_LETTERS, "position": longest, "head": p["kv_heads"], "layer": p["layers"]}
        self.fields = tuple((name, _digits(limit, self.base)) for name, limit in limits.items())
        if sum(count for _, count in self.fields) > d:
            raise InvalidInputError(f"params.head_dim = {d} has no room to spell {', '.join(limits)}.")
        self._values: dict[tuple[str, int], np.ndarray] = {}

    def keys(self, kv_heads: int) -> np.ndarray:
        """(n, k, d), the same for every request."""
        keys = np.zeros((self.longest, kv_heads, self.d))
        keys[:, :, : self.used] = self.code[:, None]
        keys[:, :, self.used : 2 * self.used] = self.amplitude
        return keys

    def query(self, position: int) -> np.ndarray:
        """(d,) what asks for that position."""
        query = np.zeros(self.d)
        query[: self.used] = self.code[position]
        query[self.used : 2 * self.used] = -self.amplitude
        return query

    def values(self, letter: str, layer: int, kv_heads: int) -> np.ndarray:
        """(n, k, d) of one request in one layer."""
        if (letter, layer) not in self._values:
            n = self.longest
            heads = []
            for head in range(kv_heads):
                fixed = {"request": ord(letter) - ord("a"), "head": head, "layer": layer}
                place = {"position": np.arange(n)} | {name: np.full(n, x) for name, x in fixed.items()}
                columns = [place[name] // self.base**i % self.base + 1 for name, k in self.fields for i in range(k)]
                columns += [np.full(n, 1 + i % self.base) for i in range(len(columns), self.d)]
                heads.append(np.stack(columns, axis=-1))
            self._values[letter, layer] = np.stack(heads, axis=1).astype(np.float64)
        return self._values[letter, layer]


def _rung_of(p: Mapping[str, Any], table: PageTable) -> Mapping[str, int]:
    """The first rung that holds the step."""
    have = {
        "rows": table.num_rows,
        "tokens": table.num_tokens,
        "listed_pages": len(table.page_ids),
        "max_query_len": table.max_query_len,
        "max_kv_len": table.max_kv_len,
    }
    fits = (rung for rung in p["ladder"] or () if all(have[name] <= rung[name] for name in have))
    return next(fits, p["rung"])


def _digits(limit: int, base: int) -> int:
    digits = 1
    while base**digits < limit:
        digits += 1
    return digits
