// What lies around attention in a decode step of few tokens, as XLA FFI targets: norm and products, each call a chain of
// kernels of which the next starts to fetch its weights while the one before still runs. Weights are stacked over layers and
// the layer's number is read on the device, so a compiled loop over layers slices and copies nothing.
#include <algorithm>
#include <type_traits>

#include "skinny_product.cuh"
#include "tvm/ffi/container/array.h"
#include "tvm/ffi/container/tensor.h"
#include "tvm/ffi/error.h"
#include "tvm/ffi/extra/c_env_api.h"
#include "tvm/ffi/function.h"

namespace paged {

using tvm::ffi::TensorView;

#define PAGED_CUDA(call)                                                                            \
  do {                                                                                              \
    cudaError_t status = (call);                                                                    \
    TVM_FFI_ICHECK(status == cudaSuccess) << "paged step kernel: " << cudaGetErrorString(status);  \
  } while (0)

struct Launch {
  cudaStream_t stream;
  bool overlap;  // may start before the kernel that was launched before it has ended

  template <typename... Expected, typename... Given>
  void operator()(void (*kernel)(Expected...), int grid, int threads, int shared, Given... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    PAGED_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<Expected>(arguments)...));
  }
};

int multiprocessors() {
  static thread_local int known[64] = {};
  int device = 0;
  PAGED_CUDA(cudaGetDevice(&device));
  if (!known[device]) PAGED_CUDA(cudaDeviceGetAttribute(known + device, cudaDevAttrMultiProcessorCount, device));
  return known[device];
}

cudaStream_t stream_of(const TensorView& x) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(x.device().device_type, x.device().device_id));
}

// ---------------------------------------------------------------------------------------------------------- the norm

// x += the parts of a split product, in their order, rounded once; y = x / sqrt(mean(x²) + eps), rounded, times weight.
// One block for each token.
constexpr int kMost = 4;  // × 512 threads × 8 elements are the longest row
constexpr int kMostSplits = 4;

template <typename T>
__global__ __launch_bounds__(512) void add_norm(const T* x, const float* parts, int splits, const T* weight,
                                                const int* layer, T* sum, T* y, int size, float eps) {
  let_next_kernel_start();
  __shared__ float shared[17];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * size;
  const T* w = weight + (layer == nullptr ? 0 : static_cast<int64_t>(*layer) * size);
  float value[kMost][8];
  float square = 0;
  uint4 factors[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int at = (i * 512 + threadIdx.x) * 8;
    if (at < size) factors[i] = *reinterpret_cast<const uint4*>(w + at);
  }
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int at = (i * 512 + threadIdx.x) * 8;
    if (at >= size) break;
    const uint4 words = *reinterpret_cast<const uint4*>(x + row + at);
    const T* v = reinterpret_cast<const T*>(&words);
#pragma unroll
    for (int e = 0; e < 8; ++e) value[i][e] = static_cast<float>(v[e]);
    if (splits) {
      float added[8] = {};
      float4 read[kMostSplits][2];  // all at once: one latency
#pragma unroll
      for (int s = 0; s < kMostSplits; ++s) {
        const float* from = parts + static_cast<int64_t>(s < splits ? s : 0) * gridDim.x * size + row + at;
        read[s][0] = *reinterpret_cast<const float4*>(from);
        read[s][1] = *reinterpret_cast<const float4*>(from + 4);
      }
#pragma unroll
      for (int s = 0; s < kMostSplits; ++s) {
        if (s >= splits) break;
        const float4 one = read[s][0], two = read[s][1];
        const float more[8] = {one.x, one.y, one.z, one.w, two.x, two.y, two.z, two.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) added[e] += more[e];
      }
      uint4 stored;
      T* o = reinterpret_cast<T*>(&stored);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        o[e] = rounded<T>(value[i][e] + added[e]);
        value[i][e] = static_cast<float>(o[e]);
      }
      *reinterpret_cast<uint4*>(sum + row + at) = stored;
    } else if (sum != nullptr) {
      *reinterpret_cast<uint4*>(sum + row + at) = words;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) square += value[i][e] * value[i][e];
  }
