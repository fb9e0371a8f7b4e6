// This project's kernels for one 16-bit type and head dim, as XLA FFI targets: decode attention; rotary positions with append;
// and a whole decoder layer of few tokens, as one chain of kernels of which each may start, and fetch its weights, while the
// one before still runs. Weights are stacked over layers and the loop's counter is read on the device, so a compiled loop
// slices and copies nothing.
#include "paged_config.inc"

#include <algorithm>
#include <type_traits>

#include "around.cuh"
#include "paged_decode.cuh"
#include "skinny_product.cuh"
#include "wide_product.cuh"
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

#define PAGED_CUDA(call)                                                                      \
  do {                                                                                        \
    cudaError_t status = (call);                                                              \
    TVM_FFI_ICHECK(status == cudaSuccess) << "paged kernels: " << cudaGetErrorString(status); \
  } while (0)

template <typename Pointer>
Pointer* data(const TensorView& x) {
  return static_cast<Pointer*>(x.data_ptr());
}

int current_device() {
  int device = 0;
  PAGED_CUDA(cudaGetDevice(&device));
  return device;
}

struct Launch {
  cudaStream_t stream;
  bool overlap;  // may start before the kernel that was launched before it has ended

  template <typename... Expected, typename... Given>
  void operator()(void (*kernel)(Expected...), dim3 grid, int threads, int shared, Given... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
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
  const int device = current_device();
  if (!known[device]) PAGED_CUDA(cudaDeviceGetAttribute(known + device, cudaDevAttrMultiProcessorCount, device));
  return known[device];
}

// Allows a kernel its dynamic shared memory, once for each device.
template <auto KERNEL>
void allow(int bytes) {
  static thread_local int allowed[64] = {};
  const int device = current_device();
  if (allowed[device] >= bytes) return;
  PAGED_CUDA(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  allowed[device] = bytes;
}

cudaStream_t stream_of(const TensorView& x) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(x.device().device_type, x.device().device_id));
}

void norm(Launch launch, const T* x, const TensorView& parts, const TensorView& weight, Layer layer, T* sum, T* y,
          int tokens, int size, double eps) {
  TVM_FFI_ICHECK(size % 8 == 0 && size <= 4 * 4096 && parts.size(0) <= kMostSplits)
      << "paged kernels: norm of " << size << " elements, " << parts.size(0) << " parts";
  auto kernel = size <= 4096 ? add_norm<T, 1> : size <= 2 * 4096 ? add_norm<T, 2> : add_norm<T, 4>;
  launch(kernel, tokens, 512, 0, x, data<const float>(parts), static_cast<int>(parts.size(0)), data<const T>(weight), layer,
         sum, y, size, static_cast<float>(eps));
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
    TVM_FFI_ICHECK(function != nullptr) << "paged kernels: this driver has no cuTensorMapEncodeTiled";
    return reinterpret_cast<Encode>(function);
  }();
  return found;
}

template <int RANK>
CUtensorMap map_of(const void* data, const cuuint64_t (&sizes)[RANK], const cuuint64_t (&strides)[RANK - 1],
                   const cuuint32_t (&box)[RANK]) {
  CUtensorMap map;
  cuuint32_t steps[RANK];
  std::fill(steps, steps + RANK, 1);
  constexpr auto type = std::is_same_v<T, half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode()(&map, type, RANK, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK(result == CUDA_SUCCESS) << "paged kernels: tensor map of " << sizes[1] << " rows: " << result;
  return map;
}

// (rows, k) as 64 × rows × k / 64, in boxes of 64 × some rows × some blocks of 64; rows past the end read as zeros.
CUtensorMap rows_of(const void* data, int64_t rows, int64_t k, int box_rows, int box_blocks) {
  const auto r = static_cast<cuuint64_t>(rows), row = static_cast<cuuint64_t>(k) * sizeof(T);
  return map_of<3>(data, {kBlock, r, static_cast<cuuint64_t>(k / kBlock)}, {row, kBlock * sizeof(T)},
                   {kBlock, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_blocks)});
}

