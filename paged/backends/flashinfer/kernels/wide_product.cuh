// x · Wᵀ for 17 to 64 tokens: a product still bound by reading W once, of more tokens than a thread's registers or a block's
// shared memory hold whole.
//
// A thread block takes a tile of rows of W and one part of K. One thread streams both operands, 64 elements of K a stage, through
// a ring of shared memory; one warpgroup multiplies from there (wgmma), 64 tokens by all of the rows at once, so W passes through
// once and x once for every tile. The more rows, the less of x is read again: K is therefore cut into parts where W has
// few rows, and the parts are added up in their order by the kernel that follows. An output's sum goes through its part of K
// in order, whatever the tile is, so a token's bits depend neither on the other tokens nor on the launch.
//
// As in skinny_product, W's first stages are fetched while the kernel before still runs, and x is waited for.
#pragma once
#include "skinny_product.cuh"

namespace paged {

constexpr int kWideTokens = 64;                        // of one product: the rows of a wgmma
constexpr int kWideBlock = 32;                         // rows of W of one wgmma; for kGated 16 gates, then their 16 ups
constexpr int kWideBlocks = 8;                         // of a tile, at most: 128 registers of sums
constexpr int kWideK = 64;                             // elements of K in one stage: one swizzled row of 128 bytes
constexpr int kWideThreads = 128 + 32;
constexpr int kWideStageX = kWideTokens * kWideK * 2;  // bytes

template <int BLOCKS>
constexpr int kWideStage = kWideStageX + BLOCKS * kWideBlock * kWideK * 2;
constexpr int kWideRing = 216 * 1024;  // half of it, for two blocks a multiprocessor, leaves too little under way
template <int BLOCKS>
constexpr int kWideStages = kWideRing / kWideStage<BLOCKS> < 12 ? kWideRing / kWideStage<BLOCKS> : 12;
template <int BLOCKS>
constexpr int wide_shared_bytes = 1024 + kWideStages<BLOCKS> * (kWideStage<BLOCKS> + 16);

__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int row, int block, uint64_t* b, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(b)), "r"(0), "r"(row), "r"(block), "l"(policy)
      : "memory");
}
// Gates and ups side by side: `group` counts 16 rows.
__device__ __forceinline__ void copy_gated(void* to, const CUtensorMap* map, int group, int block, uint64_t* b,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %3, %3, %4, %5}], [%2], %6;" ::"r"(smem_address(to)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(b)), "r"(0), "r"(group), "r"(block), "l"(policy)
      : "memory");
}

// Rows of 128 bytes, swizzled, eight of them after eight.
__device__ __forceinline__ uint64_t matrix_at(const void* p) {
  return (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(1024 / 16) << 32) | (static_cast<uint64_t>(1) << 16) |
         ((smem_address(p) & 0x3FFFF) >> 4);
}

#define PAGED_WGMMA(TYPE)                                                                                            \
  asm volatile(                                                                                                      \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE                                                    \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, 0, 0;"                           \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),  \
        "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])                     \
      : "l"(a), "l"(b))

// c += a · bᵀ for 64 × 16 by 32 × 16, both in shared memory.
template <typename T>
__device__ __forceinline__ void wide_mma(float (&c)[16], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, half>) {
    PAGED_WGMMA("f16");
  } else {
    PAGED_WGMMA("bf16");
  }
}
#undef PAGED_WGMMA

