"""The native handlers on CPU: XLA's own decoding of attributes and aliases, what they refuse, sharded against whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aiter_faults import aiter, library, set_fault  # noqa: F401 (a fixture)

from conformance import execute
from conformance.catalogue import load
from conformance.executors import make_executor
from conformance.executors.cpu_handlers import CpuHandlers, build, find_compiler, sources
from conformance.relations import Mesh
from conformance.runner import Session, mesh_sharding
from conformance.vectors import generate
from paged.backends.aiter import probe
from paged.backends.aiter.contract import APPEND, DECODE, PREFILL, TARGETS
from paged.backends.aiter.plan import func_name, workspace_bytes
from paged.backends.aiter.targets import provide
from paged.backends.protocol import Rung
from paged.common.errors import BackendUnavailableError, InvalidInputError

B, T, N, P, HK, HQ, D = 2, 3, 6, 16, 2, 8, 128
RUNG = Rung(
    rows=B, tokens=B, listed_pages=8, max_query_len=1, max_kv_len=256, tokens_per_page=P, num_pages=N
).with_heads(group_size=HQ // HK, head_dim=D, kv_dtype="bfloat16")  # fmt: skip
OTHER_GROUP = func_name(RUNG.with_heads(group_size=8, head_dim=D, kv_dtype="bfloat16"), 1)
ONE = jnp.ones(1, jnp.float32)


def bf16(*shape):
    return jnp.ones(shape, jnp.bfloat16)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def run(target, results, operands, aliases=None, **attributes):
    aliases = dict(target.aliases) if aliases is None else aliases
    call = jax.ffi.ffi_call(target.name, results, input_output_aliases=aliases)
    return jax.block_until_ready(jax.jit(lambda *a: call(*a, **attributes))(*operands))


def append(aliases=None, slots=(0, 5, -1), **attributes):
    pools = (bf16(N, P, HK, D), bf16(N, P, HK, D))
    structs = tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools)
    operands = (bf16(T, HK, D), bf16(T, HK, D), ints(*slots), ONE, ONE, *pools)
    return run(APPEND, structs, operands, aliases, **{"kv_cache_dtype": "auto", **attributes})


def decode(indptr=(0, 1, 2), indices=(1, 2, 0, 0), last=(3, 16), workspace=None, **attributes):
    size = workspace_bytes(B, HQ, D, 1, 2) if workspace is None else workspace
    given = {"scale": np.float32(1), "logits_soft_cap": np.float32(0), "max_num_partitions": np.int64(1)}
    given |= {"func_name": func_name(RUNG, 1), **attributes}
    operands = (bf16(B, HQ, D), bf16(N, P, HK, D), bf16(N, P, HK, D), ints(*indptr), ints(*indices), ints(*last))
    out = jax.ShapeDtypeStruct((B, HQ, D), jnp.bfloat16)
    return run(DECODE, (out,), (*operands, ONE, ONE, jnp.zeros(size, jnp.uint8)), **given)[0]


def prefill(offsets=(0, 2, 3), indptr=(0, 1, 2), indices=(1, 2, 0, 0), last=(3, 16), **attributes):
    given = {
        "scale": np.float32(1), "logits_soft_cap": np.float32(0), "max_seqlen_q": np.int64(2), "causal": True,
        "max_seqlen_k": np.int64(16), "window_size_left": np.int64(-1), "window_size_right": np.int64(-1), **attributes,
    }  # fmt: skip
    operands = (bf16(T + 1, HQ, D), bf16(N, P, HK, D), bf16(N, P, HK, D), ints(*offsets), ints(*indptr))
    out = jax.ShapeDtypeStruct((T + 1, HQ, D), jnp.bfloat16)
    return run(PREFILL, (out,), (*operands, ints(*indices), ints(*last)), **given)[0]


@pytest.fixture(autouse=True)
def honest():
    set_fault("")


def test_calls_by_the_contract_are_taken():
    assert (np.asarray(decode(), np.float32) == 1).all()
    out = np.asarray(prefill(), np.float32)
    assert (out[:3] == 1).all()
    assert np.isnan(out[3]).all()  # what the vendor leaves unwritten
    append()


@pytest.mark.parametrize(
    ("call", "change", "said"),
    [
        # Widths: XLA's own decoding, the same headers as on ROCm.
        (decode, {"scale": 1.0}, "failed to decode"),
        (decode, {"scale": np.float64(1)}, "failed to decode"),
        (decode, {"max_num_partitions": np.int32(1)}, "failed to decode"),
        (prefill, {"max_seqlen_k": np.int32(16)}, "failed to decode"),
        (prefill, {"causal": np.int64(1)}, "failed to decode"),
        (append, {"kv_cache_dtype": np.int64(0)}, "failed to decode"),
        # What the vendor's handlers refuse.
        (append, {"aliases": {}}, "input_output_aliases was not honoured"),
        (append, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype is not auto"),
        (decode, {"workspace": 8}, "workspace is 8 bytes, need"),
        (decode, {"func_name": "pa_ragged_0"}, "is not compiled into this module"),
        (decode, {"func_name": OTHER_GROUP}, "func_name is another configuration's"),
        (prefill, {"logits_soft_cap": np.float32(30)}, "no batch-prefill kernel matches"),
        # What they would suffer from, or read out of bounds for.
        (append, {"slots": (0, N * P, -1)}, "token 1 is aimed at slot 96 of 96"),
        (decode, {"indptr": (0, 1, 1)}, "row 1 is empty"),
        (decode, {"indices": (1, 2)}, "read one past it"),
        (decode, {"indices": (1, 2, -1, 0)}, "entry 2 of the page list is page -1 of 6"),
        (decode, {"last": (0, 16)}, "row 0 has a last page length of 0"),
        (prefill, {"offsets": (0, 3, 3)}, "row 0 has more queries than max_seqlen_q"),
        (prefill, {"max_seqlen_k": np.int64(0), "last": (1, 1), "indptr": (0, 1, 3)}, "longer than max_seqlen_k"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(call, change, said):
    with pytest.raises(Exception, match=r"(?i)" + said):
        call(**change)


def test_a_soft_cap_is_ignored_by_decode_which_is_why_the_backend_refuses_it():
    capped = decode(logits_soft_cap=np.float32(1))
    assert (np.asarray(capped) == np.asarray(decode())).all()


CASES = {case.id: case for case in load().cases}
MESHES = (
    Mesh({"tensor": 2}, ("tensor",)),
    Mesh({"tensor": 8}, ("tensor",)),
    Mesh({"data": 2, "expert": 2, "model": 2}, ("model", "expert")),
)


@pytest.mark.parametrize("case", ["sharded/generic/d128/tensor8", "sharded/donation/d128/tensor8"])
def test_sharded_steps_have_the_bits_of_one_device_and_stay_in_place(aiter, case):  # noqa: F811
    """Random values, a mixed batch and a decode batch: output and pools, on meshes of one and three axes."""
    problem = generate(CASES[case], "finite").problem
    whole = execute.attend(aiter, problem)
    for mesh in MESHES:
        sharding = mesh_sharding(mesh)
        arguments = execute.attend_arguments(aiter, problem, sharding=sharding)
        before = [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(arguments[1]) for s in x.addressable_shards]
        out, lse, pool = jax.block_until_ready(execute.run_attend(*arguments))
        after = [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(pool) for s in x.addressable_shards]
        assert after == before, str(mesh)
        split = execute.collect(aiter, problem, out, lse, lambda p=pool: execute.fetch(aiter, problem, p))
        assert (split.out == whole.out).all(), str(mesh)
        assert (split.keys == whole.keys).all(), str(mesh)
        assert (split.values == whole.values).all(), str(mesh)


@pytest.mark.parametrize("case", ["attend/address/bf16/d128/mixed", "attend/address/bf16/d128/decode"])
def test_a_stacked_pool_is_read_at_its_layer(aiter, case):  # noqa: F811
    """One array for all layers: page ids are moved to the layer's, sentinel and padding too."""
    stacked = dataclasses.replace(aiter, pool_layout="stacked")
    assert CASES[case].params["layer"] == 1
    result = Session(stacked).run(CASES[case])
    assert result.status == "pass", result.diagnosis


