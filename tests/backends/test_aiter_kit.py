"""The kit's checks on CPU: each passes on honest handlers and says what is wrong on others."""

import ctypes
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from aiter_faults import aiter, library, set_fault  # noqa: F401 (a fixture)

from conformance import kits
from conformance.executors.cpu_handlers import DEFAULT_DIRECTORY, build, sources
from conformance.kits import run
from conformance.kits.aiter import calls, process, stack, steps
from conformance.runner import Session
from paged.backends.aiter import ops
from paged.backends.aiter.contract import PREFILL, TARGETS
from paged.backends.aiter.decoded import observe
from paged.backends.protocol import KvArrays

IDS = [check.id for check in kits.select("aiter", "cpu-handlers")]


class Executor:
    """As `cpu-handlers`, with the library that this process has registered."""

    name = "cpu-handlers"

    @staticmethod
    def library():
        return build([DEFAULT_DIRECTORY / "broken.cc"], DEFAULT_DIRECTORY)


def context(backend, check, executor=Executor):
    return run.Context(check, Session(backend), executor)


@pytest.mark.parametrize("check", IDS)
def test_honest_handlers_pass(aiter, check):  # noqa: F811
    result = run.run("aiter", context(aiter, check))
    assert result.status == "pass", result.diagnosis
    json.dumps(dict(result.details))


def test_every_check_of_the_list_is_there_and_no_other():
    run.run("aiter", run.Context("kit/audit/modules", None, Executor))  # loads the modules
    listed = {check.id for check in kits.AITER.checks}
    assert listed == set(run.CHECKS)
    assert [c.id for c in kits.AITER.checks if c.opt_in] == ["kit/large/page-ids", "kit/large/bytes"]
    assert kits.select("aiter", "native") == kits.select("aiter", "cpu-handlers")
    assert {c.id for c in kits.select("aiter", "lowering-only")} == {i for i in listed if "lowering" in i}
    assert kits.select("xla", "native") == ()


def test_a_list_that_is_not_the_kit_s_is_told():
    assert kits.faults("aiter", "cpu-handlers", IDS) == []
    assert kits.faults("aiter", "cpu-handlers", IDS[1:]) == [f"kit check {IDS[0]!r} is missing"]
    assert "is not one of the kit's" in kits.faults("aiter", "cpu-handlers", [*IDS, "kit/other"])[0]
    assert "occurs twice" in kits.faults("aiter", "cpu-handlers", [*IDS, IDS[0]])[0]
    assert kits.faults("aiter", "native", [*IDS, "kit/large/bytes"]) == []


@pytest.mark.parametrize("check", ["kit/rounding/decode", "kit/rounding/prefill"])
def test_cut_off_bits_are_told_with_the_build_s_switch(aiter, check):  # noqa: F811
    set_fault("truncates")
    result = run.run("aiter", context(aiter, check))
    assert result.status == "fail"
    assert "-DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=0" in result.diagnosis


def test_a_kernel_that_depends_on_the_number_of_devices_is_found(aiter):  # noqa: F811
    set_fault("scale-from-heads")
    result = run.run("aiter", context(aiter, "kit/sharded/decode"))
    assert result.status == "fail"
    assert "sharded decode has other bits" in result.diagnosis
    hypothesis = run.run("aiter", context(aiter, "kit/sharded/prefill"))
    assert hypothesis.status == "not-claimed"
    assert "sharded prefill has other bits" in hypothesis.diagnosis
    set_fault("never-the-same")
    result = run.run("aiter", context(aiter, "kit/sharded/prefill"))
    assert result.status == "fail"
    assert "copies of the output differ between" in result.diagnosis


def test_a_copied_pool_is_found(aiter, monkeypatch):  # noqa: F811
    append = ops.append

    def copied(pool, *rest):
        barrier = jax.lax.optimization_barrier(pool.keys * jnp.bfloat16(-1))
        return append(KvArrays(barrier, pool.values), *rest)

    monkeypatch.setattr(ops, "append", copied)
    result = run.run("aiter", context(aiter, "kit/donation/decode"))
    assert result.status == "fail"
    assert "as large as the pool" in result.diagnosis


def test_large_pools_on_a_small_scale(aiter, monkeypatch):  # noqa: F811
    """The same checks with a limit of 16 pages, below which page ids are cut by a faulty handler."""
    monkeypatch.setattr(steps, "LARGE_PAGES", 24)
    monkeypatch.setattr(steps, "PAGE_LIMIT", 16)
    assert run.run("aiter", context(aiter, "kit/large/page-ids")).status == "pass"
    set_fault("page-ids-in-four-bits")
    result = run.run("aiter", context(aiter, "kit/large/page-ids"))
    assert "page 23 read as" in result.diagnosis
    assert result.details["faults"][1].startswith("prefill: page 23")


def test_what_is_taken_although_it_must_be_refused_is_told(aiter, monkeypatch):  # noqa: F811
    monkeypatch.setitem(calls.REFUSED, "kit/refused/prefill-soft-cap", [("nothing at all", lambda: None)])
    result = run.run("aiter", context(aiter, "kit/refused/prefill-soft-cap"))
    assert result.diagnosis == "nothing at all was taken: the handler must refuse it."


