"""`paged certify aiter` as a command: executors, their certificates, and what none of them may say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import certificate
from conformance.canonical import digest
from conformance.catalogue import load
from conformance.kits import AITER, select
from conformance.page import render
from paged.common.errors import InvalidInputError

ROOT = Path(__file__).resolve().parents[2]


def paged(*arguments, **variables):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **variables}
    return subprocess.run(
        [sys.executable, "-m", "paged.cli", "certify", *arguments], capture_output=True, text=True, env=env, check=False
    )


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    path = tmp_path_factory.mktemp("certify") / "lowered.json"
    done = paged("aiter", "--executor", "lowering-only", "--fresh", "-o", str(path))
    return done, json.loads(path.read_text())


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The kit's structural checks and the cases of one program, with the handlers of tests/aiter_handlers."""
    path = tmp_path_factory.mktemp("certify") / "handlers.json"
    done = paged(
        *("aiter", "--executor", "cpu-handlers", "--fresh", "--only", "sharded/[ad]*/d128/tensor8", "-o", str(path)),
        *("--html", str(path.with_suffix(".html"))),
    )
    return done, json.loads(path.read_text()), path.with_suffix(".html").read_text()


def test_lowering_alone_certifies_that_nothing_was_executed(lowered):
    done, data = lowered
    assert done.returncode == 0, done.stderr
    assert "conformant at level lowering" in done.stdout
    body = data["body"]
    assert body["cases"] == []
    assert [e["id"] for e in body["kit"]] == [c.id for c in select("aiter", "lowering-only")]
    assert {e["status"] for e in body["kit"]} == {"pass"}
    assert "Nothing was executed" in body["scope"]
    assert body["environment"]["executor"]["name"] == "lowering-only"


def test_cases_run_on_the_handlers_and_the_certificate_says_so(executed):
    done, data, page = executed
    assert done.returncode == 0, done.stderr + done.stdout
    body = data["body"]
    assert body["totals"]["pass"] == len(body["cases"]) >= 2
    assert body["environment"]["executor"]["name"] == "cpu-handlers"
    assert body["environment"]["executor"]["library"].startswith("sha256:")
    assert "nothing is claimed about the vendor's kernels or device" in body["scope"]
    assert "executed by <b>cpu-handlers</b>" in page


def test_no_certificate_but_a_native_one_names_an_architecture(lowered, executed):
    for data in (lowered[1], executed[1]):
        assert "gfx" not in json.dumps(data)


def test_the_page_shows_the_kit_and_its_findings(lowered):
    entries = [dict(entry) for entry in lowered[1]["body"]["kit"]]
    entries[1]["details"] = {"finding": "NaN <leaks>"}
    entries[2]["status"] = "waived"
    page = render({**lowered[1], "body": {**lowered[1]["body"], "kit": entries}})
    assert all(f"<code>{entry['id']}</code>" in page for entry in entries)
    assert "NaN &lt;leaks&gt;" in page
    assert AITER.checks[6].what in page


def built(executor, **environment):
    case = AITER.checks[0].as_case()
    result = certificate.Result(id=case.id, status="pass")
    return certificate.build(
        cases=[], results=[], level="lowering", complete=True, suite={"tree": "clean"}, claims={},
        backend={"entry_point": "aiter"}, environment={"executor": {"name": executor}, **environment},
        kit=[(case, result)],
    )  # fmt: skip


def test_an_architecture_that_nothing_ran_on_is_refused():
    for executor in ("cpu-handlers", "triton-interpreter", "lowering-only"):
        with pytest.raises(InvalidInputError, match=f"executor '{executor}' would name 'gfx942', on which nothing ran"):
            built(executor, device="AMD Instinct MI300X gfx942")
    assert built("native", device="gfx942")["scope"] == certificate.SCOPE


def test_a_kit_check_without_result_is_refused():
    case = AITER.checks[0].as_case()
    with pytest.raises(InvalidInputError, match="kit check 'kit/audit/modules' has no result"):
        certificate.build(
            cases=[], results=[], level="lowering", complete=True, suite={}, claims={}, backend={}, environment={},
            kit=[(case, None)],
        )  # fmt: skip


def reseal(data, body):
    sections = {name: digest(body[name]) for name in certificate.SECTIONS if name in body}
    body = {**body, "digests": sections}
    body |= {"totals": certificate.totals(body), "verdict": certificate.verdict(body)}
    body |= {"certifies": certificate.certifies(body)}
    return {**data, "body": body, "digest": digest(body)}


def test_a_kit_that_was_cut_or_edited_is_not_sound(lowered):
    data = lowered[1]
    catalogue = load()
    sound = certificate.check(data, catalogue)
    assert [p for p in sound if "tree" not in p] == []
    body = data["body"]
    cut = reseal(data, {**body, "kit": body["kit"][1:]})
    assert "kit check 'kit/lowering/contract' is missing" in certificate.check(cut, catalogue)
    failed = {**body["kit"][0], "status": "fail", "diagnosis": "", "broken": "kit"}
    assert certificate.verdict({**body, "kit": [failed, *body["kit"][1:]]}) == "failed"
    edited = {**data, "body": {**body, "kit": [{**body["kit"][0], "elements": 7}, *body["kit"][1:]]}}
    assert any("'kit/lowering/contract' was edited" in p for p in certificate.check(edited, catalogue))
    anonymous = {k: v for k, v in body["environment"].items() if k != "executor"}
    unsaid = reseal(data, {**body, "environment": anonymous})
    assert any("does not say who executed the targets of 'aiter'" in p for p in certificate.check(unsaid, catalogue))


def test_not_built_is_not_certifiable_and_says_how_to_build():
    done = paged("aiter")
    assert done.returncode == 3
    assert "aiter: not certifiable" in done.stderr
    assert "make -f Makefile.kv ja_kv" in done.stderr


def test_a_missing_compiler_fails():
    done = paged("aiter", "--executor", "cpu-handlers", CXX="no-such-compiler")
    assert done.returncode == 3
    assert "no C++ compiler 'no-such-compiler'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("xla", "--executor", "lowering-only"), "executors serve the targets of aiter; 'xla' has none"),
        (("aiter", "--executor", "gpu"), "executor 'gpu' is not one of native"),
        (("aiter", "--executor-option", "a=1"), "--executor-option belongs to an executor"),
    ],
)
def test_executors_that_do_not_fit_are_errors(arguments, said):
    done = paged(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_cases_run_under_pytest_too_but_give_no_certificate_without_the_kit(tmp_path):
    """Installed, the plugin is an entry point; in a source tree it is named."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conformance.plugin", "-p", "no:cacheprovider"]
    command += ["--backend", "aiter", "--conformance-executor", "cpu-handlers", "--pyargs", "conformance"]
    command += ["--conformance-only", "append/*/d128/*", "--certificate", str(tmp_path / "cert.json")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, check=False)
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert "a certificate of 'aiter' holds its kit's checks: paged certify aiter" in done.stdout
    assert done.returncode == 2
    assert not (tmp_path / "cert.json").exists()
