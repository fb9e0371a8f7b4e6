// What lies between the products and attention: norms, rotary positions, append.
#pragma once
#include "common.cuh"

namespace paged {

// x += the parts of a split product, in their order, rounded once; y = x / sqrt(mean(x²) + eps), rounded, times weight.
// One block for each token; TURNS × 512 threads × 8 elements are the longest row.
constexpr int kMostSplits = 4;

template <typename T, int TURNS>
__global__ __launch_bounds__(512) void add_norm(const T* x, const float* parts, int splits, const T* weight,
                                                const Layer layer, T* sum, T* y, int size, float eps) {
  let_next_kernel_start();
  __shared__ float shared[17];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * size;
  const T* w = weight + static_cast<int64_t>(layer.of()) * size;
  float value[TURNS][8];
  float square = 0;
  uint4 factors[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int at = (i * 512 + threadIdx.x) * 8;
    if (at < size) factors[i] = *reinterpret_cast<const uint4*>(w + at);
  }
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
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
  for (int i = 0; i < TURNS; ++i) {
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

// Four neighbours, summed over their parts in order and rounded.
template <typename T>
__device__ __forceinline__ uint2 four_of(const float* from, int64_t part, int splits) {
  float4 read[kMostSplits];  // all at once: one latency
#pragma unroll
  for (int s = 0; s < kMostSplits; ++s) read[s] = *reinterpret_cast<const float4*>(from + (s < splits ? s : 0) * part);
  float sum[4] = {};
#pragma unroll
  for (int s = 0; s < kMostSplits; ++s) {
    if (s >= splits) break;
    const float more[4] = {read[s].x, read[s].y, read[s].z, read[s].w};
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] += more[e];
  }
  uint2 words;
  T* out = reinterpret_cast<T*>(&words);
#pragma unroll
  for (int e = 0; e < 4; ++e) out[e] = rounded<T>(sum[e]);
  return words;
}

// gridDim.y blocks for each token, and one for each blockDim.x entries of the page list. Turns query and key, writes query
// out, and key and value into the token's slot of this layer; a negative slot, or one past the layer, is padding and writes
// nothing. `packed` is rounded already (splits 0), or as many float parts, which are added up in their order and rounded.
template <typename T, typename From>
__global__ void rotate_append(const From* packed, int splits, const float* cos, const float* sin, const int* slots,
                              const int* page_ids, const Layer layer, T* keys, T* values, T* query, int* absolute, int tokens,
                              int kv_heads, int group, int dim, int listed, int num_pages, int page_size) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int base = layer.of() * num_pages;
  if (static_cast<int>(blockIdx.x) >= tokens) {
    const int i = (blockIdx.x - tokens) * blockDim.x + threadIdx.x;
    if (i < listed && blockIdx.y == 0) absolute[i] = page_ids[i] + base;
    return;
  }
  const int token = blockIdx.x, half = dim / 2, quads = half / 4;
  const int slot = slots[token];
  const bool written = slot >= 0 && slot < num_pages * page_size;
  const int64_t row = (static_cast<int64_t>(base) * page_size + slot) * kv_heads;
  const int heads = kv_heads * (group + 2);
  const From* from = packed + static_cast<int64_t>(token) * heads * dim;
  // Four pairs (i, i + half) of one head for each thread and turn: 8-byte words.
  for (int at = blockIdx.y * blockDim.x + threadIdx.x; at < heads * quads; at += gridDim.y * blockDim.x) {
    const int head = at / quads, i = at % quads * 4, kv = head / (group + 2), place = head % (group + 2);
    uint2 low, high;
    if constexpr (std::is_same_v<From, T>) {
      low = *reinterpret_cast<const uint2*>(from + head * dim + i);
      high = *reinterpret_cast<const uint2*>(from + head * dim + i + half);
    } else {
      const int64_t part = static_cast<int64_t>(tokens) * heads * dim;
      low = four_of<T>(from + head * dim + i, part, splits);
      high = four_of<T>(from + head * dim + i + half, part, splits);
    }
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

}  // namespace paged
