// FA3 prefill over pages with a producer of this project's own.
//
// FlashInfer's computes each 16-byte copy's two addresses in 64 bits, one after the other: some 14 dependent instructions a
// copy, which keep the tensor cores waiting. Here a row of keys is a 32-bit number and its address one multiply-add, rows of
// shared memory lie at constant distances, and page ids are read two tiles before they are needed. What is computed, in
// which order, is the same: the consumer is FlashInfer's.
#pragma once
#include <flashinfer/attention/hopper/prefill_sm90.cuh>

namespace flashinfer {

template <typename AdditionalParams, typename Traits, bool CAUSAL>
struct PagedMainloop : SparseCollectiveMainloop<AdditionalParams, Traits, CAUSAL, false> {
  using Base = SparseCollectiveMainloop<AdditionalParams, Traits, CAUSAL, false>;
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using Element = typename Traits::DTypeKV;
  static constexpr int kTile = Traits::CTA_KV, kDim = Traits::HEAD_DIM_QK, kThreads = Base::NUM_COPY_THREADS;
  static constexpr int kWords = kDim * sizeof(Element) / 16;  // 16-byte words of a row: its threads, side by side
  static constexpr int kApart = kThreads / kWords;            // rows between a thread's own
  static constexpr int kRows = kTile / kApart;                // rows that a thread copies of a tile
  // A thread's rows are whole swizzle atoms (8 rows) apart, its row's threads lie in one warp, and each looks up one row.
  static_assert(kApart % 8 == 0 && kTile % kApart == 0 && 32 % kWords == 0 && kRows <= kWords);

  // Where token `tile × kTile + …` of a row lies in the pool, in tokens: the lane's share of the tile's rows.
  struct Pages {
    const typename Base::IdType* ids;
    uint_fastdiv size;
    int length, group, lane;

    __device__ __forceinline__ uint32_t operator()(int tile) const {
      const int token = tile * kTile + group + lane * kApart;
      if (tile < 0 || lane >= kRows || token >= length) return 0;
      uint32_t page, at;
      size.divmod(token, page, at);
      return static_cast<uint32_t>(ids[page]) * static_cast<uint32_t>(size) + at;
    }
  };

