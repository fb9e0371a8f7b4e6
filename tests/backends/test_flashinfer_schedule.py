"""The schedule of FA3's thread blocks, compiled for the host as it stands in the kernel's source: every tile of queries
is computed once under every head, whatever the number of blocks, and blocks have about as much to do as each other."""

import shutil
import subprocess

import pytest

from paged.backends.flashinfer import generate

STUBS = """
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>
#define CUTLASS_DEVICE inline
struct dim3 { unsigned x, y, z; dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };
dim3 gridDim, blockIdx;
struct Divisor { uint32_t divisor; };
template <typename IdType> struct BatchPrefillTileScheduler {
  struct Arguments {};
  struct Params {
    IdType *work_indptr, *qo_tile_indices, *qo_indptr, *kv_indptr, *qo_lens, *kv_lens, *batch_indices;
    Divisor group_size_fastdiv; int num_qo_heads;
  };
  static Params to_underlying_arguments(Arguments const&) { return {}; }
  struct WorkTileInfo {
    int q_tile_idx = 0, qo_head_idx = 0, kv_head_idx = 0, qo_indptr = 0, kv_indptr = 0, qo_len = 0, kv_len = 0,
        batch_idx = 0, counter = 0, ptr_begin = 0, ptr_end = 0;
  };
};
"""

MAIN = """
// `tiles` tiles of falling cost, dealt to `blocks` lists as the plan deals them; the cost of each is in qo_lens.
int main(int, char** argv) {
  const int blocks = atoi(argv[1]), tiles = atoi(argv[2]), kv_heads = atoi(argv[3]), group = atoi(argv[4]);
  std::vector<int> work(blocks + 1, 0), index(tiles + 1), cost(tiles + 1);
  for (int i = 0; i < blocks; ++i) work[i + 1] = work[i] + (tiles > i ? (tiles - i + blocks - 1) / blocks : 0);
  for (int r = 0; r < tiles; ++r) {
    const int at = work[r % blocks] + r / blocks;
    index[at] = r;
    cost[at] = tiles - r;
  }
  int* any = index.data();
  PagedScheduler<int>::Params params = {work.data(), any, any, any, cost.data(), any, any, {uint32_t(group)},
                                        kv_heads * group};
  std::vector<int> seen(tiles * kv_heads * group, 0);
  long most = 0, sum = 0;
  gridDim = dim3(blocks);
  for (int b = 0; b < blocks; ++b) {
    blockIdx = dim3(b);
    PagedScheduler<int> scheduler;
    long mine = 0;
    for (auto tile = scheduler.get_initial_work(params); tile.is_valid(params);
         tile = scheduler.get_next_work<true>(params, tile)) {
      if (tile.kv_head_idx != tile.qo_head_idx / group) return 2;
      ++seen[tile.q_tile_idx * kv_heads * group + tile.qo_head_idx];
      mine += tile.qo_len;
    }
    most = std::max(most, mine);
    sum += mine;
  }
  for (int count : seen) if (count != 1) return 3;
  printf("%.4f\\n", sum ? double(most) * blocks / sum : 1.0);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed: the schedule is compiled for the host"
    text = (generate.HOPPER / "paged_prefill.cuh").read_text()
    start = text.index("template <typename IdType>\nstruct PagedScheduler")
    schedule = text[start : text.index("// Launch with plans", start)]
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "schedule.cc").write_text(STUBS + schedule + MAIN)
    subprocess.run([compiler, "-std=c++17", "-O1", "-o", folder / "schedule", folder / "schedule.cc"], check=True)
    return folder / "schedule"


@pytest.mark.parametrize(
    ("blocks", "tiles", "kv_heads", "group", "most"),
    [
        (132, 256, 8, 4, 1.02),  # many tiles: one KV head after the other
        (132, 512, 8, 4, 1.02),
        (132, 66, 3, 8, 1.05),
        (132, 528, 1, 1, 1.05),
        (132, 33, 1, 16, 1.2),
        (132, 32, 8, 4, 1.05),  # few: all heads together
        (132, 1, 8, 4, 5.0),
        (132, 0, 8, 4, 1.0),
        (7, 5, 2, 3, 1.3),
        (7, 29, 5, 3, 1.1),
        (1, 9, 2, 2, 1.0),
    ],
)
def test_every_tile_is_computed_once_under_every_head(program, blocks, tiles, kv_heads, group, most):
    done = subprocess.run(
        [program, *map(str, (blocks, tiles, kv_heads, group))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, "2: another KV head than the query head's; 3: a tile not computed once"
    assert float(done.stdout) <= most