// (layers × 2 f, k), gates before ups, as 64 × 16 rows × gate or up × rows / 16 × k / 64, in boxes of some 16 gates and
// their ups.
CUtensorMap gated_rows_of(const void* data, int64_t rows, int64_t f, int64_t k, int box_groups) {
  const auto row = static_cast<cuuint64_t>(k) * sizeof(T);
  return map_of<5>(data, {kBlock, 16, 2, static_cast<cuuint64_t>((rows - f) / 16), static_cast<cuuint64_t>(k / kBlock)},
                   {row, f * row, 16 * row, kBlock * sizeof(T)}, {kBlock, 16, 2, static_cast<cuuint32_t>(box_groups), 1});
}

template <int TILES, int STAGES, Out OUT>
void product_of(Launch launch, const void* x, const TensorView& w, int64_t rows, const Product& p) {
  const int shared = shared_bytes<TILES>(p.k / p.splits / kChunk, STAGES);
  allow<skinny_product<T, TILES, STAGES, OUT>>(shared);
  const int tiles = p.n / (OUT == Out::kGated ? kTileRows / 2 : kTileRows);
  const int groups = std::min(multiprocessors() / p.splits, tiles);
  const auto of = [&](const void* data, int64_t n) { return rows_of(data, n, p.k, 8, kChunk / kBlock); };
  launch(skinny_product<T, TILES, STAGES, OUT>, groups * p.splits, kThreads, shared, of(w.data_ptr(), rows),
         of(x, p.tokens), p);
}

// Of a weight: its rows of all layers, and that one layer's fit n and k.
int64_t rows_in(const TensorView& w, int n, int k) {
  int64_t elements = 1;
  for (int i = 0; i < w.ndim(); ++i) elements *= w.size(i);
  TVM_FFI_ICHECK(n % 16 == 0 && elements == w.size(0) * n * k)
      << "paged kernels: a weight of " << elements << " elements for " << w.size(0) << " layers of " << n << " × " << k;
  return elements / k;
}

template <Out OUT>
void product(Launch launch, const void* x, const TensorView& w, Layer layer, void* out, int tokens, int n, int k,
             int splits) {
  TVM_FFI_ICHECK(tokens >= 1 && tokens <= kSkinnyTokens && k % (splits * kChunk) == 0 && k / splits / kChunk <= 8)
      << "paged kernels: product of " << tokens << " tokens, " << n << " × " << k << ", in " << splits;
  const int layer_rows = n * (OUT == Out::kGated ? 2 : 1);
  const int64_t rows = rows_in(w, layer_rows, k);
  const Product p = {layer, out, tokens, n, k, splits, layer_rows};
  if (tokens <= 8) {
    product_of<1, 9, OUT>(launch, x, w, rows, p);
  } else {
    product_of<2, 5, OUT>(launch, x, w, rows, p);
  }
}

// A product of 17 to 64 tokens, but for x: `blocks` of 32 rows of W in a tile, `groups` of thread blocks, each for all parts.
struct Wide {
  bool gated;
  CUtensorMap weights;
  Product p;
  int blocks, groups;

  Wide(bool gated, const TensorView& w, Layer layer, void* out, int tokens, int n, int k, int splits) : gated(gated) {
    TVM_FFI_ICHECK(tokens <= kWideTokens && k % (splits * kWideK) == 0)
        << "paged kernels: product of " << tokens << " tokens, " << n << " × " << k << ", in " << splits;
    const int layer_rows = gated ? 2 * n : n;
    const int64_t rows = rows_in(w, layer_rows, k);
    // Tiles as equal as can be, in as few turns as can be: neither enters the bits.
    const int units = (layer_rows + kWideBlock - 1) / kWideBlock, places = multiprocessors() / splits;
    const int turns = (units + kWideBlocks * places - 1) / (kWideBlocks * places);
    blocks = (units + turns * places - 1) / (turns * places);
    groups = std::min(places, (units + blocks - 1) / blocks);
    weights = gated ? gated_rows_of(w.data_ptr(), rows, n, k, blocks) : rows_of(w.data_ptr(), rows, k, blocks * kWideBlock, 1);
    p = {layer, out, tokens, n, k, splits, layer_rows};
  }

