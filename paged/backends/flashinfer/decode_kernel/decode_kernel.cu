// The decode kernel of one head dim and dtype as an XLA FFI target.
#include "decode_kernel_config.inc"
#include "paged_decode.cuh"
#include "tvm/ffi/container/array.h"
#include "tvm/ffi/container/tensor.h"
#include "tvm/ffi/error.h"
#include "tvm/ffi/extra/c_env_api.h"
#include "tvm/ffi/function.h"

namespace paged {

using tvm::ffi::TensorView;
using T = PAGED_DTYPE;
constexpr int D = PAGED_HEAD_DIM;
constexpr int kWarps = D == 256 ? 4 : 8;
constexpr int kStages = D == 64 ? 6 : 3;

#define PAGED_CUDA(call)                                                                            \
  do {                                                                                              \
    cudaError_t status = (call);                                                                    \
    TVM_FFI_ICHECK(status == cudaSuccess) << "paged decode kernel: " << cudaGetErrorString(status); \
  } while (0)

template <int NT, bool CAP, int PARTS>
void launch(const Decode& p, int items, int heads, cudaStream_t stream) {
  constexpr int ring = kWarps * kStages * 2 * kTile * D * 2, merge = kWarps * NT * 8 * (D + 6) * 4;
  constexpr int bytes = ring > merge ? ring : merge;
  auto kernel = paged_decode<T, D, NT, kWarps, kStages, CAP, PARTS>;
  static thread_local bool allowed[64] = {};
  int device = 0;
  PAGED_CUDA(cudaGetDevice(&device));
  if (!allowed[device]) {
    PAGED_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    allowed[device] = true;
  }
  kernel<<<p.blocks * p.kv_heads, kWarps * 32, bytes, stream>>>(p);
  PAGED_CUDA(cudaGetLastError());
  if (p.offsets == nullptr) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(items, heads);
  config.blockDim = dim3(D);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  PAGED_CUDA(cudaLaunchKernelEx(&config, merge_pieces<T, D>, p));
}

template <int NT>
void choose(const Decode& p, int64_t parts, int items, int heads, cudaStream_t stream) {
  if (p.cap > 0) {
    parts == 1 ? launch<NT, true, 1>(p, items, heads, stream) : launch<NT, true, 3>(p, items, heads, stream);
  } else {
    parts == 1 ? launch<NT, false, 1>(p, items, heads, stream) : launch<NT, false, 3>(p, items, heads, stream);
  }
}

// `words`: item_row (items), item_token (items), and, if split, offsets (items + 1), block_item (blocks), block_piece.
void Run(TensorView query, TensorView keys, TensorView values, TensorView page_offsets, TensorView page_ids,
         TensorView kv_lens, TensorView words, TensorView sinks, TensorView out, TensorView lse, TensorView part,
         int64_t blocks, int64_t chunk, int64_t window, int64_t has_sinks, int64_t parts, double cap, double scale) {
  const int items = out.size(0), heads = out.size(1), kv_heads = keys.size(2), group = heads / kv_heads;
  TVM_FFI_ICHECK(query.size(1) == heads && query.size(2) == D && keys.size(3) == D && heads % kv_heads == 0 && group <= 16)
      << "paged decode kernel: " << heads << " query heads over " << kv_heads << ", head dim " << query.size(2) << " for " << D;
  const int* at = static_cast<const int*>(words.data_ptr());
  const bool split = chunk > 0;
  const int64_t expected = 2 * items + (split ? items + 1 + 2 * blocks : 0);
  TVM_FFI_ICHECK(words.size(0) == expected && (split || blocks == items))
      << "paged decode kernel: a plan of " << words.size(0) << " words, not " << expected;
  Decode p = {};
  p.query = query.data_ptr();
  p.keys = keys.data_ptr();
  p.values = values.data_ptr();
  p.page_offsets = static_cast<const int*>(page_offsets.data_ptr());
  p.page_ids = static_cast<const int*>(page_ids.data_ptr());
  p.kv_lens = static_cast<const int*>(kv_lens.data_ptr());
  p.item_row = at;
  p.item_token = at + items;
  if (split) {
    p.offsets = at + 2 * items;
    p.block_item = p.offsets + items + 1;
    p.block_piece = p.block_item + blocks;
  }
  p.sinks = has_sinks ? static_cast<const float*>(sinks.data_ptr()) : nullptr;
  p.out = out.data_ptr();
  p.lse = static_cast<float*>(lse.data_ptr());
  p.part = static_cast<float*>(part.data_ptr());
  p.blocks = static_cast<int>(blocks);
  p.kv_heads = kv_heads;
  p.group = group;
  p.page_size = keys.size(1);
  p.chunk = split ? static_cast<int>(chunk) : 1 << 30;
  p.window = static_cast<int>(window);
  p.scale = static_cast<float>(scale);
  p.cap = static_cast<float>(cap);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(query.device().device_type, query.device().device_id));
  group <= 8 ? choose<1>(p, parts, items, heads, stream) : choose<2>(p, parts, items, heads, stream);
}

}  // namespace paged

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_decode_run, paged::Run);
