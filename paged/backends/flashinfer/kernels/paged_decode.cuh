// Decode attention over pages: one query token a row, all query heads of a KV head at once, on tensor cores.
//
// A thread block takes one piece of one row under one KV head at a time. Each warp takes every WARPS-th tile of 16 tokens,
// copies it to shared memory asynchronously (several tiles in flight, no barrier between warps), and keeps its own running
// maximum, sum and output; at the end warps are merged in their order, and pieces by a second kernel in theirs. Which tokens
// meet in which order depends on positions alone, so bits depend neither on the batch nor on the number of heads or pages.
//
// Keys and values are the left operands (16 tokens, then 16 dimensions), queries and weights the right ones (8 heads): a
// group of up to 8 query heads wastes nothing. With PARTS = 3 a weight is the sum of three 16-bit numbers, exactly, and
// each product is float32's; with PARTS = 1 weights are rounded to 16 bits, as usual. Each tile is summed from zero and
// then added with rounding to nearest, because tensor cores truncate what they accumulate.
#pragma once
#include "common.cuh"

namespace paged {

constexpr int kTile = 16;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// tanh|x| = (1 − e) / (1 + e), e = exp(−2|x|); near 0, where 1 − e cancels, an odd polynomial to x⁹.
__device__ __forceinline__ float tanh_of(float x) {
  const float a = fabsf(x), y = a * a;
  const float p = y * (-1.f / 3 + y * (2.f / 15 + y * (-17.f / 315 + y * (62.f / 2835 - y * (1382.f / 155925)))));
  const float e = exp2_of(-2.f * kLog2e * a);
  return copysignf(a < 0.25f ? a + a * p : __fdiv_rn(1.f - e, 1.f + e), x);
}

template <typename T>
struct Pair;
template <>
struct Pair<nv_bfloat16> {
  static constexpr float kScale = 1.f;  // bfloat16 has float32's range
  static __device__ __forceinline__ uint32_t of(float a, float b) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t&>(v);
  }
  static __device__ __forceinline__ float2 wide(uint32_t v) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(v));
  }
};
template <>
struct Pair<half> {
  static constexpr float kScale = 4096.f;  // a remainder scaled up, lest it be subnormal
  static __device__ __forceinline__ uint32_t of(float a, float b) {
    const __half2 v = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(v);
  }
  static __device__ __forceinline__ float2 wide(uint32_t v) {
    return __half22float2(reinterpret_cast<const __half2&>(v));
  }
};

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ uint32_t transposed(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
// 16 bytes, or zeros where nothing is to be read: whatever lies in slots past the row's end is never touched.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool read) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read ? 16 : 0));
}

// exp2(maximum − top), 0 for what has seen no token.
__device__ __forceinline__ float weight_of(float maximum, float top) {
  return maximum == -INFINITY ? 0.f : exp2_of(maximum - top);
}

// What a block needs to start, in two 16-byte words: `item` is −1 for no piece; `live` 0 for an item without attention, which
// gets +0 and −inf; `pages` is where the row's page ids begin; the piece is tokens `begin` … `end` − 1 of `length`, and `whole`
// if it is its item's only one, which then needs no merging. Blocks with a piece come before those without.
struct Block {
  int item, live, token, length, pages, begin, end, whole;
};

struct Decode {
  const void* query;    // (tokens, heads, D)
  const void* keys;     // (pages, page_size, kv_heads, D)
  const void* values;
  const int* page_ids;
  Layer layer;          // of which pool: `num_pages` × layer is added to page ids
  const Block* plan;    // (blocks)
  const int* live;      // (items)
  const int* offsets;   // (items + 1): of each item's pieces; null is one piece each
  const float* sinks;   // (heads), or null
  void* out;            // (items, heads, D)
  float* lse;           // (items, heads), natural logarithm
  float* part;          // (blocks, heads, D), then (blocks, heads, 2): sums not yet divided; maximum and sum
  int blocks, kv_heads, group, page_size, num_pages;
  int window;           // tokens visible, or 0
  float scale, cap;     // of logits; cap 0 is none
};