  void operator()(Launch launch, const void* x) const {
    gated ? of<Out::kGated, 1>(launch, x) : of<Out::kFloat, 1>(launch, x);
  }

  template <Out OUT, int BLOCKS>
  void of(Launch launch, const void* x) const {
    if constexpr (BLOCKS < kWideBlocks) {
      if (blocks > BLOCKS) return of<OUT, BLOCKS + 1>(launch, x);
    }
    allow<wide_product<T, BLOCKS, OUT>>(wide_shared_bytes<BLOCKS>);
    launch(wide_product<T, BLOCKS, OUT>, groups * p.splits, kWideThreads, wide_shared_bytes<BLOCKS>, weights,
           rows_of(x, p.tokens, p.k, kWideTokens, 1), p);
  }
};

// ----------------------------------------------------------------------------------------------------------- decode

template <int NT, bool CAP, int PARTS>
void decode_of(Launch launch, const Decode& p, int items, int heads) {
  constexpr int ring = kWarps * kStages * 2 * kTile * D * 2, merge = kWarps * NT * 8 * (D + 6) * 4;
  constexpr int bytes = ring > merge ? ring : merge;
  allow<paged_decode<T, D, NT, kWarps, kStages, CAP, PARTS>>(bytes);
  // Blocks with a piece come first, and most rungs have room for many more than there are: one without costs about a
  // microsecond of a multiprocessor, so blocks beyond four for each are dealt out to these.
  const int most = std::max(items * p.kv_heads, 4 * multiprocessors());
  launch(paged_decode<T, D, NT, kWarps, kStages, CAP, PARTS>, std::min(p.blocks * p.kv_heads, most), kWarps * 32, bytes, p);
  if (p.offsets != nullptr) Launch{launch.stream, true}(merge_pieces<T, D>, items * heads, D, 0, p, heads);
}

template <int NT>
void decode_for(Launch launch, const Decode& p, int64_t parts, int items, int heads) {
  if (p.cap > 0) {
    parts == 1 ? decode_of<NT, true, 1>(launch, p, items, heads) : decode_of<NT, true, 3>(launch, p, items, heads);
  } else {
    parts == 1 ? decode_of<NT, false, 1>(launch, p, items, heads) : decode_of<NT, false, 3>(launch, p, items, heads);
  }
}

// `words`: blocks × 8 (`Block`), then live (items), then, if split, offsets (items + 1).
void decode(Launch launch, const TensorView& query, const TensorView& keys, const TensorView& values,
            const TensorView& page_ids, const TensorView& words, const float* sinks, const TensorView& out,
            const TensorView& lse, const TensorView& part, Layer layer, int64_t num_pages, int64_t blocks, int64_t split,
            int64_t window, int64_t parts, double cap, double scale) {
  const int items = out.size(0), heads = out.size(1), kv_heads = keys.size(2), group = heads / kv_heads;
  TVM_FFI_ICHECK(query.size(1) == heads && query.size(2) == D && keys.size(3) == D && heads % kv_heads == 0 && group <= 16)
      << "paged kernels: " << heads << " query heads over " << kv_heads << ", head dim " << query.size(2) << " for " << D;
  const int64_t expected = 8 * blocks + items + (split ? items + 1 : 0);
  TVM_FFI_ICHECK(words.size(0) == expected && (split || blocks == items))
      << "paged kernels: a plan of " << words.size(0) << " words, not " << expected;
  Decode p = {};
  p.query = query.data_ptr();
  p.keys = keys.data_ptr();
  p.values = values.data_ptr();
  p.page_ids = data<const int>(page_ids);
  p.layer = layer;
  p.plan = data<const Block>(words);
  p.live = data<const int>(words) + 8 * blocks;
  p.offsets = split ? p.live + items : nullptr;
  p.sinks = sinks;
  p.out = out.data_ptr();
  p.lse = data<float>(lse);
  p.part = data<float>(part);
  p.blocks = static_cast<int>(blocks);
  p.kv_heads = kv_heads;
  p.group = group;
  p.page_size = keys.size(1);
  p.num_pages = static_cast<int>(num_pages);
  p.window = static_cast<int>(window);
  p.scale = static_cast<float>(scale);
  p.cap = static_cast<float>(cap);
  group <= 8 ? decode_for<1>(launch, p, parts, items, heads) : decode_for<2>(launch, p, parts, items, heads);
}