  // Copy a tile's rows; those past `valid` become zeros.
  template <typename Tile>
  static __device__ __forceinline__ void fetch(const Tile& shared, int stage, const uint8_t* from, uint32_t row_bytes,
                                               uint32_t mine, int group, int word, int valid) {
    const uint32_t to = cute::cast_smem_ptr_to_uint(&shared(group, word * (16 / static_cast<int>(sizeof(Element))), stage));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t row = __shfl_sync(~0u, mine, i, kWords);
      const uint8_t* source = from + static_cast<uint64_t>(row) * row_bytes;
      const int bytes = group + i * kApart < valid ? 16 : 0;
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to + i * kApart * 128), "l"(source),
                   "r"(bytes)
                   : "memory");
    }
  }

  template <bool WINDOW, typename BlockCoord, typename Scheduler, typename SharedStorage>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline_k, MainloopPipeline pipeline_v,
                           PipelineState& write_k, PipelineState& write_v, SharedStorage& storage, Scheduler& scheduler,
                           typename Scheduler::Params const& scheduler_params,
                           typename Scheduler::WorkTileInfo& work_tile, BlockCoord const& coord, int work_index) {
    auto [q_tile, q_head, kv_head, q_start, kv_start, q_len, kv_len, batch] = coord;
    Tensor sQ = make_tensor(make_smem_ptr(storage.smem_q.data()), typename Base::SmemLayoutQ{});
    Tensor sK = make_tensor(make_smem_ptr(storage.smem_k.data()), typename Base::SmemLayoutK{});
    Tensor sV = make_tensor(make_smem_ptr(storage.smem_v.data()), typename Base::SmemLayoutV{});

    const int thread = threadIdx.x % kThreads, word = thread % kWords, group = thread / kWords;
    const Pages rows{params.kv_indices + kv_start, params.page_size, kv_len, group, word};
    const uint32_t row_bytes = static_cast<uint32_t>(stride<0>(params.layout_K)) * sizeof(Element);
    const int64_t head = static_cast<int64_t>(kv_head) * stride<2>(params.layout_K);
    const auto* keys = reinterpret_cast<const uint8_t*>(params.K_ptr + head) + word * 16;
    const auto* values = reinterpret_cast<const uint8_t*>(params.V_ptr + head) + word * 16;
    const int last = this->get_num_kv_tiles(params, q_tile, q_len, kv_len) - 1;
    int first = 0;
    if constexpr (WINDOW) {
      first = get_swa_begin_kv_tile_idx<Base::CTA_Q, kTile>(params.window_left, q_tile, q_len, kv_len);
    }
    const int valid = kv_len - last * kTile;

    uint32_t at_value = rows(last), at_key = rows(last > first ? last - 1 : -1);
    pipeline_k.producer_acquire(write_k);
    fetch(sK, write_k.index(), keys, row_bytes, at_value, group, word, valid);
    pipeline_k.producer_commit(write_k, cutlass::arch::cpasync_barrier_arrive);
    ++write_k;

    cutlass::arch::NamedBarrier::sync(Base::NUM_MMA_THREADS + Traits::NUM_PRODUCER_THREADS,
                                      static_cast<int>(NamedBarriers::kQueryEmpty));
    if (threadIdx.x < 32 && cute::elect_one_sync()) {
      Tensor mQ = params.tma_load_Q.get_tma_tensor(params.layout_Q.shape());
      Tensor gQ = get_local_tile_tensor(mQ, select<0, 2>(typename Base::TileShape_QKD{}), q_head, q_start,
                                        q_len)(_, _, q_tile);
      auto [from, to] = tma_partition(params.tma_load_Q, _0{}, Layout<_1>{},
                                      group_modes<0, 2>(make_tensor(sQ.data(), make_layout(sQ.layout(), Layout<_1>{}))),
                                      group_modes<0, 2>(make_tensor(gQ.data(), make_layout(gQ.layout(), Layout<_1>{}))));
      storage.barrier_Q.arrive_and_expect_tx(Base::TmaTransactionBytesQ);
      copy(params.tma_load_Q.with(
               reinterpret_cast<cutlass::arch::ClusterTransactionBarrier::ValueType&>(storage.barrier_Q), 0),
           from, to);
    }
    __syncwarp();
    // The output of the tile before lies where values go.
    storage.barrier_O.wait((work_index + 1) % 2);

    int seen = valid;
#pragma unroll 1
    for (int tile = last; tile > first; --tile, seen = kTile) {
      const uint32_t next = rows(tile - 2 >= first ? tile - 2 : -1);
      pipeline_k.producer_acquire(write_k);
      fetch(sK, write_k.index(), keys, row_bytes, at_key, group, word, kTile);
      pipeline_k.producer_commit(write_k, cutlass::arch::cpasync_barrier_arrive);
      ++write_k;
      pipeline_v.producer_acquire(write_v);
      fetch(sV, write_v.index(), values, row_bytes, at_value, group, word, seen);
      pipeline_v.producer_commit(write_v, cutlass::arch::cpasync_barrier_arrive);
      ++write_v;
      at_value = at_key;
      at_key = next;
    }
    scheduler.prefetch_next_work(scheduler_params, work_tile);
    pipeline_v.producer_acquire(write_v);
    fetch(sV, write_v.index(), values, row_bytes, at_value, group, word, seen);
    pipeline_v.producer_commit(write_v, cutlass::arch::cpasync_barrier_arrive);
    ++write_v;
    scheduler.broadcast_next_work(work_tile);
  }
};

// One thread block a multiprocessor for the whole step. Tiles of queries lie in the plan by falling cost, dealt to `gridDim.x`
// lists; the heads that share a tile follow each other, and blocks take what comes to and fro, so that each has as much to do
// as the others. With many tiles the query heads of one KV head are done before the next one's, so that what is read together
// fits the cache. Which block computes a tile, and when, does not enter its bits.
template <typename IdType>
struct PagedScheduler : BatchPrefillTileScheduler<IdType> {
  using Base = BatchPrefillTileScheduler<IdType>;
  using typename Base::Arguments;
  using typename Base::Params;

  static Params to_underlying_arguments(Arguments const& args) { return Base::to_underlying_arguments(args); }
  static dim3 get_grid_dim(Arguments const&, int multiprocessors) { return dim3(multiprocessors); }

  struct WorkTileInfo : Base::WorkTileInfo {
    CUTLASS_DEVICE bool is_valid(Params const&) const { return this->ptr_end > 0; }
  };

