"""Finding, checking and naming compiled modules; nothing here needs a GPU, nvcc or FlashInfer."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import pytest

from paged import AttentionSpec, build_page_table
from paged.backends import registry
from paged.backends.flashinfer import build, generate, modules
from paged.backends.flashinfer.module_spec import KINDS, ModuleSpec, matrix, own
from paged.backends.flashinfer.step_kernels import StepKernels
from paged.backends.metadata import table_arrays
from paged.backends.protocol import AttentionExtras, KvArrays, LayerSizes, Rung
from paged.backends.step import attention_step, plan_step
from paged.cli import main
from paged.common.errors import BackendUnavailableError, InvalidInputError

SPEC = ModuleSpec("decode", out="float32")


@pytest.fixture
def directory(tmp_path):
    (tmp_path / f"{SPEC.name}.so").write_bytes(b"not a library")
    entry = {"key": generate.module_key(SPEC, "9.0a", "0.7.4"), "sha256": build.sha256(tmp_path / f"{SPEC.name}.so")}
    write(tmp_path, entry)
    return tmp_path


def write(directory, entry):
    manifest = {"arch": "9.0a", "flashinfer": "0.7.4", "schema": 1, "modules": {SPEC.name: entry}}
    (directory / build.MANIFEST).write_text(json.dumps(manifest))


def test_a_missing_directory_names_the_build_command(tmp_path):
    with pytest.raises(BackendUnavailableError, match="paged build flashinfer --output"):
        modules.ffi_target(SPEC, tmp_path / "nowhere")


def test_a_module_that_is_not_built_is_named_with_those_that_are(directory):
    other = ModuleSpec("decode", out="float32", window=True)
    with pytest.raises(BackendUnavailableError, match=f"{other.name} is not built.*{SPEC.name}"):
        modules.ffi_target(other, directory)


def test_a_library_with_other_bytes_is_not_loaded(directory):
    (directory / f"{SPEC.name}.so").write_bytes(b"not a librarY")
    with pytest.raises(BackendUnavailableError, match="SHA-256"):
        modules.ffi_target(SPEC, directory)


def test_a_module_of_another_release_is_not_loaded(directory):
    write(directory, {"key": "0" * 16, "sha256": build.sha256(directory / f"{SPEC.name}.so")})
    with pytest.raises(BackendUnavailableError, match="another release"):
        modules.ffi_target(SPEC, directory)


def test_every_option_is_in_the_name():
    specs = matrix()
    assert len({spec.name for spec in specs}) == len(set(specs))
    assert {spec.kind for spec in specs} == set(KINDS)
    assert not [spec for spec in specs if spec.kind == "prefill_sm90" and spec.kv != spec.query]


def test_the_key_follows_spec_architecture_and_version():
    keys = {generate.module_key(s, a, v) for s in (SPEC, ModuleSpec("append")) for a in ("9.0a", "8.0") for v in "12"}
    assert len(keys) == 8


def test_the_key_follows_the_sources_that_go_into_a_module_and_no_others(monkeypatch, tmp_path):
    with_producer = ModuleSpec("prefill_sm90")
    others = [ModuleSpec("prefill_sm90", head_dim=256), ModuleSpec("prefill", out="float32"), SPEC]

    def keys():
        return [generate.module_key(spec, "9.0a", "1") for spec in (with_producer, *others)]

    before = keys()
    shutil.copytree(generate.HOPPER, tmp_path / "hopper")
    monkeypatch.setattr(generate, "HOPPER", tmp_path / "hopper")
    assert keys() == before
    (tmp_path / "hopper" / "paged_prefill.cuh").write_text("// another producer")
    assert keys()[0] != before[0]
    assert keys()[1:] == before[1:]


def test_the_key_follows_the_adapter_of_its_kind_alone(monkeypatch, tmp_path):
    specs = [ModuleSpec(kind, out="float32") for kind in ("append", "decode", "prefill")]
    specs += [ModuleSpec("prefill_sm90", head_dim=64), own("bfloat16", 128)]
    before = [generate.module_key(spec, "9.0a", "1") for spec in specs]
    for name in ("CSRC", "FA3"):
        shutil.copytree(getattr(generate, name), tmp_path / name)
        monkeypatch.setattr(generate, name, tmp_path / name)
    for file, kinds in (
        ("CSRC/adapter_decode.cu", ["decode"]),
        ("CSRC/adapter_prefill.cu", ["prefill"]),
        ("CSRC/adapter_prefill_sm90.cu", ["prefill_sm90"]),
        ("CSRC/paged_variant.cuh", ["append", "decode", "prefill"]),
        ("FA3/cutlass/gemm/collective/collective_builder.hpp", ["prefill_sm90"]),
    ):
        text = (tmp_path / file).read_text()
        (tmp_path / file).write_text(text + "// more")
        after = [generate.module_key(spec, "9.0a", "1") for spec in specs]
        assert [spec.kind for spec, old, new in zip(specs, before, after) if old != new] == kinds, file
        (tmp_path / file).write_text(text)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A package whose templates say what they were rendered with, and a compiler that fails on 8-bit pools."""
    csrc = tmp_path / "data" / "csrc"
    csrc.mkdir(parents=True)
    for stem in ("batch_decode", "batch_prefill", "batch_prefill_sm90"):
        (csrc / f"{stem}_customize_config.jinja").write_text("// {{ variant_name }}\n#define DISPATCH_context\n")
    (csrc / "batch_decode_kernel_inst.jinja").write_text("// {{ head_dim_qk }} {{ dtype_kv }}")
    (csrc / "batch_prefill_paged_kernel_inst.jinja").write_text("auto use_custom_mask = {{ mask_mode }};")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\ncase "$*" in *e4m3*) echo "no such type" >&2; exit 1;; esac\n')
    nvcc.write_text(nvcc.read_text() + 'while [ "$1" != -o ]; do shift; done; echo library > "$2"\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("NVCC", str(nvcc))
    found = generate.Sources(tmp_path / "data", "1")
    monkeypatch.setattr(build, "find_sources", lambda: found)
    monkeypatch.setattr(build, "includes", lambda *_: [])
    return found


def test_a_source_has_kernels_for_both_masks_host_code_and_the_adapter_of_its_kind(sources, tmp_path):
    pytest.importorskip("jinja2")
    for spec in matrix(dtypes=["bfloat16"], head_dims=[64, 128]):
        text = generate.generate(spec, sources, tmp_path / spec.name).read_text()
        if spec.kind == "paged":
            continue
        assert f'#include "adapter_{spec.kind}.cu"' in text
        assert {m in text for m in generate._MASKS} == {spec.kind.startswith("prefill")}
        assert not re.search(r"{(d|mask|window|variant|queries|keys|batch|same)}", text), "a word was not filled in"
        if spec.kind != "append":
            (config,) = (tmp_path / spec.name).glob("*.inc")
            assert ("MaskMode::kCausal" in config.read_text()) == spec.kind.startswith("prefill")


def test_a_module_that_does_not_compile_leaves_the_others_built(sources, tmp_path):
    pytest.importorskip("jinja2")
    good, bad = SPEC, ModuleSpec("prefill", kv="float8_e4m3fn", out="float32")  # which is compiled first
    said = []
    with pytest.raises(BackendUnavailableError, match=f"{bad.name}(.|\n)*no such type"):
        build.build([bad, good], tmp_path / "out", progress=said.append, jobs=1)
    assert sorted(line.split(":")[0] for line in said) == sorted([good.name, bad.name])
    manifest = json.loads((tmp_path / "out" / build.MANIFEST).read_text())
    assert list(manifest["modules"]) == [good.name]
    said.clear()
    build.build([good], tmp_path / "out", progress=said.append)
    assert said == [], "built again"


def trace_step(of, *, query_lens, kv_dtype="bfloat16", head_dim=64, sinks=None, **options):
    """Modules that a step asks for."""
    spec = AttentionSpec(scale=1.0, **options)
    table = build_page_table(
        query_lens=query_lens, kv_lens=[20, 20], pages=[[1, 2], [3, 4]], tokens_per_page=16, num_pages=5
    )  # fmt: skip
    rung = Rung.of(table).with_heads(group_size=2, head_dim=head_dim, kv_dtype=kv_dtype)
    pool = KvArrays(*jnp.zeros((2, 5, 16, 2, head_dim), kv_dtype))
    query = jnp.zeros((sum(query_lens), 4, head_dim), jnp.bfloat16)
    new = query[:, :2].astype(kv_dtype)

    def step(query, new, pool, arrays):
        plan = plan_step(of, arrays, rung, spec)
        return attention_step(of, plan, pool, query, new, new, layer=0, extras=AttentionExtras(sinks=sinks))

    with modules.asked() as found:
        jax.eval_shape(step, query, new, pool, table_arrays(table))
    return found


OPTIONS = [{}, {"window": 8}, {"soft_cap": 30.0}, {"window": 8, "soft_cap": 30.0}]


@pytest.mark.parametrize("tier", ["exact", "fast"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("decode", ["paged", "flashinfer"])
@pytest.mark.parametrize("prefill", ["fa3", "fa2"])
def test_a_module_without_an_option_of_the_call_is_never_chosen(tier, kv_dtype, decode, prefill):
    of = registry.get_backend("flashinfer", tier=tier, decode=decode, prefill=prefill, sm_count=132)
    kinds = set()
    for options in OPTIONS:
        for query_lens in ([1, 1], [1, 20]):
            for sinks in (None, jnp.zeros(4)):
                found = trace_step(of, query_lens=query_lens, kv_dtype=kv_dtype, sinks=sinks, **options)
                compiled_in = {x for x in found if x.kind not in ("append", "paged")}  # the others take them per call
                assert {(x.window, x.soft_cap) for x in compiled_in} <= {("window" in options, "soft_cap" in options)}
                assert {x.kv for x in compiled_in} <= {kv_dtype}
                assert found <= set(matrix()), "a module outside the matrix"
                kinds |= {x.kind for x in found}
    assert "append" in kinds
    assert ("paged" in kinds) == (decode == "paged" and kv_dtype == "bfloat16")
    assert ("prefill_sm90" in kinds) == (prefill == "fa3" and kv_dtype == "bfloat16")


def test_what_is_asked_outside_must_be_built(tmp_path):
    with modules.asked() as found:
        modules.ffi_target(SPEC, tmp_path)
    assert found == {SPEC}
    with pytest.raises(BackendUnavailableError, match="no FlashInfer modules"):
        modules.ffi_target(SPEC, tmp_path)


def test_missing_sources_and_compiler_are_named(tmp_path, monkeypatch):
    def missing(name):
        raise build.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(build.importlib.metadata, "version", missing)
    with pytest.raises(BackendUnavailableError, match="pip install --no-deps flashinfer-python"):
        build.find_sources()
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    for variable in ("NVCC", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(BackendUnavailableError, match="nvcc was not found"):
        build.find_nvcc()


def test_options_are_validated_by_name():
    wrong = [{"tier": "best"}, {"decode": "mine"}, {"layers": "all"}, {"prefill": "fa4"}, {"prefill_tile": 32}]
    for options in wrong:
        (field,) = options
        with pytest.raises(InvalidInputError, match=field):
            registry.get_backend("flashinfer", **options)
    assert registry.get_backend("flashinfer", tier="fast").capabilities.decode_numerics == "N1"


EIGHT_B = {"hidden_size": 4096, "intermediate_size": 14336, "num_query_heads": 32, "num_kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("tokens", "dtype", "sizes", "splits"),
    [
        (16, "bfloat16", {}, (None, 1, 4)),
        (1, "float16", {"intermediate_size": 8192}, (None, 1, 2)),
        (17, "bfloat16", {}, (2, 2, 4)),
        (64, "float16", {"hidden_size": 8192, "num_query_heads": 64, "intermediate_size": 28672}, (2, 2, 4)),
        (64, "bfloat16", {"intermediate_size": 576}, (2, 2, 3)),
        (64, "bfloat16", {"hidden_size": 576, "num_query_heads": 3, "num_kv_heads": 1}, (3, 3, 4)),
        (65, "bfloat16", {}, None),
        (17, "float32", {}, None),
        (17, "bfloat16", {"hidden_size": 4096 + 32}, None),
        (17, "bfloat16", {"hidden_size": 16384 + 64}, None),
        (16, "float32", {}, None),
        (16, "bfloat16", {"hidden_size": 576}, None),
        (16, "bfloat16", {"hidden_size": 8192}, None),
        (16, "bfloat16", {"intermediate_size": 14336 + 16}, None),
    ],
)
def test_layer_kernels_take_the_sizes_that_their_tiles_divide(tokens, dtype, sizes, splits):
    geometry = LayerSizes(**(EIGHT_B | sizes))
    found = StepKernels.fitting(lambda: "", tokens, geometry, dtype, 3, True)
    assert splits == (None if found is None else (found.qkv_splits, found.output_splits, found.down_splits))


def test_the_command_lists_modules_and_refuses_unknown_ones(capsys):
    assert main(["build", "flashinfer", "--list", "--head-dims", "64,128", "--options", "none,window"]) == 0
    assert "prefill_sm90-bfloat16-bfloat16-bfloat16-64-window" in capsys.readouterr().out.splitlines()
    assert main(["build", "flashinfer", "--module", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err
    assert main(["build", "flashinfer", "--head-dims", "x"]) == 2


def test_the_command_lists_what_a_level_of_certify_asks_for(capsys):
    assert main(["build", "flashinfer", "--list", "--for-certify", "move"]) == 0
    assert capsys.readouterr().out.split() == ["append"]
    with pytest.raises(SystemExit):
        main(["build", "flashinfer", "--list", "--for-certify", "everything"])
    assert "serving" in capsys.readouterr().err


def test_options_of_the_command_that_do_not_go_together_are_refused(capsys):
    for options, words in (
        (["--module", "append", "--for-certify", "move"], "not allowed with argument --module"),
        (["--jobs", "-1"], "must be a whole number, got '-1'"),
    ):
        with pytest.raises(SystemExit):
            main(["build", "flashinfer", "--list", *options])
        assert words in capsys.readouterr().err