// Sum o under maximum m and weight l as output and natural LSE; the sink is one more weight, of no value.
template <typename T>
__device__ __forceinline__ float finish(float o, float& m, float& l, const float* sinks, int head) {
  if (sinks != nullptr) {
    const float sink = sinks[head] * kLog2e, top = fmaxf(m, sink), keep = exp2_of(m - top);
    o *= keep;
    l = l * keep + exp2_of(sink - top);
    m = top;
  }
  return __fdiv_rn(o, l);
}

template <typename T, int D, int NT, int WARPS, int STAGES, bool CAP, int PARTS>
__global__ __launch_bounds__(WARPS * 32, 1) void paged_decode(const Decode p) {
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kRow = D * 2, kWords = D / 8, kStage = 2 * kTile * kRow;
  constexpr int kHeads = NT * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int heads = p.kv_heads * p.group;
  const bool split = p.offsets != nullptr;
  const uint32_t mine = smem_address(shared) + warp * STAGES * kStage;
  let_next_kernel_start();
  for (int turn = blockIdx.x; turn < p.blocks * p.kv_heads; turn += gridDim.x) {
    // KV heads of one piece side by side: what lies together in memory is read together.
    const int block = turn / p.kv_heads, kv_head = turn % p.kv_heads;
    const Block at_block = p.plan[block];
    const int item = at_block.item, length = at_block.length;
    if (item < 0) break;
    T* out = static_cast<T*>(p.out) + (static_cast<int64_t>(item) * heads + kv_head * p.group) * D;
    if (!at_block.live) {
      wait_for_previous_kernel();
      for (int i = threadIdx.x; i < p.group * D; i += WARPS * 32) out[i] = rounded<T>(0.f);
      if (threadIdx.x < p.group) p.lse[static_cast<int64_t>(item) * heads + kv_head * p.group + threadIdx.x] = -INFINITY;
      continue;
    }
    if (turn != static_cast<int>(blockIdx.x)) __syncthreads();  // the ring was where the piece before was merged
    const int start = p.window > 0 ? max(length - p.window, 0) : 0;
    const int from = max(start, at_block.begin), to = min(length, at_block.end);
    const int first = from / kTile + (warp - from / kTile % WARPS + WARPS) % WARPS;  // tile i is always warp i % WARPS's
    const int end = (to + kTile - 1) / kTile;
    const int count = first < end ? (end - first + WARPS - 1) / WARPS : 0;
    const int* pages = p.page_ids + at_block.pages;
    const int base = p.layer.of() * p.num_pages;

    // Lane i < 16 looks up where token i of a tile lies; a page id is asked for one tile before it is needed.
    auto lookup = [&](int i) {
      const int token = (first + i * WARPS) * kTile + lane % kTile;
      const bool read = i < count && token >= from && token < to;
      const int page = read ? pages[token / p.page_size] + base : 0;
      return read ? (static_cast<int64_t>(page) * p.page_size + token % p.page_size) * p.kv_heads + kv_head : int64_t{-1};
    };
    int64_t next = lookup(0);
    auto fetch = [&](int i) {
      const uint32_t stage = mine + i % STAGES * kStage;
      constexpr int kRows = 32 / kWords;  // token rows of one instruction; 1 where a row takes 32 lanes
      const int word = lane % kWords;
#pragma unroll
      for (int r = 0; r < kTile; r += kRows) {
        const int at = r + lane / kWords;
        const int64_t where = __shfl_sync(~0u, next, at);
        const bool read = where >= 0;
        const int64_t byte = (read ? where : 0) * kRow + word * 16;
        const uint32_t to = stage + at * kRow + (word ^ (at % 8)) * 16;
        copy_async(to, static_cast<const uint8_t*>(p.keys) + byte, read);
        copy_async(to + kTile * kRow, static_cast<const uint8_t*>(p.values) + byte, read);
      }
      next = lookup(i + 1);
    };
    // The kernel before appends the last token, and nothing else of what is read here: tiles before it can be fetched now.
    const bool early = (first + (STAGES - 2) * WARPS + 1) * kTile < length;
    if (!early) wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      if (i < count) fetch(i);
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
    if (early) wait_for_previous_kernel();

    // The queries of this KV head, as right operands: head g of each eight, dimensions in pairs.
    uint32_t q[NT][D / 16][2];
    const T* query = static_cast<const T*>(p.query) + (static_cast<int64_t>(at_block.token) * heads + kv_head * p.group) * D;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        const bool real = n * 8 + g < p.group;
        const uint32_t* words = reinterpret_cast<const uint32_t*>(query + (real ? n * 8 + g : 0) * D + k * 16 + t * 2);
        q[n][k][0] = real ? words[0] : 0;
        q[n][k][1] = real ? words[4] : 0;
      }
    }

    float maximum[NT][2], sum[NT][2], o[NT][D / 16][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      maximum[n][0] = maximum[n][1] = -INFINITY;
      sum[n][0] = sum[n][1] = 0.f;
#pragma unroll
      for (int d = 0; d < D / 16; ++d) o[n][d][0] = o[n][d][1] = o[n][d][2] = o[n][d][3] = 0.f;
    }
    const float factor = CAP ? p.scale / p.cap : p.scale * kLog2e, after = p.cap * kLog2e;
    for (int i = 0; i < count; ++i) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
      __syncwarp();
      if (i + STAGES - 1 < count) fetch(i + STAGES - 1);
      asm volatile("cp.async.commit_group;" ::: "memory");
      const uint32_t stage = mine + i % STAGES * kStage;
      float s[NT][4] = {};
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        uint32_t a[4];
        const int at = lane % 16, word = k * 2 + lane / 16;
        load_matrices(a, stage + at * kRow + (word ^ (at % 8)) * 16);
