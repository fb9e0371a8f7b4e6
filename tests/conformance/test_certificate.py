"""Certificates: verdicts, tampering, comparison, on made-up results."""

import copy
import json
from pathlib import Path

import pytest

from conformance import certificate
from conformance.case import Case, Result
from conformance.catalogue import Catalogue, load
from paged.common import Capabilities, Range
from paged.common.errors import InvalidInputError

CLAIMS = Capabilities(
    dtypes=frozenset({"bfloat16", "float16"}), kv_dtypes=frozenset({"bfloat16"}), page_sizes=Range(1, 16),
    head_dims=frozenset({64}), group_sizes=Range(1, 4), features=frozenset({"window", "decode"}), numerics="N0",
).to_json()  # fmt: skip


def case(name, tier, **kw):
    needs = kw.pop("needs", ("dtype:bfloat16",))
    return Case(
        id=f"t{tier}/{name}", tier=tier, level="move" if tier == 1 else "core", generator="any", params={},
        clause=("attend.1",), needs=needs, **kw,
    )  # fmt: skip


CASES = tuple(
    sorted(
        [case(n, t) for t in (1, 2, 3, 4) for n in ("a", "b")] + [case("w", 3, needs=("window",))], key=lambda c: c.id
    )
)
CATALOGUE = Catalogue(version="v1", cases=CASES)


def make(changes=None, *, cases=CASES, waivers=(), tree="clean", claims=CLAIMS, **kw):
    results = [
        Result(id=c.id, status="pass", elements=10, decided=9, output=f"sha256:{i:064x}") for i, c in enumerate(cases)
    ]
    results = [changes.get(r.id, r) if changes else r for r in results]
    settings = {"level": "core", "complete": True, **kw}
    body = certificate.build(
        cases=cases, results=results, waivers=waivers, claims=claims,
        suite={"version": "0.1.0", "catalogue": CATALOGUE.digest, "tree": tree, "mutants": None},
        backend={"entry_point": "x"}, environment={"jax": "0"}, **settings,
    )  # fmt: skip
    return certificate.seal(body, {"time": "now"})


def fail(case_id, status="fail"):
    return {case_id: Result(id=case_id, status=status, diagnosis="why", clause="attend.3", elements=10)}


@pytest.mark.parametrize(
    ("data", "verdict", "status", "certifies"),
    [
        (make(), "conformant", 0, True),
        (make(tree="dirty"), "conformant", 0, False),
        (make(fail("t3/a")), "failed", 1, False),
        (make(fail("t3/a", "error")), "error", 2, False),
        (make(fail("t3/a", "error") | fail("t1/a")), "failed", 1, False),
        (make(fail("t3/a", "waived")), "conformant", 0, True),
        (make(fail("t1/a", "not-claimed")), "conformant", 0, True),
        (make(fail("t1/a", "not-claimed") | fail("t1/b", "not-claimed")), "not certifiable", 3, False),
        (make(waivers=[{"problem": "unused"}]), "failed", 1, False),
        (make(waivers=[{"problem": None}]), "conformant", 0, True),
        (make(cases=CASES[2:], complete=False), "no failure", 0, False),
        (make(complete=False), "no failure", 0, False),
        (make(fail("t4/b", "not-claimed"), cases=CASES[-1:], complete=False), "not certifiable", 2, False),
    ],
    ids=[
        *("clean", "dirty", "fail", "error", "both", "waived", "one-not-claimed", "tier-not-claimed"),
        *("unused-waiver", "waiver", "part", "all-as-a-part", "part-not-claimed"),
    ],
)
def test_verdict_and_exit_status(data, verdict, status, certifies):
    body = data["body"]
    assert (body["verdict"], certificate.exit_status(body), body["certifies"]) == (verdict, status, certifies)


def test_body_is_canonical_and_free_of_time():
    first, second = make(), certificate.seal(make()["body"], {"time": "later"})
    assert first["digest"] == second["digest"]
    assert certificate.build.__kwdefaults__ is not None
    again = certificate.read(json.dumps(first))
    assert certificate.check(again, CATALOGUE) == []


