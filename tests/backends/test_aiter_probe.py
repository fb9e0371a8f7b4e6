"""What the probe says of installations that lack something, or have another ABI under a name."""

import sys
import textwrap

import pytest

from paged.backends.aiter import known, machine, probe, targets
from paged.backends.aiter.contract import ROUTE, TARGETS
from paged.backends.registry import get_backend
from paged.common.errors import BackendUnavailableError

REGISTRY = """
STANDALONE_SYMBOLS = {names!r}
registered = []
def standalone_symbol_available(name):
    return name not in {unbuilt!r}
def register_ffi_target(name, platform):
    if {broken!r}:
        raise OSError("libamdhip64.so.7: cannot open shared object file")
    registered.append((name, platform))
"""

WRAPPERS = {
    "append_kv": """
        import jax, jax.numpy as jnp
        def append_kv(k, v, slots, kp, vp):
            one = jnp.ones((1,), jnp.float32)
            out = tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in (kp, vp))
            call = jax.ffi.ffi_call("AppendKvJA", out, input_output_aliases={5: 0, 6: 1})
            return call(k, v, slots, one, one, kp, vp, kv_cache_dtype="auto")
    """,
    "paged_attention": """
        import jax, jax.numpy as jnp, numpy as np
        def paged_attention(q, kp, vp, indptr, indices, last, *, max_seq_len, scale):
            one = jnp.ones((1,), jnp.float32)
            call = jax.ffi.ffi_call("PagedAttentionJA", jax.ShapeDtypeStruct(q.shape, q.dtype))
            return call(q, kp, vp, indptr, indices, last, one, one, jnp.zeros((9,), jnp.uint8), scale=SCALE(scale),
                logits_soft_cap=np.float32(0), max_num_partitions=np.int64(1), func_name="x")
    """,
}