  static CUTLASS_DEVICE WorkTileInfo turn(Params const& params, uint32_t counter) {
    WorkTileInfo info{};
    const uint32_t blocks = gridDim.x, tiles = params.work_indptr[blocks];
    const uint32_t group = params.group_size_fastdiv.divisor, kv_heads = params.num_qo_heads / group;
    const bool many = tiles * group >= 4 * blocks;
    const uint32_t together = many ? group : params.num_qo_heads, rounds = many ? kv_heads : 1;
    const uint32_t items = tiles * together, turns = (items + blocks - 1) / blocks;
    for (; counter < turns * rounds; ++counter) {
      const uint32_t round = counter / turns, turn = counter % turns;
      const uint32_t item = turn * blocks + ((turn + round) % 2 ? blocks - 1 - blockIdx.x : blockIdx.x);
      if (item >= items) continue;
      const uint32_t rank = item / together, at = params.work_indptr[rank % blocks] + rank / blocks;
      info.counter = counter;
      info.qo_head_idx = round * together + item % together;
      info.kv_head_idx = info.qo_head_idx / group;
      info.q_tile_idx = params.qo_tile_indices[at];
      info.qo_indptr = params.qo_indptr[at];
      info.kv_indptr = params.kv_indptr[at];
      info.qo_len = params.qo_lens[at];
      info.kv_len = params.kv_lens[at];
      info.batch_idx = params.batch_indices[at];
      info.ptr_end = 1;
      break;
    }
    return info;
  }

  CUTLASS_DEVICE WorkTileInfo get_initial_work(Params const& params) const { return turn(params, 0); }
  CUTLASS_DEVICE void prefetch_next_work(Params const&, WorkTileInfo&) const {}
  CUTLASS_DEVICE void broadcast_next_work(WorkTileInfo&) const {}

  template <bool is_producer = false>
  CUTLASS_DEVICE WorkTileInfo get_next_work(Params const& params, WorkTileInfo const& current) const {
    return turn(params, current.counter + 1);
  }
};

// Launch with plans that are the same for all heads.
template <typename Traits, bool WINDOW, bool CAUSAL, typename Given>
cudaError_t paged_prefill(Given& given, cudaStream_t stream) {
  using Mainloop = PagedMainloop<typename Given::AdditionalParams, Traits, CAUSAL>;
  using Epilogue = CollectiveEpilogue<Traits>;
  using Scheduler = PagedScheduler<typename Traits::IdType>;
  if (given.k_page_stride != given.page_size * given.k_stride_n) return cudaErrorInvalidValue;  // a pool is contiguous
  const auto keys = get_gmem_layout(0, given.num_kv_heads, Traits::HEAD_DIM_QK, given.k_stride_n, given.k_stride_h);
  const auto values = get_gmem_layout(0, given.num_kv_heads, Traits::HEAD_DIM_VO, given.v_stride_n, given.v_stride_h);
  auto mainloop = Mainloop::to_underlying_arguments(
      {given.q_ptr, get_gmem_layout(given.nnz_qo, given.num_qo_heads, Traits::HEAD_DIM_QK, given.q_stride_n, given.q_stride_h),
       given.k_ptr, keys, given.v_ptr, values, given.kv_indices, given.window_left, given.k_page_stride,
       given.v_page_stride, static_cast<uint32_t>(given.page_size), given.additional_params});
  auto epilogue = Epilogue::to_underlying_arguments(
      {given.o_ptr, get_gmem_layout(given.nnz_qo, given.num_qo_heads, Traits::HEAD_DIM_VO, given.o_stride_n, given.o_stride_h),
       given.lse_ptr, get_lse_gmem_layout(given.nnz_qo, given.num_qo_heads)});
  typename Scheduler::Arguments work = {given.work_indptr, given.head_indices, given.qo_tile_indices,
                                        given.qo_indptr,   given.kv_indptr,    given.qo_lens,
                                        given.kv_lens,     given.batch_indices,
                                        cutlass::FastDivmod(given.num_qo_heads / given.num_kv_heads), given.num_qo_heads};
  auto scheduler = Scheduler::to_underlying_arguments(work);
  auto kernel = PrefillWithKVCacheKernel<Mainloop, Epilogue, Traits, WINDOW, CAUSAL, Scheduler, false>;
  constexpr int shared = sizeof(typename Traits::SharedStorage);
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status == cudaSuccess) status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status != cudaSuccess) return status;
  kernel<<<Scheduler::get_grid_dim(work, multiprocessors), Traits::NUM_WARPS * 32, shared, stream>>>(mainloop, epilogue,
                                                                                                     scheduler);
  return cudaGetLastError();
}

}  // namespace flashinfer
