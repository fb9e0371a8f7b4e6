"""Finding, checking and naming compiled modules; nothing here needs a GPU, nvcc or FlashInfer."""

import json
import shutil

import pytest

from paged.backends import registry
from paged.backends.flashinfer import build, modules
from paged.backends.flashinfer.module_spec import KINDS, ModuleSpec, matrix
from paged.backends.flashinfer.step_kernels import StepKernels
from paged.backends.protocol import LayerSizes
from paged.cli import main
from paged.common.errors import BackendUnavailableError, InvalidInputError

SPEC = ModuleSpec("decode", out="float32")


@pytest.fixture
def directory(tmp_path):
    (tmp_path / f"{SPEC.name}.so").write_bytes(b"not a library")
    entry = {"key": build.module_key(SPEC, "9.0a", "0.7.4"), "sha256": build.sha256(tmp_path / f"{SPEC.name}.so")}
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
    keys = {build.module_key(s, a, v) for s in (SPEC, ModuleSpec("append")) for a in ("9.0a", "8.0") for v in "12"}
    assert len(keys) == 8


def test_the_key_follows_the_sources_that_go_into_a_module_and_no_others(monkeypatch, tmp_path):
    with_producer = ModuleSpec("prefill_sm90")
    others = [ModuleSpec("prefill_sm90", head_dim=256), ModuleSpec("prefill", out="float32"), SPEC]

    def keys():
        return [build.module_key(spec, "9.0a", "1") for spec in (with_producer, *others)]

    before = keys()
    shutil.copytree(build.HOPPER, tmp_path / "hopper")
    monkeypatch.setattr(build, "HOPPER", tmp_path / "hopper")
    assert keys() == before
    (tmp_path / "hopper" / "paged_prefill.cuh").write_text("// another producer")
    assert keys()[0] != before[0]
    assert keys()[1:] == before[1:]


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
        (16, "bfloat16", {}, (1, 4)),
        (1, "float16", {"intermediate_size": 8192}, (1, 2)),
        (17, "bfloat16", {}, None),
        (16, "float32", {}, None),
        (16, "bfloat16", {"hidden_size": 576}, None),
        (16, "bfloat16", {"hidden_size": 8192}, None),
        (16, "bfloat16", {"intermediate_size": 14336 + 16}, None),
    ],
)
def test_layer_kernels_take_the_sizes_that_their_tiles_divide(tokens, dtype, sizes, splits):
    geometry = LayerSizes(**(EIGHT_B | sizes))
    found = StepKernels.fitting(lambda: "", tokens, geometry, dtype, 3, True)
    assert splits == (None if found is None else (found.output_splits, found.down_splits))


def test_the_command_lists_modules_and_refuses_unknown_ones(capsys):
    assert main(["build", "flashinfer", "--list", "--head-dims", "64,128", "--options", "none,window"]) == 0
    assert "prefill_sm90-bfloat16-bfloat16-bfloat16-64-window" in capsys.readouterr().out.splitlines()
    assert main(["build", "flashinfer", "--module", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err
    assert main(["build", "flashinfer", "--head-dims", "x"]) == 2
