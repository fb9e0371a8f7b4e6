// x · Wᵀ for up to 16 tokens: a product bound by reading W once.
//
// A tile is 16 rows of W. One thread streams tiles through a ring of shared memory with tensor copies, which keep about
// 80 KiB in flight on each multiprocessor; eight warps split each stage of K between them,
// multiply on tensor cores with W as the left operand (its 16 rows fill the instruction; tokens are its 8 columns),
// and add up their parts in a fixed order. So a token's bits depend neither on the other tokens nor on the launch.
//
// W does not depend on the kernel before, so its first stages are fetched while that one still runs (programmatic
// dependent launch); x is waited for.
#pragma once
#include <cuda.h>

#include "common.cuh"

namespace paged {

constexpr int kSkinnyTokens = 16;  // at most
constexpr int kTileRows = 16;
constexpr int kChunk = 512;           // elements of K in one stage
constexpr int kBlock = 64;            // elements of K in one swizzled row of 128 bytes
constexpr int kHalf = kChunk * 8 * 2;  // bytes of 8 rows of one chunk: what one copy brings
constexpr int kConsumers = 8;
constexpr int kThreads = (kConsumers + 2) * 32;

enum class Out { kRounded, kGated, kFloat };

__device__ __forceinline__ void barrier_init(uint64_t* b, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(b)), "r"(count));
}
__device__ __forceinline__ void barrier_expect(uint64_t* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(smem_address(b)),
      "r"(parity)
      : "memory");
}
// 8 rows × kChunk elements, as kChunk / kBlock blocks of 8 rows × 128 bytes, 16-byte words of row r exchanged by r.
// One instruction for 8 KiB: copies of a row each would be bound by the rate at which they are issued.
__device__ __forceinline__ void copy_rows(void* to, const CUtensorMap* map, int row, int block, uint64_t* b,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(b)), "r"(0), "r"(row), "r"(block), "l"(policy)
      : "memory");
}
constexpr uint64_t kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000;
struct Product {
  Layer layer;       // which of the stacked weights
  void* out;         // kRounded, kGated: T (tokens, n); kFloat: float (splits, tokens, n), to be added up
  int tokens, n, k;  // n: columns of the output
  int splits;        // of k over thread blocks; more than one only for kFloat
  int layer_rows;    // rows of one layer's weight; for kGated `n` gates, then `n` ups
};

// Bytes of shared memory: alignment, barriers, x in stages of K, the ring, two buffers for adding up.
template <int TILES>
constexpr int shared_bytes(int chunks, int stages) {
  return 1024 + (chunks * TILES + stages * 2) * kHalf + 2 * kConsumers * kTileRows * TILES * 8 * 4 + 256;
}

