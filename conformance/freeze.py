"""Freezes what the catalogue's generators make: `python -m conformance.freeze` writes, `--check` compares.

For every case the derived `needs`, and digests of the inputs and of what is demanded, are kept in the catalogue's
files. A generator, bound or oracle that gives other bits than before shows up here, before any backend sees it; writing
the files anew is a decision to be told in the changelog.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance.case import AttendProblem, Case, MoveProblem
from conformance.catalogue import load, questions
from conformance.judge import expectation
from conformance.oracle import attend
from conformance.vectors import Trace, Vector, generate
from paged.common import AttentionSpec, PageTable
from paged.common.capabilities import NUMERIC_MODELS

DIRECTORY = Path(__file__).parent / "catalogue" / "v1"
FROZEN_MODELS = ("exact", "N0", "N1")
"""Numeric models whose certified ranges are part of the digest of what is demanded."""
SAFE_PAGE_ID = 1 << 15
"""Cases whose page ids, layer offset included, stay below this make no demand on `max_page_id`."""
EXTRA_NEEDS = frozenset({"lse", "pool_layout", "pool_storage", "poison"})
"""Needs that no parameter shows; they stay as the file has them."""
PROMISED_RELATIONS = {
    "rung": ("batch_invariant",),
    "batch": ("batch_invariant",),
    "chunk": ("chunk_invariant",),
    "shard": ("shard_invariant",),
    "masked_nan": ("masked_nan",),
    "schedule": ("batch_invariant", "chunk_invariant"),
}
"""Relations that bind on generic inputs only where they are promised."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the files; 0 if nothing differs or everything was written, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m conformance.freeze", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare and change nothing")
    parser.add_argument("--case", action="append", help="only this case; may be repeated")
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    parser.add_argument(
        "--remember", action="store_true", help="note this catalogue among those that certificates name"
    )
    options = parser.parse_args(arguments)
    if options.remember:
        return remember(options.directory)
    moved = []
    for file in sorted(options.directory.glob("*.json")):
        data = json.loads(file.read_text("utf-8"))
        for entry in data["cases"]:
            if options.case and entry["id"] not in options.case:
                continue
            fresh = frozen_fields(entry)
            changed = [name for name, value in fresh.items() if entry.get(name) != value]
            moved += [f"{file.name}: {entry['id']}: {name}" for name in changed]
            entry.update(fresh)
        if not options.check:
            file.write_text(render(data), "utf-8")
        elif file.read_text("utf-8") != render(data) and not any(m.startswith(file.name) for m in moved):
            moved.append(f"{file.name}: not in the form that freezing writes")
    for line in moved:
        print(("differs: " if options.check else "wrote: ") + line)
    return 1 if options.check and moved else 0


def remember(directory: Path) -> int:
    """Note the catalogue as it is, so that certificates made with it can be checked when it has grown."""
    now, file = load(directory), directory / "record" / "earlier.json"
    if any(one.digest == now.digest for one in now.earlier):
        return 0
    entries = json.loads(file.read_text("utf-8")) if file.exists() else []
    ids = [case.id for case in now.cases]
    entries.append({"digest": now.digest, "questions": questions(now.cases), "ids": ids})
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
    return 0