@pytest.mark.parametrize("results", [[], ["t1/a", "t1/a", "t1/b"], ["t1/a", "t1/b", "t9/z"]])
def test_exactly_one_result_per_case(results):
    with pytest.raises(InvalidInputError, match="result"):
        certificate.build(
            cases=CASES[:2], results=[Result(id=i, status="pass") for i in results], level="core", complete=False,
            suite={}, backend={}, claims={}, environment={},
        )  # fmt: skip


def edit_status(body):
    body["cases"][3]["status"] = "fail"


def edit_verdict(body):
    body["verdict"] = "failed"


def edit_claim(body):
    body["claims"]["numerics"] = "exact"


def drop_case(body):
    del body["cases"][0]


def edit_environment(body):
    body["environment"]["jax"] = "1"


def edit_totals(body):
    body["totals"]["pass"] = 1000


def edit_scope(body):
    body["scope"] = "everything"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (edit_status, "case 't2/b' was edited"),
        (edit_verdict, "verdict is 'failed', but the cases give 'conformant'"),
        (edit_claim, "section 'claims' was edited"),
        (drop_case, "missing case 't1/a'"),
        (edit_environment, "section 'environment' was edited"),
        (edit_totals, "totals is"),
        (edit_scope, "no section's digest differs, so the edit is outside them"),
    ],
)
def test_tampering_is_located(edit, said):
    data = make()
    edit(data["body"])
    problems = certificate.check(data, CATALOGUE)
    assert any(said in p for p in problems), problems
    assert any("the body was edited" in p for p in problems)


def test_an_edit_with_every_digest_redone_is_still_not_the_verdict():
    data = make(fail("t2/a"))
    body = data["body"]
    body["verdict"], body["certifies"] = "conformant", True
    forged = certificate.seal(body, {})
    assert any("verdict" in p for p in certificate.check(forged, CATALOGUE))


def test_missing_and_extra_cases_and_the_tree_are_problems():
    short = make(cases=CASES[:-1])
    assert any(f"missing case {CASES[-1].id!r}" in p for p in certificate.check(short, CATALOGUE))
    extra = make(cases=(*CASES, case("zzz", 4)))
    assert any("extra case 't4/zzz'" in p for p in certificate.check(extra, CATALOGUE))
    assert any("tree was 'dirty'" in p for p in certificate.check(make(tree="dirty"), CATALOGUE))
    other = Catalogue(version="v1", cases=CASES[1:])
    assert any("another catalogue" in p for p in certificate.check(make(), other))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"body": {}, "digest": "", "envelope": {}}', '{"x": NaN}'])
def test_what_is_no_certificate_is_refused(text):
    with pytest.raises(InvalidInputError):
        certificate.read(text)


def test_a_body_of_the_wrong_shape_is_refused():
    for name, value in (("cases", [{"id": 3}]), ("waivers", [3]), ("totals", []), ("level", "deep")):
        data = copy.deepcopy(make())
        data["body"][name] = value
        with pytest.raises(InvalidInputError, match=name):
            certificate.read(json.dumps(data))


def test_diff_gives_four_sets():
    moved = {"t2/a": Result(id="t2/a", status="pass", elements=10, decided=9, output="sha256:" + "f" * 64)}
    old, new = make(), make(moved | fail("t3/a"), claims={**CLAIMS, "dtypes": ["bfloat16"]})
    found = certificate.diff(old["body"], new["body"])
    assert found.verdict == ("conformant", "failed")
    assert found.status == {"t3/a": ("pass", "fail")}
    assert found.bits == ("t2/a",)
    assert found.claims == {"dtypes": (["bfloat16", "float16"], ["bfloat16"])}
    assert found.regressions == ["t3/a: pass -> fail", "claim dtypes lost float16"]
    assert not certificate.diff(old["body"], old["body"])


