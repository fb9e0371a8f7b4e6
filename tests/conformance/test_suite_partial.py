"""What a part of a level says of itself, which cases `--quick` takes, and the clause beside every failure."""

import dataclasses
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from conformance import certificate, coverage, junit, listing, page, quick
from conformance.case import Case, Result
from conformance.catalogue import load
from conformance.clauses import CLAUSES, said
from conformance.needs import unmet
from conformance.progress import Progress
from paged.backends.protocol import AttentionExtras, Rung
from paged.common import AttentionSpec, Capabilities, Range
from paged.common.capabilities import FEATURES, NUMERIC_MODELS, PROMISES, REGIMES

ROOT = Path(__file__).parents[2]
SPEC, EXTRAS = ({f.name for f in dataclasses.fields(c)} for c in (AttentionSpec, AttentionExtras))
EVERY = load().select("all")


def declares(**kw):
    fields = {
        "dtypes": frozenset({"bfloat16", "float16", "float32"}),
        "kv_dtypes": frozenset({"bfloat16", "float16", "float32"}),
        "page_sizes": Range(1, 256),
        "head_dims": frozenset({16, 64, 80, 96, 128, 192, 256}),
        "group_sizes": Range(1, 16),
        "features": frozenset({"window", "soft_cap", "sinks", "lse", "decode", "mixed", "prefill"}),
        "numerics": "N0",
    }
    return Capabilities(**{**fields, **kw})


def body(cases, statuses=(), **kw):
    named = dict(zip((c.id for c in cases), statuses))
    results = [Result(id=c.id, status=named.get(c.id, "pass"), elements=1, decided=1, clause=None) for c in cases]
    return certificate.build(
        cases=cases, results=results, level="all", complete=False, of=len(EVERY),
        suite={"tree": "clean", "mutants": None},
        backend={"entry_point": "acme", "distribution": "acme 1"},
        claims=declares().to_json(), environment={"device": "cpu", "jax": "0"}, **kw,
    )  # fmt: skip


def test_a_part_says_how_much_it_was_and_what_it_did_not_touch():
    cases = [c for c in EVERY if c.id in ("attend/census/bf16/mixed", "attend/generic/fp16/mixed", "scrub/bf16")]
    made = body(cases, ["pass", "not-claimed", "pass"])
    line = certificate.summary(made)
    assert line.startswith(f"no failure in 2 of {len(EVERY)} cases of level all (2 pass, 1 not-claimed); not touched: ")
    assert "cases of level all and 2 checks of the kit (" in certificate.summary({**made, "kit": [1, 2]})
    assert "levels: sharded, serving" in line
    assert "features: decode, lse, prefill, sinks, soft_cap, window" in line
    assert "decode rung: plain, sinks, soft_cap, window" in line
    assert "dtypes: float16, float32" in line  # the one in float16 was not claimed, so not run
    assert "promises: deterministic" in line
    assert (made["verdict"], certificate.exit_status(made), made["certifies"]) == ("no failure", 0, False)


def test_the_page_of_a_part_never_calls_it_conformant():
    made = body([c for c in EVERY if c.id == "scrub/bf16"])
    html = page.render(certificate.seal(made, {}))
    text = html.partition("</style>")[2]
    assert "conformant" not in text.lower()
    assert "Partial run, no certificate: acme" in text
    assert f"no failure in 1 of {len(EVERY)} cases of level all" in text
    assert "<li>levels: core, sharded, serving</li>" in text
    assert "verdict plain" in text


def test_a_part_with_a_failure_has_failed_and_a_whole_level_is_as_it_was():
    failed = body([c for c in EVERY if c.id == "scrub/bf16"], ["fail"])
    assert certificate.summary(failed).startswith("failed in 1 of")
    assert certificate.exit_status(failed) == 1