def frozen_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """`needs`, `inputs` and `expected` of a case given as JSON data."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    case = Case(**fields)
    vector = generate(case)
    return {
        "needs": needs_of(case, vector),
        "inputs": inputs_digest(vector),
        "expected": expected_digest(case, vector),
    }


def needs_of(case: Case, vector: Vector) -> list[str]:
    """The demands that the parameters make on a declaration, and the extra ones that the case states."""
    p, problem = case.params, vector.problem
    if isinstance(problem, Trace):
        calls = [each for step in problem.steps for each in step.layers]
        each = (needs_of(case, call) for call in calls)
        return sorted(set().union(*each))
    kv_dtype = problem.dtype if isinstance(problem, MoveProblem) else problem.kv_dtype
    needs = {f"kv_dtype:{kv_dtype}", f"page:{p['page']}", f"head_dim:{p['head_dim']}"}
    top_page = p.get("layers", 1) * p["num_pages"] - 1
    if top_page >= SAFE_PAGE_ID:
        needs |= {f"max_page_id:{top_page}", f"pool_bytes:{problem.keys.nbytes}"}
    if p.get("value_head_dim") not in (None, p["head_dim"]):
        needs |= {"value_head_dim", f"head_dim:{p['value_head_dim']}"}
    if p.get("mesh"):
        needs.add("regime:partition")
    if isinstance(problem, AttendProblem):
        spec = problem.spec
        needs |= {f"dtype:{problem.dtype}", f"group:{p['q_heads'] // p['kv_heads']}"}
        asked = {
            "window": spec.window is not None,
            "soft_cap": spec.soft_cap is not None,
            "non_causal": not spec.causal,
            "sinks": problem.sinks is not None,
            "kv_scales": problem.key_scale is not None or problem.value_scale is not None,
            batch_kind(problem.table): True,
        }
        needs |= {name for name, wanted in asked.items() if wanted}
        relation = str(p.get("relation"))
        if vector.predicted is None or relation == "masked_nan":
            needs |= {f"promise:{promise}" for promise in PROMISED_RELATIONS.get(relation, ())}
    needs |= {need for need in case.needs if need.partition(":")[0] in EXTRA_NEEDS}
    return sorted(needs)


def batch_kind(table: PageTable) -> str:
    """`decode` if no row has more than one new token, `prefill` if none has just one, else `mixed`."""
    lens = table.query_lens[table.query_lens > 0]
    if np.all(lens <= 1):
        return "decode"
    return "prefill" if np.all(lens > 1) else "mixed"


def inputs_digest(vector: Vector) -> str:
    """`sha256:…` of every field of the problem but what a movement is expected to give."""
    if isinstance(vector.problem, Trace):
        return digest(_trace_parts(vector.problem))
    skipped = ("expected_keys", "expected_values")
    fields = dataclasses.fields(vector.problem)
    return digest(_parts((f.name, getattr(vector.problem, f.name)) for f in fields if f.name not in skipped))


def _trace_parts(trace: Trace) -> Iterable[bytes]:
    """Every step's operations and problems, with the pools that they leave."""
    yield from _parts([("keys", trace.keys), ("values", trace.values)])
    for step in trace.steps:
        yield from _parts([("text", step.text), ("tokens", step.tokens)])
        for operation in step.operations:
            yield from _parts((f.name, getattr(operation, f.name)) for f in dataclasses.fields(operation))
        for call in step.layers:
            yield from _parts((f.name, getattr(call.problem, f.name)) for f in dataclasses.fields(call.problem))


def expected_digest(case: Case, vector: Vector) -> str:
    """`sha256:…` of what is demanded: the pool after a movement; predicted words and certified ranges of attention."""
    problem = vector.problem
    if isinstance(problem, MoveProblem):
        return digest(_parts([("keys", problem.expected_keys), ("values", problem.expected_values)]))
    if isinstance(problem, Trace):
        calls = (call for step in problem.steps for call in step.layers)
        return digest(expected_digest(case, call).encode() for call in calls)
    parts: list[tuple[str, Any]] = [("predicted", vector.predicted)]
    answer = attend(problem)
    for name in FROZEN_MODELS:
        expected = expectation(vector, NUMERIC_MODELS[name], answer)
        parts += [(f"low {name}", expected.low), (f"high {name}", expected.high)]
    return digest(_parts(parts))


def _parts(fields: Iterable[tuple[str, Any]]) -> Iterable[bytes]:
    for name, value in fields:
        yield f"|{name}|".encode()
        if isinstance(value, np.ndarray):
            yield f"{value.dtype.kind}{value.dtype.itemsize}{value.shape}".encode()
            yield np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<")).tobytes()
        elif isinstance(value, (PageTable, AttentionSpec)):
            yield from _parts((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        elif isinstance(value, tuple):
            yield from _parts((str(i), v) for i, v in enumerate(value))
        else:
            yield f"{type(value).__name__}:{value!r}".encode()


def digest(parts: Iterable[bytes]) -> str:
    """`sha256:…` of the parts, one after the other."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part)
    return f"sha256:{h.hexdigest()}"


def render(data: Mapping[str, Any]) -> str:
    """The file as text: one field a line, so that a changed digest is a one-line diff."""
    cases = []
    for entry in data["cases"]:
        lines = [f"      {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in entry.items()]
        cases.append("    {\n" + ",\n".join(lines) + "\n    }")
    return '{\n  "schema": 1,\n  "cases": [\n' + ",\n".join(cases) + "\n  ]\n}\n"


if __name__ == "__main__":
    sys.exit(main())