// query (t, h, d), pools, page_ids (l) of this layer, words, sinks (h) -> out (items, h, d), lse (items, h), workspace
void RunDecode(TensorView query, TensorView keys, TensorView values, TensorView page_ids, TensorView words,
               TensorView sinks, TensorView out, TensorView lse, TensorView part, int64_t blocks, int64_t split,
               int64_t window, int64_t has_sinks, int64_t parts, double cap, double scale) {
  decode(Launch{stream_of(query), false}, query, keys, values, page_ids, words,
         has_sinks ? data<const float>(sinks) : nullptr, out, lse, part, Layer{nullptr, 0, 0}, 0, blocks, split, window,
         parts, cap, scale);
}

// ------------------------------------------------------------------------------------------------- rotary and append

template <typename From>
void rotate(Launch launch, const From* packed, int splits, const TensorView& cos, const TensorView& sin,
            const TensorView& slots, const int* page_ids, int listed, Layer layer, const TensorView& keys,
            const TensorView& values, T* query, int* absolute, int tokens, int group, int64_t num_pages) {
  const int kv_heads = keys.size(2), threads = splits ? 256 : 512;
  TVM_FFI_ICHECK(keys.size(3) == D && values.size(3) == D) << "paged kernels: a pool of head dim " << keys.size(3);
  TVM_FFI_ICHECK(splits <= kMostSplits) << "paged kernels: " << splits << " parts";
  // Parts are several times as much to read, by as many blocks as have all of it under way at once.
  const int blocks = splits ? (kv_heads * (group + 2) * D / 8 + threads - 1) / threads : 1;
  launch(rotate_append<T, From>, dim3(tokens + (listed + threads - 1) / threads, blocks), threads, 0, packed, splits,
         data<const float>(cos), data<const float>(sin), data<const int>(slots), page_ids, layer, data<T>(keys),
         data<T>(values), query, absolute, tokens, kv_heads, group, D, listed, static_cast<int>(num_pages),
         static_cast<int>(keys.size(1)));
}

// packed (t, k, g + 2, d), cos, sin (t, d / 2) float, slots (t), page_ids (l), layer (), pools, which are aliased to the
// first two results -> keys, values, query (t, h, d), absolute (l)
void RunRotateAppend(TensorView packed, TensorView cos, TensorView sin, TensorView slots, TensorView page_ids,
                     TensorView layer, TensorView, TensorView, TensorView keys, TensorView values, TensorView query,
                     TensorView absolute, int64_t num_pages) {
  rotate(Launch{stream_of(packed), false}, data<const T>(packed), 0, cos, sin, slots, data<const int>(page_ids),
         page_ids.size(0), Layer{data<const int>(layer), 1, 0}, keys, values, data<T>(query), data<int>(absolute),
         packed.size(0), packed.size(2) - 2, num_pages);
}

// ----------------------------------------------------------------------------------------------------- whole layers