@pytest.mark.parametrize(
    "declared",
    [
        declares(),
        declares(
            promises=PROMISES, features=frozenset({*declares().features, "non_causal", "kv_scales"}),
            kv_dtypes=frozenset({"bfloat16", "float8_e4m3fn"}),
        ),
        declares(dtypes=frozenset({"bfloat16"}), head_dims=frozenset({128}), features=frozenset({"mixed", "decode"})),
    ],
    ids=["plain", "much", "little"],
)  # fmt: skip
def test_quick_has_every_stratum_that_the_declaration_has_a_case_for(declared):
    picked = quick.select(EVERY, declared)
    claimed = [c for c in EVERY if not unmet(c.needs, declared)]
    assert {c.id for c in picked} <= {c.id for c in claimed}
    assert {s for c in claimed for s in quick.strata(c)} == {s for c in picked for s in quick.strata(c)}
    wanted = {
        (need, quick.single_tokens(case), case.params["dtype"])
        for case in claimed
        for need in case.needs
        if need in declared.features and "query_lens" in case.params and need not in ("decode", "mixed", "prefill")
    }
    found = {(n, quick.single_tokens(c), c.params["dtype"]) for c in picked for n in c.needs if "dtype" in c.params}
    assert wanted <= found
    assert len(picked) < len(EVERY) / 4
    left_out = coverage.untouched(picked, declared, "all")
    missing = coverage.untouched(claimed, declared, "all")
    assert left_out == missing  # what quick does not touch, nothing does


def test_quick_of_a_backend_that_claims_nothing_asked_says_what_is_missing():
    declared = declares(head_dims=frozenset({7}))
    picked = quick.select(EVERY, declared)
    assert picked
    assert all(c.quick and unmet(c.needs, declared) for c in picked)


def test_the_lines_of_clauses_are_those_of_the_document():
    text = (ROOT / "docs" / "semantics.md").read_text("utf-8")
    assert set(CLAUSES) == coverage.clauses_of(text)
    assert all(len(line) <= 100 for line in CLAUSES.values())
    assert (said(None), said("kit")) == ("", "kit")


def test_a_failure_names_its_clause_on_the_terminal_in_junit_and_on_the_page():
    stream = io.StringIO()
    progress = Progress(1, stream)
    progress.finish(Result(id="a/b", status="fail", clause="attend.3", diagnosis="why."))
    line = "attend.3: the causal mask is bottom-right aligned and includes the token itself"
    assert f"FAIL  a/b: breaks {line}. why.\n" in stream.getvalue()
    entry = {"id": "a/b", "status": "fail", "broken": "attend.3", "diagnosis": "why."}
    failure = ET.fromstring(junit.render([entry], name="x")).find(".//failure")
    assert failure is not None
    assert (failure.get("type"), failure.text) == ("attend.3", f"{line}. why.")
    case = Case(id="a/b", tier=3, level="core", generator="g", params={}, clause=("attend.3",))
    made = certificate.build(
        cases=[case], results=[Result(id="a/b", status="fail", clause="attend.3", diagnosis="why.", elements=1)],
        level="core", complete=False, suite={"tree": "clean", "mutants": None}, claims={},
        backend={"entry_point": "x", "distribution": "x 1"},
        environment={"device": "cpu", "jax": "0"},
    )  # fmt: skip
    assert f"breaks {line}" in page.render(certificate.seal(made, {}))


def test_the_list_of_cases_tells_level_needs_and_clauses():
    cases = [c for c in EVERY if c.id.startswith("scrub/")]
    lines = listing.as_text(cases).splitlines()
    assert len(lines) == len(cases) + 1
    assert lines[-1] == f"{len(cases)} cases"
    assert any(line.split()[:3] == ["scrub/bf16", "move", "pages.1"] for line in lines)
    found = {entry["id"]: entry for entry in json.loads(listing.as_json(cases))}
    assert found["scrub/bf16"]["clauses"] == {"pages.1": CLAUSES["pages.1"]}
    assert found["scrub/bf16"]["needs"] == ["head_dim:64", "kv_dtype:bfloat16", "page:16"]


def test_the_guide_tells_every_field_feature_promise_model_and_argument():
    text = (ROOT / "docs" / "certify-your-kernel.md").read_text("utf-8")
    told = {name for line in text.splitlines() if line.startswith("|") for name in re.findall(r"`([^`]+)`", line)}
    fields = {f.name for f in dataclasses.fields(Capabilities)}
    table = {"kv_lens", "last_page_len", "query_offsets", "page_offsets", "write_slots"}
    words = " ".join(told)
    assert fields | FEATURES | PROMISES | REGIMES | set(NUMERIC_MODELS) <= told
    for name in table | {"page_ids", *(f.name for f in dataclasses.fields(Rung)), *SPEC, *EXTRAS}:
        assert re.search(rf"\b{name}\b", words), name
    for code, status in certificate.VERDICTS.items():
        assert code in text
        assert f"| {status} |" in text
