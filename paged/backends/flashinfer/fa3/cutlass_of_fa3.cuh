// Instead of <flashinfer/cutlass_utils.cuh>: what FA3 takes of CUTLASS, without its matrix products, epilogues and host
// tools. To be included first.
#pragma once
#define FLASHINFER_CUTLASS_UTILS_CUH_
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cute/tensor.hpp"
#include "cutlass/arch/memory_sm80.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace flashinfer {

template <typename T>
struct cutlass_dtype {
  using type = T;
};
template <>
struct cutlass_dtype<half> {
  using type = cutlass::half_t;
};
template <>
struct cutlass_dtype<nv_bfloat16> {
  using type = cutlass::bfloat16_t;
};
template <typename T>
using cutlass_dtype_t = typename cutlass_dtype<T>::type;

}  // namespace flashinfer