def test_another_provider_of_a_name_and_an_unknown_one_are_refused():
    library()
    with pytest.raises(InvalidInputError, match="is registered for cpu by tests; someone comes too late"):
        provide("AppendKvJA", platform="cpu", provider="someone")
    with pytest.raises(InvalidInputError, match="target 'Other' is not one of"):
        provide("Other", platform="cpu", provider="someone")
    with pytest.raises(InvalidInputError, match="platform must be one of rocm, cpu"):
        provide("AppendKvJA", platform="cuda", provider="someone")
    report = probe.probe("cpu")
    assert report.complete
    assert {t.provider for t in report.targets.values()} == {"tests"}
    assert report.targets.keys() == TARGETS.keys()


def test_no_compiler_and_no_sources_are_errors_with_the_next_step(tmp_path, monkeypatch):
    with pytest.raises(BackendUnavailableError, match=r"no C\+\+ compiler 'nowhere'.*apt-get install"):
        find_compiler("nowhere")
    monkeypatch.setenv("CXX", "missing-compiler")
    with pytest.raises(BackendUnavailableError, match="missing-compiler"):
        CpuHandlers().start()
    with pytest.raises(BackendUnavailableError, match="--executor-option directory=DIR"):
        sources(tmp_path)
    (tmp_path / "a.cc").write_text("this is not C++")
    monkeypatch.delenv("CXX")
    with pytest.raises(BackendUnavailableError, match="the handlers do not compile"):
        CpuHandlers(directory=tmp_path).start()


def test_executors_are_a_closed_list_and_serve_one_backend():
    with pytest.raises(InvalidInputError, match="executor 'other' is not one of native, cpu-handlers"):
        make_executor("other", "aiter", {})
    with pytest.raises(InvalidInputError, match=r"does not take these options.*colour"):
        make_executor("cpu-handlers", "aiter", {"colour": "red"})
    with pytest.raises(InvalidInputError, match="serves the backend 'aiter', not 'xla'"):
        make_executor("lowering-only", "xla", {})
    assert make_executor("native", "aiter", {}).start() == {}


def test_a_library_that_was_changed_is_built_anew(tmp_path, monkeypatch):
    """What is loaded is what was built: its SHA-256 was written down then (requirement X5)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.cc").write_text('extern "C" int answer() { return 42; }\n')
    built = build([tmp_path / "a.cc"], tmp_path)
    sound = built.read_bytes()
    assert build([tmp_path / "a.cc"], tmp_path) == built
    built.write_bytes(sound + b"more")
    assert build([tmp_path / "a.cc"], tmp_path).read_bytes() == sound
    (built.parent / "manifest.json").write_text("{")
    assert build([tmp_path / "a.cc"], tmp_path).read_bytes() == sound
    (tmp_path / "b.h").write_text("// another header\n")
    assert build([tmp_path / "a.cc"], tmp_path) != built