#pragma unroll
  for (int m = 16; m; m /= 2) square += __shfl_xor_sync(~0u, square, m);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = square;
  __syncthreads();
  if (threadIdx.x < 32) {
    float all = threadIdx.x < 16 ? shared[threadIdx.x] : 0.f;
#pragma unroll
    for (int m = 16; m; m /= 2) all += __shfl_xor_sync(~0u, all, m);
    if (threadIdx.x == 0) shared[16] = rsqrtf(all / size + eps);
  }
  __syncthreads();
  const float factor = shared[16];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int at = (i * 512 + threadIdx.x) * 8;
    if (at >= size) break;
    const T* v = reinterpret_cast<const T*>(&factors[i]);
    uint4 stored;
    T* o = reinterpret_cast<T*>(&stored);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float unit = static_cast<float>(rounded<T>(value[i][e] * factor));
      o[e] = rounded<T>(unit * static_cast<float>(v[e]));
    }
    *reinterpret_cast<uint4*>(y + row + at) = stored;
  }
}

template <typename T>
void norm(Launch launch, const TensorView& x, const TensorView& parts, const TensorView& weight, const int* layer,
          void* sum, void* y, double eps) {
  const int size = x.size(1);
  TVM_FFI_ICHECK(size % 8 == 0 && size <= kMost * 4096) << "paged step kernel: hidden size " << size;
  const int splits = parts.ndim() == 3 ? parts.size(0) : 0;
  TVM_FFI_ICHECK(splits <= kMostSplits) << "paged step kernel: " << splits << " parts";
  launch(add_norm<T>, static_cast<int>(x.size(0)), 512, 0, static_cast<const T*>(x.data_ptr()),
         static_cast<const float*>(parts.data_ptr()), splits, static_cast<const T*>(weight.data_ptr()), layer,
         static_cast<T*>(sum), static_cast<T*>(y), size, static_cast<float>(eps));
}

// ------------------------------------------------------------------------------------------------------ the products

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encode() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    PAGED_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result));
    TVM_FFI_ICHECK(function != nullptr) << "paged step kernel: this driver has no cuTensorMapEncodeTiled";
    return reinterpret_cast<Encode>(function);
  }();
  return found;
}