SOURCE = """
XLA_FFI_DEFINE_HANDLER_SYMBOL(AppendKvJA, f, ffi::Ffi::Bind().Ctx<ffi::PlatformStream<hipStream_t>>()
    .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
    .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
    .Attr<TYPE>("kv_cache_dtype"));
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package `jax_aiter` made for the test; nothing of it is left afterwards."""
    monkeypatch.setattr(targets, "_provided", {})
    monkeypatch.setattr(machine, "TOPOLOGY", tmp_path / "nodes")
    monkeypatch.delenv(probe.ROOT_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def make(names=tuple(TARGETS), unbuilt=(), broken=False, init="", wrappers=(), scale="np.float32", source=None):
        package = tmp_path / "site" / "jax_aiter"
        for folder in (package, package / "ffi", package / "ops"):
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text("")
        (package / "__init__.py").write_text(f"__version__ = '9.9'\n{init}\n")
        (package / "ffi" / "registry.py").write_text(
            REGISTRY.format(names=tuple(names), unbuilt=tuple(unbuilt), broken=broken)
        )
        for name in wrappers:
            (package / "ops" / f"{name}.py").write_text(textwrap.dedent(WRAPPERS[name]).replace("SCALE", scale))
        if source is not None:
            folder = tmp_path / "tree" / "csrc" / "ffi" / "kv"
            folder.mkdir(parents=True)
            (folder / "append_kv_ja.cu").write_text(SOURCE.replace("TYPE", source))
            monkeypatch.setenv(probe.ROOT_VARIABLE, str(tmp_path / "tree"))
        return tmp_path

    yield make
    for name in [n for n in sys.modules if n.partition(".")[0] == "jax_aiter"]:
        del sys.modules[name]


def refusal():
    with pytest.raises(BackendUnavailableError) as info:
        probe.probe().require()
    return str(info.value)


def test_without_the_package_the_reason_and_the_build_command_are_given(monkeypatch):
    monkeypatch.setattr(targets, "_provided", {})
    with pytest.raises(BackendUnavailableError) as info:
        get_backend("aiter", pool_layout="stacked")
    text = str(info.value)
    assert "- jax-aiter is not installed" in text
    assert "make -f Makefile.kv ja_kv GFX=gfx942" in text
    assert "CK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=0" in text


def test_off_the_device_the_next_step_is_an_executor(monkeypatch):
    monkeypatch.setattr(targets, "_provided", {})
    with pytest.raises(BackendUnavailableError, match="nothing is registered under this name for cpu") as info:
        probe.probe("cpu").require()
    assert "paged certify aiter --executor cpu-handlers" in str(info.value)


def test_a_complete_installation_is_registered_and_used(install):
    install(wrappers=("append_kv", "paged_attention"), source="std::string_view")
    report = probe.probe()
    assert report.complete, report.reasons()
    assert report.version == "9.9"
    assert report.targets["AppendKvJA"].provider == "jax-aiter"
    assert [d.matches for d in report.targets["AppendKvJA"].declarations] == [True, True]
    assert [d.matches for d in report.targets["PagedAttentionJA"].declarations] == [True]
    assert sys.modules["jax_aiter.ffi.registry"].registered == [(name, "ROCM") for name in TARGETS]
    assert probe.probe().complete  # a second look registers nothing again
    assert len(sys.modules["jax_aiter.ffi.registry"].registered) == len(TARGETS)


def test_another_abi_in_a_wrapper_is_refused_with_both_contract_ids(install):
    install(wrappers=("paged_attention",), scale="float")
    text = refusal()
    assert "PagedAttentionJA: another ABI under this name: jax_aiter.ops.paged_attention declares" in text
    assert TARGETS["PagedAttentionJA"].contract_id in text
    assert text.count("PagedAttentionJA:") >= 3
    assert "scale f64" in text
    assert "scale f32" in text
    # What could not be decoded is not registered either.
    assert "PagedAttentionJA" not in targets.provided("rocm")


def test_another_abi_in_the_sources_is_refused_with_both_contract_ids(install):
    install(source="int64_t")
    text = refusal()
    assert "AppendKvJA: another ABI under this name" in text
    assert "append_kv_ja.cu declares AppendKvJA:" in text
    assert "kv_cache_dtype i64" in text
    assert TARGETS["AppendKvJA"].contract_id in text


def test_a_release_without_the_paged_targets_is_told_apart_from_one_that_is_not_built(install):
    install(names=("MhaFwdUnifiedJA", "AppendKvJA"), unbuilt=("AppendKvJA",))
    text = refusal()
    assert "AppendKvJA: append_kv_ja.so is not built" in text
    assert "PagedPrefillJA: this jax-aiter has no such target; its paged targets came later" in text


def test_a_library_that_does_not_load_is_told(install):
    install(broken=True)
    text = refusal()
    assert all(f"{name}: it does not load: OSError: libamdhip64.so.7" in text for name in ROUTE)
    # The alias probe is no part of the route.
    assert "KvAliasProbeJA" not in text


def test_a_package_that_fails_on_import_is_told(install):
    install(init="raise RuntimeError('no HIP')")
    assert "jax-aiter cannot be imported: RuntimeError: no HIP" in refusal()


def test_torch_in_the_vendor_s_imports_is_a_reason(install, tmp_path):
    install(init="import torch")
    (tmp_path / "site" / "torch.py").write_text("")
    try:
        assert "importing jax_aiter imports torch" in refusal()
    finally:
        sys.modules.pop("torch", None)


def node(folder, number, **properties):
    path = folder / "nodes" / str(number)
    path.mkdir(parents=True)
    (path / "properties").write_text("".join(f"{k} {v}\n" for k, v in properties.items()))


def test_architectures_come_from_the_driver_and_others_are_refused(install, tmp_path, monkeypatch):
    install()
    node(tmp_path, 0, cpu_cores_count=96, gfx_target_version=0)
    node(tmp_path, 1, gfx_target_version=90402, simd_count=1216)
    node(tmp_path, 2, gfx_target_version=90402, simd_count=1216)
    monkeypatch.setattr(machine, "architectures", lambda found=machine.architectures: found(tmp_path / "nodes"))
    assert probe.probe().architectures == ("gfx942",)
    assert probe.probe().complete
    node(tmp_path, 10, gfx_target_version=110501)
    assert machine.gfx_name(90010) == "gfx90a"
    assert "the architecture gfx1151 is not one of gfx90a, gfx942, gfx950" in refusal()


def test_a_known_failure_narrows_what_the_backend_declares(install, monkeypatch):
    install()
    monkeypatch.setattr(machine, "architectures", lambda: ("gfx950",))
    monkeypatch.setattr(machine, "rocm_version", lambda: "7.2.1")
    report = probe.probe()
    assert [f.id for f in report.failures] == [known.KNOWN_FAILURES[0].id]
    narrowed = get_backend("aiter", pool_layout="per_layer", large_pools=False)
    assert narrowed.capabilities.features == {"decode"}


def test_the_rocm_release_is_read(tmp_path):
    file = tmp_path / "version"
    assert machine.rocm_version((file,)) is None
    file.write_text("7.2.3-38\n")
    assert machine.rocm_version((file,)) == "7.2.3"