// `weights`: (layers × rows, k) in boxes of BLOCKS × 32 rows; `x`: (tokens, k) in boxes of 64 rows; both 64 of K at a time.
template <typename T, int BLOCKS, Out OUT>
__global__ __launch_bounds__(kWideThreads, 1) void wide_product(const __grid_constant__ CUtensorMap weights,
                                                                const __grid_constant__ CUtensorMap x, const Product p) {
  extern __shared__ uint8_t unaligned[];
  constexpr int kStages = kWideStages<BLOCKS>, kBytes = kWideStage<BLOCKS>;
  constexpr int kColumns = BLOCKS * (OUT == Out::kGated ? kWideBlock / 2 : kWideBlock);  // of the output, from one tile
  uint8_t* ring = unaligned + (1024 - smem_address(unaligned) % 1024) % 1024;
  uint64_t* full = reinterpret_cast<uint64_t*>(ring + kStages * kBytes);
  uint64_t* empty = full + kStages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int groups = gridDim.x / p.splits, group = blockIdx.x / p.splits, split = blockIdx.x % p.splits;
  const int steps = p.k / p.splits / kWideK, tiles = (p.n + kColumns - 1) / kColumns;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_kernel_start();

  if (warp == 4) {
    if (lane != 0) return;
    const int first = p.layer.of() * p.layer_rows, mine = group < tiles ? (tiles - 1 - group) / groups + 1 : 0;
    const int total = mine * steps;
    auto row_of = [&](int i) {
      const int row = first + (group + i / steps * groups) * kColumns;
      return OUT == Out::kGated ? row / 16 : row;
    };
    auto block_of = [&](int i) { return split * steps + i % steps; };
    auto copy_w = [&](int i) {
      const int stage = i % kStages;
      barrier_expect(full + stage, kBytes);
      uint8_t* to = ring + stage * kBytes + kWideStageX;
      if constexpr (OUT == Out::kGated) {
        copy_gated(to, &weights, row_of(i), block_of(i), full + stage, kEvictFirst);
      } else {
        copy_box(to, &weights, row_of(i), block_of(i), full + stage, kEvictFirst);
      }
    };
    auto copy_x = [&](int i) {
      const int stage = i % kStages;
      copy_box(ring + stage * kBytes, &x, 0, block_of(i), full + stage, kEvictLast);
    };
    const int early = min(total, kStages);
    for (int i = 0; i < early; ++i) copy_w(i);
    wait_for_previous_kernel();
    for (int i = 0; i < early; ++i) copy_x(i);
    for (int i = early; i < total; ++i) {
      barrier_wait(empty + i % kStages, (i / kStages % 2) ^ 1);
      copy_w(i);
      copy_x(i);
    }
    return;
  }

  const int g = lane / 4, t = lane % 4;
  int step = 0;
  for (int tile = group; tile < tiles; tile += groups) {
    float acc[BLOCKS][16];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
#pragma unroll
      for (int e = 0; e < 16; ++e) acc[i][e] = 0.f;
    }
    for (int s = 0; s < steps; ++s, ++step) {
      const int stage = step % kStages;
      barrier_wait(full + stage, step / kStages % 2);
      const uint64_t a = matrix_at(ring + stage * kBytes), b = matrix_at(ring + stage * kBytes + kWideStageX);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < kWideK / 16; ++k) {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) wide_mma<T>(acc[i], a + k * 2, b + i * (kWideBlock * 128 / 16) + k * 2);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      // The products of the stage before have ended; their stage is free.
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (s > 0 && lane == 0) barrier_arrive(empty + (step - 1) % kStages);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane == 0) barrier_arrive(empty + (step - 1) % kStages);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
#pragma unroll
      for (int half_row = 0; half_row < 2; ++half_row) {
        const int token = warp * 16 + g + half_row * 8;
        if (token >= p.tokens) continue;
#pragma unroll
        for (int j = 0; j < (OUT == Out::kGated ? 2 : 4); ++j) {
          const int column = tile * kColumns + i * (kColumns / BLOCKS) + j * 8 + t * 2;
          if (column >= p.n) continue;
          const float* c = acc[i] + j * 4 + half_row * 2;
          const int64_t at = static_cast<int64_t>(token) * p.n + column;
          if constexpr (OUT == Out::kFloat) {
            float* out = static_cast<float*>(p.out) + static_cast<int64_t>(split) * p.tokens * p.n + at;
            *reinterpret_cast<float2*>(out) = make_float2(c[0], c[1]);
          } else {
            T two[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float one = static_cast<float>(rounded<T>(c[e])), up = static_cast<float>(rounded<T>(c[8 + e]));
              two[e] = rounded<T>(one / (1.f + __expf(-one)) * up);
            }
            *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) + at) = *reinterpret_cast<const uint32_t*>(two);
          }
        }
      }
    }
  }
}

}  // namespace paged
