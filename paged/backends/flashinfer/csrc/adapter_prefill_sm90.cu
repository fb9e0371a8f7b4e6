// XLA hands over all operands, then all results, then attributes; FlashInfer's entry point interleaves them.
#include "batch_prefill_sm90_config.inc"
#include "tvm/ffi/container/array.h"
#include "tvm_ffi_utils.h"

using tvm::ffi::Array;
using tvm::ffi::Optional;

void BatchPrefillWithPagedKVCacheSM90Run(TensorView float_workspace, TensorView int_workspace, Array<int64_t> plan,
                                         TensorView q, TensorView k, TensorView v, TensorView qo_indptr,
                                         TensorView indptr, TensorView indices, TensorView last_page_len, TensorView o,
                                         Optional<TensorView> lse, int64_t mask_mode, int64_t layout,
                                         int64_t window_left, bool enable_pdl ADDITIONAL_FUNC_PARAMS);

void PagedPrefillSM90(TensorView q, TensorView k, TensorView v, TensorView qo_indptr, TensorView indptr,
                      TensorView indices, TensorView last_page_len, TensorView int_workspace, TensorView k_scale,
                      TensorView o, TensorView lse, TensorView float_workspace, Array<int64_t> plan, int64_t causal,
                      int64_t window_left, double soft_cap, double scale, int64_t multiprocessors) {
  (void)k_scale;  // 16-bit pools only: this kernel takes queries and keys of one dtype
  // The kernel is launched with a thread block a multiprocessor, and the plan has one list for each.
  int present = 0;
  const cudaError_t status = cudaDeviceGetAttribute(&present, cudaDevAttrMultiProcessorCount, q.device().device_id);
  TVM_FFI_ICHECK(status == cudaSuccess) << cudaGetErrorString(status);
  TVM_FFI_ICHECK_EQ(present, multiprocessors)
      << "this program was planned for a device of " << multiprocessors << " multiprocessors, and runs on one of " << present;
  BatchPrefillWithPagedKVCacheSM90Run(float_workspace, int_workspace, plan, q, k, v, qo_indptr, indptr, indices,
                                      last_page_len, o, Optional<TensorView>(lse), causal, /*NHD*/ 0, window_left,
                                      /*pdl*/ false, soft_cap, scale);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_prefill, PagedPrefillSM90);