// (rows, k) as 64 × rows × k / 64; rows past the end read as zeros.
template <typename T>
CUtensorMap map_of(const void* data, int64_t rows, int64_t k) {
  CUtensorMap map;
  const cuuint64_t sizes[3] = {kBlock, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(k / kBlock)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(k) * sizeof(T), kBlock * sizeof(T)};
  const cuuint32_t box[3] = {kBlock, 8, kChunk / kBlock}, steps[3] = {1, 1, 1};
  constexpr auto type = std::is_same_v<T, half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode()(&map, type, 3, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK(result == CUDA_SUCCESS) << "paged step kernel: tensor map of " << rows << " × " << k << ": " << result;
  return map;
}

template <typename T, int TILES, int STAGES, Out OUT>
void product_of(Launch launch, const void* x, const TensorView& w, int64_t rows, const Product& p) {
  const int shared = shared_bytes<TILES>(p.k / p.splits / kChunk, STAGES);
  auto kernel = skinny_product<T, TILES, STAGES, OUT>;
  static thread_local int allowed[64] = {};
  int device = 0;
  PAGED_CUDA(cudaGetDevice(&device));
  if (allowed[device] < shared) {
    PAGED_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    allowed[device] = shared;
  }
  const int tiles = p.n / (OUT == Out::kGated ? kTileRows / 2 : kTileRows);
  const int groups = std::min(multiprocessors() / p.splits, tiles);
  launch(kernel, groups * p.splits, kThreads, shared, map_of<T>(w.data_ptr(), rows, p.k), map_of<T>(x, p.tokens, p.k), p);
}

template <typename T, Out OUT>
void product(Launch launch, const void* x, const TensorView& w, const int* layer, void* out, int tokens, int n, int k,
             int splits) {
  TVM_FFI_ICHECK(tokens >= 1 && tokens <= 16 && n % 16 == 0 && k % (splits * kChunk) == 0 && k / splits / kChunk <= 8)
      << "paged step kernel: product of " << tokens << " tokens, " << n << " × " << k << ", in " << splits;
  int64_t elements = 1;
  for (int i = 0; i < w.ndim(); ++i) elements *= w.size(i);
  const int64_t rows = elements / k, layer_rows = layer == nullptr ? rows : rows / w.size(0);
  TVM_FFI_ICHECK(elements % k == 0 && layer_rows == static_cast<int64_t>(n) * (OUT == Out::kGated ? 2 : 1))
      << "paged step kernel: a weight of " << layer_rows << " rows for " << n << " × " << k;
  const Product p = {layer, out, tokens, n, k, splits, static_cast<int>(layer_rows)};
  if (tokens <= 8) {
    product_of<T, 1, 9, OUT>(launch, x, w, rows, p);
  } else {
    product_of<T, 2, 5, OUT>(launch, x, w, rows, p);
  }
}

bool is_bf16(const TensorView& x) { return x.dtype().code == kDLBfloat; }

#define PAGED_DISPATCH(x, ...)      \
  if (is_bf16(x)) {                 \
    using T = nv_bfloat16;          \
    __VA_ARGS__                     \
  } else {                          \
    using T = half;                 \
    __VA_ARGS__                     \
  }

// x (t, m), parts (s, t, m) float, norm (l, m), weight (l, …, m), layer () -> sum (t, m), y (t, m), out (t, n)
void Enter(TensorView x, TensorView parts, TensorView weight_norm, TensorView weight, TensorView layer, TensorView sum,
           TensorView y, TensorView out, double eps, int64_t overlap) {
  const int* at = static_cast<const int*>(layer.data_ptr());
  const int tokens = x.size(0), k = x.size(1), n = out.size(1);
  PAGED_DISPATCH(x, {
    norm<T>(Launch{stream_of(x), false}, x, parts, weight_norm, at, sum.data_ptr(), y.data_ptr(), eps);
    product<T, Out::kRounded>(Launch{stream_of(x), overlap != 0}, y.data_ptr(), weight, at, out.data_ptr(), tokens, n, k, 1);
  })
}

// heads (t, n), x (t, m), output (l, m, n), norm (l, m), gate_up (l, 2, f, m), down (l, m, f), layer ()
// -> sum (t, m), parts (s, t, m) float; scratch: part (1, t, m) float, y (t, m), inner (t, f)
void Leave(TensorView heads, TensorView x, TensorView output, TensorView weight_norm, TensorView gate_up, TensorView down,
           TensorView layer, TensorView sum, TensorView parts, TensorView part, TensorView y, TensorView inner, double eps,
           int64_t overlap) {
  const int* at = static_cast<const int*>(layer.data_ptr());
  const int tokens = x.size(0), m = x.size(1), n = heads.size(1), f = inner.size(1), splits = parts.size(0);
  const Launch first{stream_of(x), false}, next{stream_of(x), overlap != 0};
  PAGED_DISPATCH(x, {
    product<T, Out::kFloat>(first, heads.data_ptr(), output, at, part.data_ptr(), tokens, m, n, part.size(0));
    norm<T>(next, x, part, weight_norm, at, sum.data_ptr(), y.data_ptr(), eps);
    product<T, Out::kGated>(next, y.data_ptr(), gate_up, at, inner.data_ptr(), tokens, f, m, 1);
    product<T, Out::kFloat>(next, inner.data_ptr(), down, at, parts.data_ptr(), tokens, m, f, splits);
  })
}

// ------------------------------------------------------------------------------------------------- rotary and append

// One block for each token, and one for each 1024 entries of the page list. Turns query and key, writes query out, and
// key and value into the token's slot of this layer; a negative slot, or one past the layer, is padding and writes nothing.
template <typename T>
__global__ void rotate_append(const T* packed, const float* cos, const float* sin, const int* slots, const int* page_ids,
                              const int* layer, T* keys, T* values, T* query, int* absolute, int tokens, int kv_heads,
                              int group, int dim, int listed, int num_pages, int page_size) {
  const int base = *layer * num_pages;
  if (static_cast<int>(blockIdx.x) >= tokens) {
    const int i = (blockIdx.x - tokens) * blockDim.x + threadIdx.x;
    if (i < listed) absolute[i] = page_ids[i] + base;
    return;
  }
  const int token = blockIdx.x, half = dim / 2, quads = half / 4;
  const int slot = slots[token];
  const bool written = slot >= 0 && slot < num_pages * page_size;
  const int64_t row = (static_cast<int64_t>(base) * page_size + slot) * kv_heads;
  const int heads = kv_heads * (group + 2);
  const T* from = packed + static_cast<int64_t>(token) * heads * dim;
  // Four pairs (i, i + half) of one head for each thread and turn: 8-byte words.
  for (int at = threadIdx.x; at < heads * quads; at += blockDim.x) {
    const int head = at / quads, i = at % quads * 4, kv = head / (group + 2), place = head % (group + 2);
    uint2 low = *reinterpret_cast<const uint2*>(from + head * dim + i);
    uint2 high = *reinterpret_cast<const uint2*>(from + head * dim + i + half);
    if (place <= group) {
      const float4 c = *reinterpret_cast<const float4*>(cos + static_cast<int64_t>(token) * half + i);
      const float4 s = *reinterpret_cast<const float4*>(sin + static_cast<int64_t>(token) * half + i);
      const float cs[4] = {c.x, c.y, c.z, c.w}, sn[4] = {s.x, s.y, s.z, s.w};
      T* one = reinterpret_cast<T*>(&low);
      T* two = reinterpret_cast<T*>(&high);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float a = static_cast<float>(one[e]), b = static_cast<float>(two[e]);
        one[e] = rounded<T>(a * cs[e] - b * sn[e]);
        two[e] = rounded<T>(b * cs[e] + a * sn[e]);
      }
    }
    T* to;
    if (place < group) {
      to = query + (static_cast<int64_t>(token) * kv_heads * group + kv * group + place) * dim;
    } else {
      if (!written) continue;
      to = (place == group ? keys : values) + (row + kv) * dim;
    }
    *reinterpret_cast<uint2*>(to + i) = low;
    *reinterpret_cast<uint2*>(to + i + half) = high;
  }
}