def test_runtimes_modules_and_architectures_are_judged(tmp_path, aiter):  # noqa: F811
    assert stack.forbidden(["jax", "torch", "transformers.models"]) == ["torch"]
    (tmp_path / "libamdhip64.so.7").write_bytes(b"one")
    (tmp_path / "libamdhip64.so.6").write_bytes(b"two")
    (tmp_path / "link.so").symlink_to(tmp_path / "libamdhip64.so.7")
    line = "7f00-7f01 r-xp 00000000 08:01 1 {}\n"
    maps = tmp_path / "maps"
    maps.write_text(line.format(tmp_path / "libamdhip64.so.7") * 2 + line.format(tmp_path / "other.so"))
    found = stack.mapped(r"libamdhip64\.so", maps)
    assert list(found) == [str(tmp_path / "libamdhip64.so.7")]
    native = context(aiter, "kit/audit/runtime")
    assert process.judge_runtimes(native, found, {}, 1).status == "pass"
    maps.write_text(maps.read_text() + line.format(tmp_path / "libamdhip64.so.6"))
    two = process.judge_runtimes(native, stack.mapped(r"libamdhip64\.so", maps), {}, 1)
    assert two.diagnosis.startswith("2 HIP runtimes are mapped, 1 expected")
    assert process.judge_runtimes(native, {}, {}, 1).diagnosis.startswith("0 HIP runtimes are mapped, 1 expected: none")
    assert "2 copies of RCCL" in process.judge_runtimes(native, found, {"a": "", "b": ""}, 1).diagnosis
    assert process.judge_architectures(native, ["gfx942"], 8).status == "pass"
    assert "gfx1151" in process.judge_architectures(native, ["gfx1151"], 1).diagnosis
    assert "unknown" in process.judge_architectures(native, [], 1).diagnosis


VENDOR_LIKE = """
#include <string_view>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
using B = ffi::AnyBuffer;
template <typename F, typename I>
ffi::Error Run(void*, B, B, B, B, B, B, B, ffi::Result<B>, F, float, I, int64_t, bool, int64_t, int64_t) {
  std::abort();  // never reached: a CPU has no stream
}
ffi::Error Fewer(void*, B, ffi::Result<B>, float) { std::abort(); }
ffi::Error Gone(void*, B, B, B, B, B, B, B, ffi::Result<B>, float) { std::abort(); }
#define SEVEN Ctx<ffi::PlatformStream<void*>>().Arg<B>().Arg<B>().Arg<B>().Arg<B>().Arg<B>().Arg<B>().Arg<B>().Ret<B>()
#define PREFILL(Name, F, I)                                                                             \\
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Name, (Run<F, I>), ffi::Ffi::Bind().SEVEN.Attr<F>("scale")              \\
      .Attr<float>("logits_soft_cap").Attr<I>("max_seqlen_q").Attr<int64_t>("max_seqlen_k")             \\
      .Attr<bool>("causal").Attr<int64_t>("window_size_left").Attr<int64_t>("window_size_right"))
#pragma GCC visibility push(default)
PREFILL(Same, float, int64_t);
PREFILL(Double, double, int64_t);
PREFILL(Both, double, int32_t);
XLA_FFI_DEFINE_HANDLER_SYMBOL(FewerArrays, Fewer,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Arg<B>().Ret<B>().Attr<float>("scale"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(FewerAttributes, Gone, ffi::Ffi::Bind().SEVEN.Attr<float>("scale"));
#pragma GCC visibility pop
"""


@functools.cache
def vendor_like(folder):
    (folder / "vendor.cc").write_text(VENDOR_LIKE)
    return ctypes.CDLL(str(build(sources(folder), folder)))


@pytest.mark.parametrize(
    ("symbol", "differences"),
    [
        ("Same", []),
        ("Double", ["it reads attribute scale as f64, the contract has f32"]),
        (
            "Both",
            [
                "it reads attribute scale as f64, the contract has f32",
                "it reads attribute max_seqlen_q as i32, the contract has i64",
            ],
        ),
        ("FewerArrays", ["it takes 1 arguments, the contract has 7"]),
        ("FewerAttributes", ["it takes 1 attributes, the contract has 7"]),
    ],
)
def test_a_compiled_handler_tells_what_it_decodes_without_running(tmp_path_factory, symbol, differences):
    folder = tmp_path_factory.getbasetemp() / "vendor-like"
    folder.mkdir(exist_ok=True)
    found, said = observe(PREFILL, getattr(vendor_like(folder), symbol))
    assert said == differences
    assert (found == PREFILL.contract_id) == (symbol == "Same")
    assert found.startswith("PagedPrefillJA:")
    assert (found == "PagedPrefillJA:unknown") == (symbol == "FewerAttributes")


def test_the_handlers_that_serve_here_decode_by_the_contract():
    for name, target in TARGETS.items():
        assert observe(target, getattr(library(), name)) == (target.contract_id, []), name