// `weights`: (layers × rows, k); `x`: (tokens, k); both as 64 × rows × k / 64, in boxes of 64 × 8 × 8.
template <typename T, int TILES, int STAGES, Out OUT>
__global__ __launch_bounds__(kThreads, 1) void skinny_product(const __grid_constant__ CUtensorMap weights,
                                                              const __grid_constant__ CUtensorMap x, const Product p) {
  extern __shared__ uint8_t unaligned[];
  constexpr int kTokens = TILES * 8;
  const int chunks = p.k / p.splits / kChunk;
  uint8_t* xs = unaligned + (1024 - smem_address(unaligned) % 1024) % 1024;
  uint8_t* ring = xs + chunks * TILES * kHalf;
  float* sums = reinterpret_cast<float*>(ring + STAGES * 2 * kHalf);
  uint64_t* full = reinterpret_cast<uint64_t*>(sums + 2 * kConsumers * kTileRows * kTokens);
  uint64_t* empty = full + STAGES;
  uint64_t* ready = empty + STAGES;  // of x, one for each chunk
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int groups = gridDim.x / p.splits, group = blockIdx.x / p.splits, split = blockIdx.x % p.splits;
  constexpr int kColumns = OUT == Out::kGated ? kTileRows / 2 : kTileRows;  // of the output, from one tile
  const int tiles = p.n / kColumns;

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, kConsumers);
    }
    for (int i = 0; i < chunks; ++i) barrier_init(ready + i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_kernel_start();

  if (warp == kConsumers) {
    if (lane != 0) return;
    const int first = p.layer.of() * p.layer_rows;
    int step = 0;
    for (int tile = group; tile < tiles; tile += groups) {
      const int low = first + tile * kColumns, high = low + (OUT == Out::kGated ? p.n : 8);
      for (int c = 0; c < chunks; ++c, ++step) {
        const int stage = step % STAGES, block = (split * chunks + c) * (kChunk / kBlock);
        barrier_wait(empty + stage, (step / STAGES % 2) ^ 1);
        barrier_expect(full + stage, 2 * kHalf);
        copy_rows(ring + stage * 2 * kHalf, &weights, low, block, full + stage, kEvictFirst);
        copy_rows(ring + (stage * 2 + 1) * kHalf, &weights, high, block, full + stage, kEvictFirst);
      }
    }
    return;
  }
  if (warp == kConsumers + 1) {
    if (lane != 0) return;
    wait_for_previous_kernel();
    for (int c = 0; c < chunks; ++c) {
      barrier_expect(ready + c, TILES * kHalf);
      for (int i = 0; i < TILES; ++i) {
        copy_rows(xs + (c * TILES + i) * kHalf, &x, i * 8, (split * chunks + c) * (kChunk / kBlock), ready + c,
                  kEvictLast);
      }
    }
    return;
  }

  const int g = lane / 4, t = lane % 4;
  // A thread's 16 bytes are 8 elements of K of one row; W and x are permuted along K alike. Even words of even rows are
  // exchanged with even ones, so the 8 lanes of one access meet no bank twice.
  const int at[2] = {warp * 1024 + g * 128 + ((2 * t) ^ g) * 16, warp * 1024 + g * 128 + ((2 * t + 1) ^ g) * 16};
  int step = 0, turn = 0;
  for (int tile = group; tile < tiles; tile += groups, turn ^= 1) {
    float acc[TILES][4] = {};
    for (int c = 0; c < chunks; ++c, ++step) {
      const int stage = step % STAGES;
      if (step < chunks) barrier_wait(ready + c, 0);
      barrier_wait(full + stage, step / STAGES % 2);
      const uint8_t* a = ring + stage * 2 * kHalf;
      const uint8_t* b = xs + c * TILES * kHalf;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 top = *reinterpret_cast<const uint4*>(a + at[j]);
        const uint4 low = *reinterpret_cast<const uint4*>(a + kHalf + at[j]);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          const uint4 v = *reinterpret_cast<const uint4*>(b + i * kHalf + at[j]);
          mma<T>(acc[i], {top.x, low.x, top.y, low.y}, v.x, v.y);
          mma<T>(acc[i], {top.z, low.z, top.w, low.w}, v.z, v.w);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + stage);
    }
    // sums[turn][warp][token][row]
    float* part = sums + turn * kConsumers * kTokens * kTileRows;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        part[(warp * kTokens + i * 8 + t * 2 + e % 2) * kTileRows + g + e / 2 * 8] = acc[i][e];
      }
    }
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * 32) : "memory");
    const int column = threadIdx.x % kColumns;
    for (int token = threadIdx.x / kColumns; token < p.tokens; token += kConsumers * 32 / kColumns) {
      float one = 0, two = 0;
#pragma unroll
      for (int i = 0; i < kConsumers; ++i) {
        one += part[(i * kTokens + token) * kTileRows + column];
        if (OUT == Out::kGated) two += part[(i * kTokens + token) * kTileRows + column + kColumns];
      }
      const int64_t at = static_cast<int64_t>(token) * p.n + tile * kColumns + column;
      if constexpr (OUT == Out::kFloat) {
        static_cast<float*>(p.out)[static_cast<int64_t>(split) * p.tokens * p.n + at] = one;
      } else if constexpr (OUT == Out::kGated) {
        one = static_cast<float>(rounded<T>(one));
        two = static_cast<float>(rounded<T>(two));
        static_cast<T*>(p.out)[at] = rounded<T>(one / (1.f + __expf(-one)) * two);
      } else {
        static_cast<T*>(p.out)[at] = rounded<T>(one);
      }
    }
  }
}

}  // namespace paged