#pragma unroll
        for (int n = 0; n < NT; ++n) mma<T>(s[n], a, q[n][k][0], q[n][k][1]);
      }
      const int token = (first + i * WARPS) * kTile + g;
      const bool seen[2] = {token >= from && token < to, token + 8 >= from && token + 8 < to};
      uint32_t weights[NT][PARTS][2];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x = CAP ? tanh_of(s[n][e] * factor) * after : s[n][e] * factor;
          s[n][e] = seen[e / 2] ? x : -INFINITY;
        }
        float keep[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float top = fmaxf(s[n][e], s[n][e + 2]);
#pragma unroll
          for (int m = 4; m < 32; m *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
          top = fmaxf(top, maximum[n][e]);
          keep[e] = exp2_of(maximum[n][e] - top);
          maximum[n][e] = top;
          s[n][e] = exp2_of(s[n][e] - top);
          s[n][e + 2] = exp2_of(s[n][e + 2] - top);
          sum[n][e] = sum[n][e] * keep[e] + (s[n][e] + s[n][e + 2]);
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t two = Pair<T>::of(s[n][h * 2], s[n][h * 2 + 1]);
            weights[n][part][h] = transposed(two);
            if (part + 1 < PARTS) {
              const float2 taken = Pair<T>::wide(two);
              s[n][h * 2] = (s[n][h * 2] - taken.x) * Pair<T>::kScale;
              s[n][h * 2 + 1] = (s[n][h * 2 + 1] - taken.y) * Pair<T>::kScale;
            }
          }
        }
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
          o[n][d][0] *= keep[0];
          o[n][d][1] *= keep[1];
          o[n][d][2] *= keep[0];
          o[n][d][3] *= keep[1];
        }
      }
