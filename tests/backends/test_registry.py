"""Backends by name (requirement B1)."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from paged.backends import registry
from paged.common.errors import BackendUnavailableError, InvalidInputError


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Installs a distribution `acme`, whose module is `source`; the registry finds it as any other."""

    def install(source: str, entries: str) -> None:
        (tmp_path / "acme_paged.py").write_text(source)
        info = tmp_path / "acme-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[paged.backends]\n{entries}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    yield install
    registry._make.cache_clear()
    sys.modules.pop("acme_paged", None)


ACME = """
from paged.backends.xla import XlaBackend
def make_backend(tier="a"):
    return XlaBackend(name="acme-" + tier)
def incomplete():
    full = XlaBackend()
    names = ("name", "capabilities", "static_plan", "plan_arrays", "append", "scrub", "copy_pages")
    return type("Incomplete", (), {name: getattr(full, name) for name in names})()
def unhashable():
    class Unhashable(XlaBackend):
        __hash__ = None
    return Unhashable()
"""


def test_the_built_ins_are_known_without_distribution_metadata(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    assert set(registry.list_backends()) == {"reference", "xla", "cpu", "flashinfer", "aiter"}
    assert registry.get_backend("xla").name == "xla"


def test_one_object_for_the_same_arguments():
    assert registry.get_backend("xla") is registry.get_backend("xla")


def test_a_third_party_backend_needs_no_change_here(acme):
    acme(ACME, "acme = acme_paged:make_backend")
    assert "acme" in registry.list_backends()
    assert "acme_paged" not in sys.modules, "listing must not import"
    assert registry.get_backend("acme").name == "acme-a"
    assert registry.get_backend("acme", tier="b").name == "acme-b"
    assert registry.get_backend("acme", tier="b") is registry.get_backend("acme", tier="b")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(BackendUnavailableError, match=r"registered as 'xlaa'; known: .*reference.*xla"):
        registry.get_backend("xlaa")


def test_a_missing_module_is_unavailable_with_the_reason(acme):
    acme("import no_such_vendor", "acme = acme_paged:make_backend\ngone = acme_gone:make_backend")
    with pytest.raises(BackendUnavailableError, match=r"'acme' .*No module named 'no_such_vendor'"):
        registry.get_backend("acme")
    with pytest.raises(
        BackendUnavailableError, match=r"'gone' \(acme_gone:make_backend\).*No module named 'acme_gone'"
    ):
        registry.get_backend("gone")


def test_a_factory_that_makes_something_else_is_told_what_is_missing(acme):
    acme(ACME, "incomplete = acme_paged:incomplete\nunhashable = acme_paged:unhashable\nabsent = acme_paged:absent")
    with pytest.raises(BackendUnavailableError, match="made a Incomplete, which has no 'attend'"):
        registry.get_backend("incomplete")
    with pytest.raises(BackendUnavailableError, match="is not hashable"):
        registry.get_backend("unhashable")
    with pytest.raises(BackendUnavailableError, match="no attribute 'absent'"):
        registry.get_backend("absent")


def test_two_distributions_may_not_claim_one_name(monkeypatch):
    points = [SimpleNamespace(name="xla", value="acme_paged:make_backend")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    with pytest.raises(BackendUnavailableError, match=r"two backends are registered as 'xla'.*acme_paged"):
        registry.list_backends()


def test_options_are_checked_against_the_factory(acme):
    acme(ACME, "acme = acme_paged:make_backend")
    with pytest.raises(InvalidInputError, match=r"'acme' does not take these options: .*'colour'"):
        registry.get_backend("acme", colour="red")
    with pytest.raises(InvalidInputError, match="must be hashable"):
        registry.get_backend("acme", tier=[])


def test_members_are_those_of_the_protocol():
    expected = {"name", "capabilities", "static_plan", "plan_arrays", "append", "attend", "scrub", "copy_pages"}
    assert set(registry.MEMBERS) == expected


def test_making_a_backend_touches_no_device():
    code = """
import jax
from jax._src import xla_bridge
from paged.backends.registry import get_backend
get_backend("xla")
assert not xla_bridge._backends, xla_bridge._backends
jax.devices()
assert xla_bridge._backends, "the probe must be able to see a device"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