def test_bits_are_not_compared_where_other_elements_are_decided_or_another_backend_has_its_own():
    def one(decided, output, own, name="x"):
        result = Result(id="t2/a", status="pass", decided=decided, output=output, details={"bits": own})
        data = make({"t2/a": result})
        data["body"]["backend"]["entry_point"] = name
        return data["body"]

    base = one(9, "sha256:a", "sha256:b")
    assert certificate.diff(base, one(8, "sha256:c", "sha256:b")).bits == ()
    assert certificate.diff(base, one(9, "sha256:c", "sha256:b")).bits == ("t2/a",)
    assert certificate.diff(base, one(9, "sha256:a", "sha256:c")).bits == ("t2/a",)
    assert certificate.diff(base, one(9, "sha256:a", "sha256:c", "y")).bits == ()


def test_grid_and_decided_shares():
    body = make(fail("t3/a"))["body"]
    assert certificate.grid(body)["window"] == {3: {"pass": 1}}
    assert certificate.grid(body)["plain"][3] == {"fail": 1, "pass": 1}
    assert certificate.decided_shares(body) == {"any": (9, 10), "bfloat16": (9, 10)}


def mended(change):
    """A certificate edited by someone who also mends every digest, the totals and the verdict."""
    data = make()
    body = data["body"]
    change(body)
    for entry in body["cases"]:
        entry["digest"] = certificate.digest({k: v for k, v in entry.items() if k != "digest"})
    body["totals"], body["verdict"] = certificate.totals(body), certificate.verdict(body)
    body["certifies"] = certificate.certifies(body)
    body["digests"] = {name: certificate.digest(body[name]) for name in certificate.SECTIONS if name in body}
    return certificate.check(certificate.seal(body, data["envelope"]), CATALOGUE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b["cases"].pop(2), "missing case 't2/a'"),
        (lambda b: b["cases"].append(b["cases"][2]), "case 't2/a' occurs 2 times"),
        (lambda b: b.update(complete=False), "selection is None, but the cases and claims give {'of': 9, 'run': 9"),
        (lambda b: b["cases"][2].update(status="not-claimed"), "claims have all that it needs"),
        (lambda b: b["claims"]["features"].remove("window"), "case 't3/w' is 'pass', but the claims lack"),
        (lambda b: b["claims"].update(numerics="N9"), "claims are no declaration"),
        (lambda b: b["claims"].pop("head_dims"), "claims are no declaration"),
        (lambda b: b["cases"][2].update(needs=["sinks"]), "case 't2/a' has needs ['sinks'], the catalogue says"),
        (lambda b: b["cases"][2].update(level="move"), "case 't2/a' has level 'move'"),
        (lambda b: b["cases"][2].update(decided=11), "case 't2/a' has 11 elements decided of 10"),
        (lambda b: b["cases"][2].update(elements=0, decided=0), "case 't2/a' is 'pass' with nothing judged"),
        (lambda b: b["cases"][2].update(broken="attend.3"), "case 't2/a' is 'pass' with nothing judged, or with"),
        (lambda b: b["cases"][0].update(status="waived"), "case 't1/a' is 'waived', which no waiver"),
        (lambda b: b["cases"][4].update(status="waived"), "case 't3/a' is 'waived', which no waiver"),
    ],
)
def test_an_edit_with_mended_digests_contradicts_itself(change, said):
    (found, *_) = [p for p in mended(change) if said in p] or [mended(change)]
    assert said in found
    assert mended(lambda b: None) == []


def test_the_committed_certificates_are_sound():
    folder, catalogue = Path(__file__).parents[2] / "certificates", load()
    files = [f for f in sorted(folder.glob("*.json")) if "modules" not in f.name]
    assert len(files) >= 4
    for file in files:
        assert certificate.check(certificate.read(file.read_text("utf-8"), file.name), catalogue) == [], file.name
        assert file.with_suffix(".html").exists(), file.name
