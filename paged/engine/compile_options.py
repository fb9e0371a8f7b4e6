"""XLA options that a step is compiled with, and why.

Measured on an H200 with a Llama-3.1-8B geometry at batch 16 and context 1024: with XLA's defaults, a scan over layers
copies each layer's weights out of the stacked array before its matrix products, and a step takes 12.5 ms; with the two
options below cuBLAS reads the slice in place and the step takes 5.5 ms, what an unrolled program takes, while compiling
in a second at any depth.

On a CPU, XLA hands sums and exponentials of 4096 elements and more to another library, which gives other bits: a row's
log probability then depends on how many rows are beside it. Where kernels run all layers, one row must not show in
another, and XLA keeps what is left: at 32 rows and a vocabulary of 49,152 that is 1.5 to 2 ms of a step of 130 ms, and
25 ms where top_p is asked for.
"""

from __future__ import annotations

import os

_GPU = {"xla_gpu_enable_dynamic_slice_fusion": True, "xla_gpu_enable_triton_gemm": False}
_CPU_KERNELS = {"xla_cpu_experimental_ynn_fusion_type": ""}


def compiler_options(platform: str, *, kernels: bool = False) -> dict[str, bool | str]:
    """Options for `jax.jit(compiler_options=…)` on a jax platform; whatever `$XLA_FLAGS` names is left to the user.

    - `kernels`: whether a backend's kernels run all layers, see `Program`.
    """
    options: dict[str, bool | str] = {}
    if platform in ("gpu", "cuda", "rocm"):
        options |= _GPU
    if platform == "cpu" and kernels:
        options |= _CPU_KERNELS
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if f"--{name}" not in given}