// x (t, m), parts (s, t, m) float, pools: aliased to the first four results. norm (l, m), qkv (l, k, g + 2, d, m), output
// (l, m, n), norm (l, m), gate_up (l, 2, f, m), down (l, m, f); counter (); cos, sin; slots, page_ids, words.
// Scratch: y (t, m), packed (t, k, g + 2, d) or, for more than 16 tokens, (s, t, k, g + 2, d) float, query and attended
// (t, h, d), lse (t, h), pieces, part (s, t, m) float, inner (t, f).
void RunLayers(TensorView, TensorView, TensorView, TensorView, TensorView attention_norm, TensorView qkv, TensorView output,
              TensorView mlp_norm, TensorView gate_up, TensorView down, TensorView counter, TensorView cos, TensorView sin,
              TensorView slots, TensorView page_ids, TensorView words, TensorView x, TensorView parts, TensorView keys,
              TensorView values, TensorView y, TensorView packed, TensorView query, TensorView attended, TensorView lse,
              TensorView pieces, TensorView part, TensorView inner, int64_t times, int64_t plus, int64_t pool_times,
              int64_t pool_plus, int64_t count, int64_t num_pages, int64_t blocks, int64_t split, int64_t window, int64_t terms,
              double cap, double scale, double eps, int64_t overlap) {
  const int tokens = x.size(0), m = x.size(1), f = inner.size(1), group = query.size(1) / keys.size(2);
  const int wide = query.size(1) * D, all = wide + 2 * static_cast<int>(keys.size(2)) * D;
  Launch first{stream_of(x), false}, next{stream_of(x), overlap != 0};
  const auto attend = [&](Layer pool) {
    decode(next, query, keys, values, page_ids, words, nullptr, attended, lse, pieces, pool, num_pages, blocks, split,
           window, terms, cap, scale);
  };
  for (int i = 0; i < count; ++i, first = next) {
    const Layer at = {data<const int>(counter), static_cast<int>(times), static_cast<int>(plus) + i};
    const Layer pool = {data<const int>(counter), static_cast<int>(pool_times), static_cast<int>(pool_plus) + i};
    norm(first, data<const T>(x), parts, attention_norm, at, data<T>(x), data<T>(y), tokens, m, eps);
    if (tokens <= kSkinnyTokens) {
      product<Out::kRounded>(next, y.data_ptr(), qkv, at, packed.data_ptr(), tokens, all, m, 1);
      rotate(next, data<const T>(packed), 0, cos, sin, slots, nullptr, 0, pool, keys, values, data<T>(query), nullptr, tokens,
             group, num_pages);
      attend(pool);
      product<Out::kFloat>(next, attended.data_ptr(), output, at, part.data_ptr(), tokens, m, wide, part.size(0));
      norm(next, data<const T>(x), part, mlp_norm, at, data<T>(x), data<T>(y), tokens, m, eps);
      product<Out::kGated>(next, y.data_ptr(), gate_up, at, inner.data_ptr(), tokens, f, m, 1);
      product<Out::kFloat>(next, inner.data_ptr(), down, at, parts.data_ptr(), tokens, m, f, parts.size(0));
    } else {
      const int cuts = packed.size(0);
      Wide(false, qkv, at, packed.data_ptr(), tokens, all, m, cuts)(next, y.data_ptr());
      rotate(next, data<const float>(packed), cuts, cos, sin, slots, nullptr, 0, pool, keys, values, data<T>(query), nullptr,
             tokens, group, num_pages);
      attend(pool);
      Wide(false, output, at, part.data_ptr(), tokens, m, wide, part.size(0))(next, attended.data_ptr());
      norm(next, data<const T>(x), part, mlp_norm, at, data<T>(x), data<T>(y), tokens, m, eps);
      Wide(true, gate_up, at, inner.data_ptr(), tokens, f, m, 1)(next, y.data_ptr());
      Wide(false, down, at, parts.data_ptr(), tokens, m, f, parts.size(0))(next, inner.data_ptr());
    }
  }
}

}  // namespace paged

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_decode, paged::RunDecode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_rotate_append, paged::RunRotateAppend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_layers, paged::RunLayers);