// packed (t, k, g + 2, d), cos, sin (t, d / 2) float, slots (t), page_ids (l), layer (), pools, which are aliased to the
// first two results -> keys, values, query (t, h, d), absolute (l)
void RotateAppend(TensorView packed, TensorView cos, TensorView sin, TensorView slots, TensorView page_ids, TensorView layer,
                  TensorView, TensorView, TensorView keys, TensorView values, TensorView query, TensorView absolute,
                  int64_t num_pages) {
  const int tokens = packed.size(0), kv_heads = packed.size(1), group = packed.size(2) - 2, dim = packed.size(3);
  const int listed = page_ids.size(0), threads = 512;
  TVM_FFI_ICHECK(dim % 8 == 0 && keys.size(2) == kv_heads && keys.size(3) == dim && values.size(3) == dim)
      << "paged step kernel: rotate_append of head dim " << dim;
  const int grid = tokens + (listed + threads - 1) / threads;
  PAGED_DISPATCH(packed, {
    Launch{stream_of(packed), false}(
        rotate_append<T>, grid, threads, 0, static_cast<const T*>(packed.data_ptr()), static_cast<const float*>(cos.data_ptr()),
        static_cast<const float*>(sin.data_ptr()), static_cast<const int*>(slots.data_ptr()),
        static_cast<const int*>(page_ids.data_ptr()), static_cast<const int*>(layer.data_ptr()),
        static_cast<T*>(keys.data_ptr()), static_cast<T*>(values.data_ptr()), static_cast<T*>(query.data_ptr()),
        static_cast<int*>(absolute.data_ptr()), tokens, kv_heads, group, dim, listed, static_cast<int>(num_pages),
        static_cast<int>(keys.size(1)));
  })
}

}  // namespace paged

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_enter, paged::Enter);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_leave, paged::Leave);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_rotate_append, paged::RotateAppend);
