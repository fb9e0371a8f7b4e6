"""The executor of the vendor's kernels where those are not installed: refused, with what to do."""

import dataclasses
import json
import types

import pytest

from conformance import kits
from conformance.executors import make_executor, triton_interpreter
from conformance.kits.run import Context, run
from paged.common.errors import BackendUnavailableError, InvalidInputError


def test_an_environment_without_the_vendor_packages_is_refused(monkeypatch):
    monkeypatch.setattr(triton_interpreter, "NEEDED", ("json", "no_such_vendor_package"))
    executor = make_executor("triton-interpreter", "aiter", {})
    with pytest.raises(BackendUnavailableError, match=r"need no_such_vendor_package, not installed in .*certify"):
        executor.start()


def test_a_folder_without_the_vendor_side_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(triton_interpreter, "NEEDED", ())
    executor = make_executor("triton-interpreter", "aiter", {"directory": str(tmp_path)})
    with pytest.raises(BackendUnavailableError, match=r"no .*__init__.py. It lies in tools/aiter_triton of a checkout"):
        executor.start()


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "304"])
def test_compute_units_are_a_count(count):
    with pytest.raises(InvalidInputError, match="compute_units must be an int of at least 1"):
        make_executor("triton-interpreter", "aiter", {"compute_units": count})


def test_it_serves_one_backend():
    with pytest.raises(InvalidInputError, match="serves the backend 'aiter', not 'xla'"):
        make_executor("triton-interpreter", "xla", {})


def test_findings_are_checks_where_the_vendor_kernels_run_and_nowhere_else():
    where = {name: {c.id for c in kits.select("aiter", name)} for name in kits.EVERYWHERE}
    found = {name for name, ids in where.items() if any(i.startswith("kit/finding/") for i in ids)}
    assert found == {"triton-interpreter"}
    assert {"kit/finding/dead-slot-nan", "kit/finding/chunked-default-scale"} <= where["triton-interpreter"]


@dataclasses.dataclass
class VendorSide:
    """An executor whose vendor's side knows one finding, seen or not."""

    seen: bool

    def vendor(self, module):
        shown = types.SimpleNamespace(reproduced=self.seen, measured={"error": float("nan"), "moved": 3})
        said = {"name": "append-rotates", "what": "it rotates", "where": "file:1", "reproduce": "python here"}
        found = types.SimpleNamespace(show=lambda: shown, describe=lambda: dict(said))
        return types.SimpleNamespace(load=lambda: {"append-rotates": found})


@pytest.mark.parametrize("seen", [True, False])
def test_a_finding_is_listed_where_it_is_seen_again_and_fails_where_not(seen):
    result = run("aiter", Context("kit/finding/append-rotates", None, VendorSide(seen)))
    assert result.status == ("pass" if seen else "fail")
    assert result.details["finding"] == "it rotates"
    assert result.details["reproduce"] == "python here"
    json.dumps(result.details, allow_nan=False)
    assert seen or "not seen with these versions; correct the list" in result.diagnosis
