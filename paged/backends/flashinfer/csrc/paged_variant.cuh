// Attention variant of this project for FlashInfer's CUDA-core decode and FA2 prefill kernels.
//
// It differs from FlashInfer's own default variant in two ways: the scale of fp8 keys is read on the device (so that a
// traced scale needs no recompilation), and the soft cap's tanh is computed from exp2 to full float32 accuracy, where
// tanh.approx is off by up to 2^-11.
#pragma once
#include <flashinfer/attention/variant_helper.cuh>
#include <flashinfer/attention/variants.cuh>
#include <flashinfer/math.cuh>

namespace flashinfer {

__device__ __forceinline__ float paged_tanh(float x) {
  // tanh|x| = (1 - e) / (1 + e) with e = exp(-2|x|); near 0, where 1 - e cancels, an odd polynomial to x^9.
  const float a = fabsf(x);
  if (a < 0.25f) {
    const float y = a * a;
    const float p = y * (-1.f / 3 + y * (2.f / 15 + y * (-17.f / 315 + y * (62.f / 2835 - y * (1382.f / 155925)))));
    return copysignf(a + a * p, x);
  }
  const float e = math::ptx_exp2(-2.f * math::log2e * a);
  return copysignf(__fdiv_rn(1.f - e, 1.f + e), x);
}

template <bool use_sliding_window, bool use_logits_soft_cap>
struct PagedVariant : AttentionVariantBase {
  static constexpr bool use_softmax = true;

  uint32_t qo_len, kv_len;
  uint32_t window_left;
  float sm_scale_log2;
  float pre_tanh_scale;

  template <typename Params>
  __device__ __host__ PagedVariant(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    float scale = params.sm_scale;
    if (params.maybe_k_scale != nullptr) scale *= *params.maybe_k_scale;
    if constexpr (use_logits_soft_cap) {
      pre_tanh_scale = scale / float(params.logits_soft_cap);
      sm_scale_log2 = math::log2e * float(params.logits_soft_cap);
    } else {
      sm_scale_log2 = scale * math::log2e;
    }
    window_left = (params.window_left >= 0) ? params.window_left : kv_len;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if constexpr (use_logits_soft_cap) {
      return paged_tanh(float(logits) * pre_tanh_scale);
    } else {
      return logits;
    }
  })

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if constexpr (use_sliding_window) {
      return kv_idx + qo_len + window_left >= kv_len + qo_idx;
    } else {
      return true;
    }
  })
};

}  // namespace flashinfer