#pragma unroll
      for (int d = 0; d < D / 16; ++d) {
        uint32_t a[4];
        const int at = lane % 8 + lane / 16 * 8, word = d * 2 + lane / 8 % 2;
        load_transposed(a, stage + (kTile + at) * kRow + (word ^ (at % 8)) * 16);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          float c[PARTS][4] = {};
#pragma unroll
          for (int part = 0; part < PARTS; ++part) mma<T>(c[part], a, weights[n][part][0], weights[n][part][1]);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float x = c[PARTS - 1][e];
#pragma unroll
            for (int part = PARTS - 2; part >= 0; --part) x = c[part][e] + x * (1.f / Pair<T>::kScale);
            o[n][d][e] += x;
          }
        }
      }
      __syncwarp();
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int m = 4; m < 32; m *= 2) sum[n][e] += __shfl_xor_sync(~0u, sum[n][e], m);
      }
    }
    __syncthreads();  // the ring is free for merging: (warp, head, D), then (warp, head) maxima and sums
    float* outputs = reinterpret_cast<float*>(shared);
    float* maxima = outputs + WARPS * kHeads * (D + 4);
    float* sums = maxima + WARPS * kHeads;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int d = 0; d < D / 16; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          outputs[(warp * kHeads + n * 8 + t * 2 + e % 2) * (D + 4) + d * 16 + g + e / 2 * 8] = o[n][d][e];
        }
      }
      if (g == 0) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          maxima[warp * kHeads + n * 8 + t * 2 + e] = maximum[n][e];
          sums[warp * kHeads + n * 8 + t * 2 + e] = sum[n][e];
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.group * D; i += WARPS * 32) {
      const int head = i / D, d = i % D;
      float top = -INFINITY, l = 0.f, x = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) top = fmaxf(top, maxima[w * kHeads + head]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float keep = weight_of(maxima[w * kHeads + head], top);
        l += sums[w * kHeads + head] * keep;
        x += outputs[(w * kHeads + head) * (D + 4) + d] * keep;
      }
      const int query_head = kv_head * p.group + head;
      if (split && !at_block.whole) {
        const int64_t at = static_cast<int64_t>(block) * heads + query_head;
        p.part[at * D + d] = x;
        if (d == 0) {
          float* pair = p.part + static_cast<int64_t>(p.blocks) * heads * D + at * 2;
          pair[0] = top;
          pair[1] = l;
        }
      } else {
        out[i] = rounded<T>(finish<T>(x, top, l, p.sinks, query_head));
        if (d == 0) p.lse[static_cast<int64_t>(item) * heads + query_head] = (top + __log2f(l)) * kLn2;
      }
    }
  }
  wait_for_previous_kernel();
}

// Pieces of an item added up in their order. One block of D threads for each item and query head, heads side by side.
template <typename T, int D>
__global__ void merge_pieces(const Decode p, int heads) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int item = blockIdx.x / heads, head = blockIdx.x % heads, d = threadIdx.x;
  const int64_t at = static_cast<int64_t>(item) * heads + head;
  T* out = static_cast<T*>(p.out) + at * D;
  if (!p.live[item]) {
    out[d] = rounded<T>(0.f);
    if (d == 0) p.lse[at] = -INFINITY;
    return;
  }
  const int first = p.offsets[item], end = p.offsets[item + 1];
  if (end - first == 1) return;  // it was written whole
  const float* pairs = p.part + static_cast<int64_t>(p.blocks) * heads * D;
  float top = -INFINITY, l = 0.f, x = 0.f;
  for (int i = first; i < end; ++i) top = fmaxf(top, pairs[(static_cast<int64_t>(i) * heads + head) * 2]);
#pragma unroll 4
  for (int i = first; i < end; ++i) {
    const int64_t from = static_cast<int64_t>(i) * heads + head;
    const float keep = weight_of(pairs[from * 2], top);
    l += pairs[from * 2 + 1] * keep;
    x += p.part[from * D + d] * keep;
  }
  out[d] = rounded<T>(finish<T>(x, top, l, p.sinks, head));
  if (d == 0) p.lse[at] = (top + __log2f(l)) * kLn2;
}

}  // namespace paged
