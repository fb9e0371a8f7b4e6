"""Generates and compiles FlashInfer's kernels from the sources inside the installed `flashinfer-python` package.

Nothing of FlashInfer is imported, at build or at run time (its Python needs torch): its `data/` tree holds headers and
templates, jinja2 renders four of them, nvcc compiles, and adapters of ours put the operands in XLA's order. No GPU is
needed to build. The result is a directory of libraries and a manifest with their SHA-256; see `modules.py` for loading.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable

from paged.backends.flashinfer.compilers import Compilers
from paged.backends.flashinfer.module_spec import CTYPES, ModuleSpec
from paged.common.errors import BackendUnavailableError, InvalidInputError

CSRC = pathlib.Path(__file__).parent / "csrc"
KERNELS = CSRC.parent / "kernels"
"""The kernels that are this project's own: modules of kind `paged`."""
HOPPER = CSRC.parent / "hopper"
"""This project's producer and schedule around FlashInfer's FA3 consumer."""
MANIFEST = "manifest.json"

_FLAGS = [
    *("-std=c++17", "-O3", "-DNDEBUG", "-use_fast_math", "-Xfatbin=-compress-all", "--compress-mode=size"),
    *(f"-DFLASHINFER_ENABLE_{x}" for x in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")),
    *("--expt-relaxed-constexpr", "-static-global-template-stub=false"),
    *("-Xcompiler", "-fPIC", "-Xcompiler", "-fvisibility=hidden", "-Xcompiler", "-ffunction-sections"),
]

# With float output the merge kernel's instance for head dim 512 does not compile; only the asked head dim is needed.
_ONE_HEAD_DIM = """#include <flashinfer/utils.cuh>
#undef DISPATCH_HEAD_DIM
#define DISPATCH_HEAD_DIM(head_dim, HEAD_DIM, ...) \\
  if (head_dim == {d}) {{ constexpr size_t HEAD_DIM = {d}; __VA_ARGS__ }} \\
  else {{ FLASHINFER_ERROR("this module was built for head_dim {d}"); }}
"""

# Custom and multi-item masks are never asked for; without their instances a module builds in half the time.
_TWO_MASKS = """#undef DISPATCH_MASK_MODE
#define DISPATCH_MASK_MODE(mask_mode, MASK_MODE, ...) \\
  if (mask_mode == MaskMode::kCausal) { constexpr MaskMode MASK_MODE = MaskMode::kCausal; __VA_ARGS__ } \\
  else { TVM_FFI_ICHECK(mask_mode == MaskMode::kNone); constexpr MaskMode MASK_MODE = MaskMode::kNone; __VA_ARGS__ }
#define DISPATCH_context"""

# Query and key tiles of FA3 by head dim, with this project's producer; other head dims take FlashInfer's whole.
_TILES = {128: (128, 128)}
_PAGED_PREFILL = """#include "paged_prefill.cuh"
#include "batch_prefill_sm90_config.inc"

namespace flashinfer {
template <>
cudaError_t BatchPrefillWithPagedKVCacheDispatched<{d}, {d}, {mask}, {window}, true, {variant}, PagedParams>(
    PagedParams& params, bool, cudaStream_t stream) {
  using Traits = AttentionKernelTraits<false, {d}, {d}, {queries}, {keys}, 2, PagedParams::DTypeQ, PagedParams::DTypeKV,
                                       PagedParams::DTypeO, PagedParams::IdType, {variant}>;
  return paged_prefill<Traits, {window}, {mask} == MaskMode::kCausal>(params, stream);
}
template <>
cudaError_t BatchPrefillWithPagedKVCacheDispatched<{d}, {d}, {mask}, {window}, false, {variant}, PagedParams>(
    PagedParams&, bool, cudaStream_t) {
  return cudaErrorNotSupported;  // plans of this project are the same for all heads
}
}  // namespace flashinfer
"""

_MASKS = ("MaskMode::kNone", "MaskMode::kCausal")


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where the sources are: `root` is the `data/` tree of the installed package, `version` the package's."""

    root: pathlib.Path
    version: str


def find_sources() -> Sources:
    """The installed `flashinfer-python`, found without importing it."""
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailableError(
            "the package flashinfer-python is not installed, and its sources are what is compiled. "
            "Run: pip install --no-deps flashinfer-python"
        ) from None
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        raise BackendUnavailableError("flashinfer-python is installed but its folder was not found.")
    root = pathlib.Path(spec.origin).parent / "data"
    if not (root / "csrc" / "batch_decode.cu").is_file():
        raise BackendUnavailableError(f"flashinfer-python {version} holds no kernel sources at {root / 'csrc'}.")
    return Sources(root, version)


def find_nvcc() -> str:
    """Path of nvcc: `$NVCC`, then the PATH, then `$CUDA_HOME/bin`."""
    for candidate in (os.environ.get("NVCC"), shutil.which("nvcc"), f"{os.environ.get('CUDA_HOME', '')}/bin/nvcc"):
        if candidate and pathlib.Path(candidate).is_file():
            return candidate
    raise BackendUnavailableError(
        "nvcc was not found on the PATH, in $NVCC or in $CUDA_HOME/bin. Install the CUDA toolkit (12.8 or newer), or "
        "build on another machine and carry the directory."
    )


def build(
    specs: Iterable[ModuleSpec],
    directory: pathlib.Path,
    *,
    arch: str = "9.0a",
    progress: Callable[[str], None] = print,
    jobs: int | None = None,
) -> pathlib.Path:
    """Compile the modules that `directory` lacks, and write its manifest.

    - `arch`: compute capability such as `9.0a`, `8.0`; `prefill_sm90` and `paged` modules need `9.0a`.
    - `jobs`: compilers at a time, by default one per core.
    - Raises `BackendUnavailableError` if nvcc or the sources are missing, or a compilation fails (with its output).
    """
    specs = sorted(set(specs), reverse=True)  # the slow ones, prefill_sm90, first
    sources, nvcc, manifest = find_sources(), find_nvcc(), _read_manifest(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for spec in specs:
        if spec.kind in ("prefill_sm90", "paged") and arch != "9.0a":
            raise InvalidInputError(f"build: module {spec.name} needs arch 9.0a, got {arch!r}.")
    missing = {
        spec: key
        for spec in specs
        if (key := module_key(spec, arch, sources.version)) != _built(manifest, spec, directory)
    }
    start = time.monotonic()
    # All modules' files go through one queue; a module is linked, and recorded, as soon as its own are compiled.
    compilers = Compilers()
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        try:
            pending = {
                spec: _compile(pool, compilers, spec, sources, nvcc, arch, directory / "generated" / spec.name)
                for spec in missing
            }
            for spec, objects in pending.items():
                file = directory / f"{spec.name}.so"
                _link(compilers, nvcc, spec, [o.result() for o in objects], file)
                manifest["modules"][spec.name] = {
                    "key": missing[spec],
                    "sha256": sha256(file),
                    "spec": dataclasses.asdict(spec),
                }
                manifest.update(arch=arch, flashinfer=sources.version, schema=1)
                (directory / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
                progress(f"{spec.name}: {file.stat().st_size >> 10} KiB, after {time.monotonic() - start:.0f} s")
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            compilers.stop()
            if isinstance(error, KeyboardInterrupt):
                done = sum(_built(manifest, spec, directory) == key for spec, key in missing.items())
                error.add_note(
                    f"{done} of {len(missing)} modules were built into {directory} and are kept; the same command "
                    f"builds the others"
                )
            raise
    shutil.rmtree(directory / "generated", ignore_errors=True)
    return directory


def _built(manifest: dict, spec: ModuleSpec, directory: pathlib.Path) -> str | None:
    """The key that the module in `directory` was built with, if its bytes are those of the manifest."""
    entry, file = manifest["modules"].get(spec.name), directory / f"{spec.name}.so"
    return entry["key"] if entry and file.is_file() and entry["sha256"] == sha256(file) else None


def module_key(spec: ModuleSpec, arch: str, version: str) -> str:
    """What a compiled module depends on: the spec, the architecture, FlashInfer's version, our adapters and flags."""
    digest = hashlib.sha256(repr((spec, arch, version, _FLAGS, _ONE_HEAD_DIM, _TWO_MASKS)).encode())
    files = sorted((KERNELS if spec.kind == "paged" else CSRC).iterdir())
    if _own_producer(spec):
        digest.update(repr((_TILES[spec.head_dim], _PAGED_PREFILL)).encode())
        files += sorted(HOPPER.iterdir())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _own_producer(spec: ModuleSpec) -> bool:
    return spec.kind == "prefill_sm90" and spec.head_dim in _TILES


def sha256(file: pathlib.Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _read_manifest(directory: pathlib.Path) -> dict:
    file = directory / MANIFEST
    return json.loads(file.read_text()) if file.is_file() else {"modules": {}}


def _template_values(spec: ModuleSpec) -> dict[str, object]:
    hopper = spec.kind == "prefill_sm90"
    where = "params.additional_params." if hopper else "params."
    scalars = ("logits_soft_cap", "sm_scale")
    declared, func, setter = "", "", []
    if not hopper:
        declared += "float* maybe_k_scale; "
        func += ", Optional<TensorView> maybe_k_scale"
        setter.append("params.maybe_k_scale = static_cast<float*>(maybe_k_scale.value().data_ptr());")
    for name in scalars:
        declared += f"double {name}; "
        func += f", double {name}"
        setter.append(f"{where}{name} = {name};")
    window, cap = (str(x).lower() for x in (spec.window, spec.soft_cap))
    if hopper:
        include, variant = (
            "<flashinfer/attention/hopper/variants.cuh>",
            "LogitsSoftCap" if spec.soft_cap else "StandardAttention",
        )
    else:
        include, variant = '"paged_variant.cuh"', f"PagedVariant<{window}, {cap}>"
    return {
        "additional_params_decl": declared,
        "additional_func_params": func,
        "additional_params_setter": " \\\n".join(setter),
        "variant_decl": f"#include {include}",
        "variant_name": variant,
        "dtype_q": CTYPES[spec.query],
        "dtype_kv": CTYPES[spec.kv],
        "dtype_o": CTYPES[spec.out],
        "idtype": "int32_t",
        "head_dim_qk": spec.head_dim,
        "head_dim_vo": spec.head_dim,
        "pos_encoding_mode": "PosEncodingMode::kNone",
        "use_sliding_window": window,
        "use_logits_soft_cap": cap,
        "use_fp16_qk_reduction": "false",
        "use_token_head_sf": "false",
        "require_fp4_kv_cache": False,
        "paged_kv_stride_mode": "equal",
        "same_kv_strides_values": ["true"],
    }


def _generate(spec: ModuleSpec, sources: Sources, where: pathlib.Path) -> list[pathlib.Path]:
    """Write the module's rendered templates; return what to compile."""
    import jinja2

    csrc, values = sources.root / "csrc", _template_values(spec)

    def render(template: str, **more: object) -> str:
        return jinja2.Template((csrc / template).read_text()).render(**values, **more)

    def write(name: str, text: str) -> pathlib.Path:
        (where / name).write_text(text)
        return where / name

    where.mkdir(parents=True, exist_ok=True)
    if spec.kind == "paged":
        write("paged_config.inc", f"#define PAGED_DTYPE {CTYPES[spec.query]}\n#define PAGED_HEAD_DIM {spec.head_dim}\n")
        return [KERNELS / "paged.cu"]
    head = _ONE_HEAD_DIM.format(d=spec.head_dim)
    if spec.kind == "append":
        return [csrc / "page.cu", CSRC / "adapter_append.cu"]
    if spec.kind == "decode":
        write("batch_decode_config.inc", render("batch_decode_customize_config.jinja"))
        kernel = write("kernel.cu", head + render("batch_decode_kernel_inst.jinja"))
        return [kernel, csrc / "batch_decode.cu", CSRC / "adapter_decode.cu"]
    hopper = spec.kind == "prefill_sm90"
    stem = "batch_prefill_sm90" if hopper else "batch_prefill"
    config = render(f"{stem}_customize_config.jinja").replace("#define DISPATCH_context", _TWO_MASKS, 1)
    write(f"{stem}_config.inc", config)
    template = "batch_prefill_paged_sm90_kernel_inst.jinja" if hopper else "batch_prefill_paged_kernel_inst.jinja"

    def instance(mask: str) -> str:
        if not _own_producer(spec):
            return head + render(template, mask_mode=mask)
        text, (queries, keys) = _PAGED_PREFILL, _TILES[spec.head_dim]
        words = {"d": spec.head_dim, "mask": mask, "queries": queries, "keys": keys}
        words |= {"window": values["use_sliding_window"], "variant": values["variant_name"]}
        for name, value in words.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text

    kernels = [write(f"kernel{i}.cu", instance(mask)) for i, mask in enumerate(_MASKS)]
    entry = csrc / ("batch_prefill_sm90.cu" if hopper else "batch_prefill_paged.cu")
    return [*kernels, entry, CSRC / ("adapter_prefill_sm90.cu" if hopper else "adapter_prefill.cu")]


def _includes(sources: Sources, where: pathlib.Path) -> list[str]:
    import tvm_ffi  # pyright: ignore[reportMissingImports]

    root = sources.root
    out = [f"-I{where}", f"-I{CSRC}", f"-I{HOPPER}"]
    out += [f"-I{root / 'cccl' / part}" for part in ("cub", "libcudacxx/include", "thrust")]
    system = [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
    system += [root / p for p in ("include", "csrc", "cutlass/include", "cutlass/tools/util/include", "spdlog/include")]
    curand = importlib.util.find_spec("nvidia")
    for folder in (curand.submodule_search_locations or []) if curand else []:
        system += sorted(pathlib.Path(folder).glob("*/include"))  # curand_kernel.h, where the toolkit lacks it
    for path in system:
        out += ["-isystem", str(path)]
    return out


def _compile(
    pool: concurrent.futures.Executor,
    compilers: Compilers,
    spec: ModuleSpec,
    sources: Sources,
    nvcc: str,
    arch: str,
    where: pathlib.Path,
) -> list[concurrent.futures.Future[str]]:
    """Queue the module's files; each future is the path of an object."""
    code = arch.replace(".", "")
    generated = _generate(spec, sources, where)
    # The module's own folder first: FlashInfer's .cu files include "batch_..._config.inc" from there.
    command = [nvcc, *_FLAGS, f"-gencode=arch=compute_{code},code=sm_{code}", *_includes(sources, where)]

    def compile_one(source: pathlib.Path) -> str:
        target = str(where / f"{source.stem}.o")
        done = compilers.run([*command, "-c", str(source), "-o", target])
        if done.returncode:
            text = (done.stdout + done.stderr)[-6000:]
            raise BackendUnavailableError(f"nvcc failed on {source.name} of module {spec.name}:\n{text}")
        return target

    return [pool.submit(compile_one, source) for source in generated]


def _link(compilers: Compilers, nvcc: str, spec: ModuleSpec, objects: list[str], target: pathlib.Path) -> None:
    # The host functions for ragged batches refer to kernels that are not built; gc-sections drops them.
    strip = ["-Xlinker", "--gc-sections", "-Xlinker", "-s"]
    link = [nvcc, "-shared", "-cudart=shared", *objects, *strip, "-o", str(target)]
    done = compilers.run(link)
    if done.returncode:
        raise BackendUnavailableError(f"linking module {spec.name} failed:\n{done.stderr[-4000:]}")
