"""The source of a module: one file that has its kernels, FlashInfer's host code and our adapter.

One, because reading the headers costs more than most kernels: in four files, a module took the compiler three times as
long. Templates that FlashInfer's host code names and nobody calls are cut off by specialisations that refuse.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping

from paged.backends.flashinfer.module_spec import CTYPES, ModuleSpec

CSRC = pathlib.Path(__file__).parent / "csrc"
KERNELS = CSRC.parent / "kernels"
"""The kernels that are this project's own: modules of kind `paged`."""
HOPPER = CSRC.parent / "hopper"
"""This project's producer and schedule around FlashInfer's FA3 consumer."""
FA3 = CSRC.parent / "fa3"
"""Headers in the place of CUTLASS's, with the part that FA3 takes."""

FLAGS = [
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
_PAGED_PREFILL = """
template <>
cudaError_t BatchPrefillWithPagedKVCacheDispatched<{d}, {d}, {mask}, {window}, true, {variant}, PagedParams>(
    PagedParams& params, bool, cudaStream_t stream) {
  using Traits = AttentionKernelTraits<false, {d}, {d}, {queries}, {keys}, 2, PagedParams::DTypeQ, PagedParams::DTypeKV,
                                       PagedParams::DTypeO, PagedParams::IdType, {variant}>;
  return paged_prefill<Traits, {window}, {mask} == MaskMode::kCausal>(params, stream);
}
"""
_FLASHINFERS_PREFILL = """
template cudaError_t
BatchPrefillWithPagedKVCacheDispatched<{d}, {d}, {mask}, {window}, true, {variant}, PagedParams>(
    PagedParams&, bool, cudaStream_t);
"""
# Plans of this project are the same for all heads, and its batches are paged.
_NEVER_CALLED = """
template <>
cudaError_t BatchPrefillWith{batch}KVCacheDispatched<{d}, {d}, {mask}, {window}, {same}, {variant}, {batch}Params>(
    {batch}Params&, bool, cudaStream_t) {
  return cudaErrorNotSupported;
}
"""

_MASKS = ("MaskMode::kNone", "MaskMode::kCausal")
_FORM = "one file"
"""How a source is put together, in words that change when that does: a part of every key."""


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where the sources are: `root` is the `data/` tree of the installed package, `version` the package's."""

    root: pathlib.Path
    version: str


def module_key(spec: ModuleSpec, arch: str, version: str) -> str:
    """What a compiled module depends on: the spec, the architecture, FlashInfer's version, our sources and flags."""
    digest = hashlib.sha256(repr((_FORM, spec, arch, version, FLAGS, _ONE_HEAD_DIM, _TWO_MASKS)).encode())
    files = [CSRC / f"adapter_{spec.kind}.cu", CSRC / "paged_variant.cuh"]
    if spec.kind == "paged":
        files = sorted(KERNELS.iterdir())
    if spec.kind == "prefill_sm90":
        digest.update(repr((_FLASHINFERS_PREFILL, _NEVER_CALLED)).encode())
        files = files[:1] + sorted(file for file in FA3.rglob("*") if file.is_file())
    if _own_producer(spec):
        digest.update(repr((_TILES[spec.head_dim], _PAGED_PREFILL)).encode())
        files += sorted(HOPPER.iterdir())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def generate(spec: ModuleSpec, sources: Sources, where: pathlib.Path) -> pathlib.Path:
    """Write the module's source and what it includes to `where`; return the file to compile."""
    import jinja2

    csrc, values = sources.root / "csrc", _template_values(spec)

    def render(template: str) -> str:
        return jinja2.Template((csrc / template).read_text()).render(**values)

    where.mkdir(parents=True, exist_ok=True)
    if spec.kind == "paged":
        config = f"#define PAGED_DTYPE {CTYPES[spec.query]}\n#define PAGED_HEAD_DIM {spec.head_dim}\n"
        (where / "paged_config.inc").write_text(config)
        return KERNELS / "paged.cu"
    stem = {"prefill": "batch_prefill", "prefill_sm90": "batch_prefill_sm90", "decode": "batch_decode"}.get(spec.kind)
    if stem:
        config = render(f"{stem}_customize_config.jinja")
        if spec.kind != "decode":
            config = config.replace("#define DISPATCH_context", _TWO_MASKS, 1)
        (where / f"{stem}_config.inc").write_text(config)
    if spec.kind == "append":
        kernels, host = "", "page.cu"
    elif spec.kind == "decode":
        kernels, host = render("batch_decode_kernel_inst.jinja"), "batch_decode.cu"
    elif spec.kind == "prefill":
        template = "batch_prefill_paged_kernel_inst.jinja"
        kernels, host = jinja2.Template((csrc / template).read_text()), "batch_prefill_paged.cu"
        # One template defines a constant of its mask; it is renamed in the second.
        kernels = "\n".join(
            kernels.render(**values, mask_mode=mask).replace("use_custom_mask", f"use_custom_mask_{i}")
            for i, mask in enumerate(_MASKS)
        )
    else:
        kernels, host = _hopper_kernels(spec, values), "batch_prefill_sm90.cu"
    head = _ONE_HEAD_DIM.format(d=spec.head_dim) if stem else ""
    first = '#include "cutlass_of_fa3.cuh"\n' if spec.kind == "prefill_sm90" else ""
    source = where / "module.cu"
    source.write_text(f'{first}{head}{kernels}\n#include <{host}>\n#include "adapter_{spec.kind}.cu"\n')
    return source


def includes(sources: Sources, where: pathlib.Path) -> list[str]:
    """Arguments of nvcc that name the folders of headers."""
    import tvm_ffi  # pyright: ignore[reportMissingImports]

    root = sources.root
    # The module's own folder first: FlashInfer's .cu files include "batch_..._config.inc" from there.
    out = [f"-I{folder}" for folder in (where, CSRC, HOPPER, FA3)]
    out += [f"-I{root / 'cccl' / part}" for part in ("cub", "libcudacxx/include", "thrust")]
    system = [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
    system += [root / part for part in ("include", "csrc", "cutlass/include")]
    for path in system:
        out += ["-isystem", str(path)]
    return out


def _own_producer(spec: ModuleSpec) -> bool:
    return spec.kind == "prefill_sm90" and spec.head_dim in _TILES


def _hopper_kernels(spec: ModuleSpec, values: dict[str, object]) -> str:
    own = _own_producer(spec)
    header = '"paged_prefill.cuh"' if own else "<flashinfer/attention/hopper/prefill_sm90.cuh>"
    queries, keys = _TILES.get(spec.head_dim, (0, 0))
    text = f'#include {header}\n#include "batch_prefill_sm90_config.inc"\n\nnamespace flashinfer {{\n'
    for mask in _MASKS:
        words = {"d": spec.head_dim, "mask": mask, "queries": queries, "keys": keys}
        words |= {"window": values["use_sliding_window"], "variant": values["variant_name"]}
        text += _filled(_PAGED_PREFILL if own else _FLASHINFERS_PREFILL, words)
        for batch, same in (("Paged", "false"), ("Ragged", "true"), ("Ragged", "false")):
            text += _filled(_NEVER_CALLED, words | {"batch": batch, "same": same})
    return text + "\n}  // namespace flashinfer\n"


def _filled(template: str, words: Mapping[str, object]) -> str:
    for name, value in words.items():
        template = template.replace(f"{{{name}}}", str(value))
    return template


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
