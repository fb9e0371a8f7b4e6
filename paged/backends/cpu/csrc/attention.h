// Attention over pages: online softmax in float32 over blocks of 64 positions.
//
// Blocks start at multiples of 64 positions of the request, and a query's sums go over positions in their order. So its
// bits depend on its own row alone: not on how the prompt was cut, on page sizes or numbers, on neighbours or threads.
// What a query does not see is not multiplied by zero but left out: a NaN there stays where it is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "elements.h"
#include "team.h"
#include "transpose.h"
#include "vector.h"

namespace paged {

constexpr int64_t kBlock = 64;
constexpr int64_t kVectors = kBlock / kLanes;
constexpr int64_t kQueries = kWideRegisters ? 6 : 1;  // together in registers
constexpr int64_t kMostGroup = 128, kMostDim = 512;
constexpr int64_t kMostTokens = 48;  // of an item; times a group of query heads at most that, or one group
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Pool {
  const char* keys;
  const char* values;
  Kind kind;
  int64_t pages, page_size, kv_heads, key_dim, value_dim;
};

struct StepRows {
  int64_t rows;
  const int32_t* kv_lens;
  const int32_t* query_offsets;
  const int32_t* page_offsets;
  const int32_t* page_ids;
  int64_t page_base;
};

struct Options {
  float scale;     // of logits, that of keys included
  float cap;       // 0: none
  int64_t window;  // positions seen, the query's own included; 0: all
  bool causal;
  const float* sinks;  // by query head, or null
  float value_scale;
};

// Up to `tokens` tokens of one row, from `first` of the step.
struct Item {
  int64_t row, first, tokens;
};

inline int64_t TokensOfItem(int64_t group) { return std::max<int64_t>(1, kMostTokens / group); }

inline std::vector<Item> ItemsOf(const StepRows& rows, int64_t group) {
  std::vector<Item> items;
  const int64_t most = TokensOfItem(group);
  for (int64_t row = 0; row < rows.rows; ++row) {
    for (int64_t first = rows.query_offsets[row]; first < rows.query_offsets[row + 1]; first += most) {
      items.push_back({row, first, std::min(most, rows.query_offsets[row + 1] - first)});
    }
  }
  return items;
}

inline int64_t Padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

// KV heads whose blocks one task goes through together. A pool lies token by token: what is read of one head brings its
// neighbours along. Tiles of many queries read less often than they compute, and stay in cache one by one.
inline int64_t HeadsTogether(const Pool& pool, const std::vector<Item>& items, int64_t threads) {
  constexpr int64_t kCache = 512 * 1024;
  for (const Item& item : items) {
    if (item.tokens > 1) return 1;
  }
  if (static_cast<int64_t>(items.size()) < 2 * threads) return 1;
  const int64_t bytes = kBlock * (pool.key_dim + pool.value_dim) * BytesOf(pool.kind);
  return std::clamp<int64_t>(kCache / bytes, 1, pool.kv_heads);
}

// What one thread works in, kept from call to call. By head and query: queries, states, largest logits, sums of
// weights; for one head at a time: weights, a block's keys transposed and its values where they must be converted.
struct Scratch {
  float *query, *state, *top, *total, *weights, *keys, *values, *zeros;

  Scratch(int64_t heads, int64_t queries, int64_t key_dim, int64_t value_dim) {
    static thread_local std::vector<float> kept;
    const int64_t k = Padded(key_dim), v = Padded(value_dim), own = Padded(heads * queries);
    const int64_t sizes[] = {heads * queries * k, heads * queries * v, own,        own,
                             queries * kBlock,    kBlock * k,          kBlock * v, k};
    float** const parts[] = {&query, &state, &top, &total, &weights, &keys, &values, &zeros};
    int64_t whole = kLanes;
    for (const int64_t size : sizes) whole += size;
    if (static_cast<int64_t>(kept.size()) < whole) kept.resize(whole);
    float* at = kept.data();
    at += (kLanes - reinterpret_cast<uintptr_t>(at) / sizeof(float) % kLanes) % kLanes;
    for (int i = 0; i < 8; ++i) {
      *parts[i] = at;
      at += sizes[i];
    }
    std::fill_n(zeros, k, 0.0f);
  }
};

// logits[r][j] = Σ_i query[r][i] · keys[i][j] for R queries and the 64 positions of a block.
template <int R>
inline void Logits(const float* query, const float* keys, int64_t dim, float* logits) {
  Floats sum[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) sum[r][c] = Floats{};
  }
  for (int64_t i = 0; i < dim; ++i, keys += kBlock) {
    Floats k[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) k[c] = Load(keys + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats q = Splat(query[r * dim + i]);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) sum[r][c] = Fma(q, k[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) Store(logits + r * kBlock + c * kLanes, sum[r][c]);
  }
}

// state[r] += Σ_j weights[r][j] · values[j] over positions from .. to − 1, for R queries and C vectors of columns.
template <int R, int C>
inline void Weighted(const float* weights, const float* const* values, int64_t from, int64_t to, float* state,
                     int64_t stride) {
  Floats sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sum[r][c] = Load(state + r * stride + c * kLanes);
  }
  for (int64_t j = from; j < to; ++j) {
    Floats v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) v[c] = Load(values[j] + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats w = Splat(weights[r * kBlock + j]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = Fma(w, v[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) Store(state + r * stride + c * kLanes, sum[r][c]);
  }
}

template <typename Call>
inline void InGroups(int64_t count, const Call& call) {
  int64_t at = 0;
  for (; at + kQueries <= count; at += kQueries) call(at, std::integral_constant<int, kQueries>());
  switch (count - at) {
    case 5: return call(at, std::integral_constant<int, std::min<int>(5, kQueries)>());
    case 4: return call(at, std::integral_constant<int, std::min<int>(4, kQueries)>());
    case 3: return call(at, std::integral_constant<int, std::min<int>(3, kQueries)>());
    case 2: return call(at, std::integral_constant<int, std::min<int>(2, kQueries)>());
    case 1: return call(at, std::integral_constant<int, 1>());
    default: return;
  }
}

inline void WeightedValues(const float* weights, int64_t queries, const float* const* values, int64_t from, int64_t to,
                           float* state, int64_t width) {
  const float* shifted[kBlock];
  InGroups(queries, [&](int64_t q, auto r) {
    constexpr int R = decltype(r)::value;
    float* into = state + q * width;
    const float* own = weights + q * kBlock;
    int64_t column = 0;
    for (; column + kBlock <= width; column += kBlock) {
      for (int64_t j = from; j < to; ++j) shifted[j] = values[j] + column;
      Weighted<R, kVectors>(own, shifted, from, to, into + column, width);
    }
    for (; column < width; column += kLanes) {
      for (int64_t j = from; j < to; ++j) shifted[j] = values[j] + column;
      Weighted<R, 1>(own, shifted, from, to, into + column, width);
    }
  });
}

struct Seen {
  int64_t low, high;  // positions low .. high − 1
};

inline Seen SeenBy(const StepRows& rows, const Options& options, const Item& item, int64_t token) {
  const int64_t length = rows.kv_lens[item.row];
  const int64_t position = length - rows.query_offsets[item.row + 1] + item.first + token;
  return {options.window ? std::max<int64_t>(0, position - (options.window - 1)) : 0,
          options.causal ? std::min(length, position + 1) : length};
}

// Where one head's keys or values of a block are, row by row of floats: in the pool, or converted into `own`.
inline void FindRows(const char* stored, Kind kind, int64_t dim, int64_t width, const int64_t* slots, int64_t kv_heads,
                     int64_t kv_head, int64_t from, int64_t to, float* own, const float** found) {
  const int64_t bytes = dim * BytesOf(kind);
  const bool direct = kind == Kind::kF32 && width == dim;
  for (int64_t j = from; j < to; ++j) {
    const char* row = stored + (slots[j] * kv_heads + kv_head) * bytes;
    if (direct) {
      found[j] = reinterpret_cast<const float*>(row);
      continue;
    }
    float* converted = own + (j - from) * width;
    std::fill(converted + dim, converted + width, 0.0f);
    Read(kind, row, dim, converted);
    found[j] = converted;
  }
}

// Asks for a block's keys or values of several heads, token by token as they lie, into the second level of cache. Head
// by head, as they are needed, hardware does not foresee them: that way reading is 1.2 times as slow.
inline void Fetch(const char* stored, int64_t bytes, int64_t kv_heads, int64_t kv_head, int64_t heads,
                  const int64_t* slots, int64_t from, int64_t to) {
  constexpr int64_t kLine = 64;
  for (int64_t j = from; j < to; ++j) {
    const char* row = stored + (slots[j] * kv_heads + kv_head) * bytes;
    for (int64_t i = 0; i < heads * bytes; i += kLine) __builtin_prefetch(row + i, 0, 2);
  }
}

// A block's keys of one head, transposed: (dim, positions). Positions outside from .. to − 1 hold zeros.
inline void GatherKeys(const Pool& pool, const int64_t* slots, int64_t kv_head, int64_t from, int64_t to,
                       const Scratch& scratch) {
  const int64_t dim = Padded(pool.key_dim);
  const float* row[kBlock];
  float converted[kLanes * kMostDim];
  std::fill_n(row, kBlock, scratch.zeros);
  for (int64_t first = 0; first < kBlock; first += kLanes) {
    const int64_t low = std::max(first, from), high = std::min(first + kLanes, to);
    FindRows(pool.keys, pool.kind, pool.key_dim, dim, slots, pool.kv_heads, kv_head, low, high, converted, row);
    for (int64_t i = 0; i < dim; i += kLanes) {
      Floats square[kLanes];
      for (int j = 0; j < kLanes; ++j) square[j] = Load(row[first + j] + i);
      Transpose(square);
      for (int j = 0; j < kLanes; ++j) Store(scratch.keys + (i + j) * kBlock + first, square[j]);
    }
  }
}

// One query's logits of a block become weights; its running top, total and state follow. Positions low .. high − 1.
inline void Weigh(const Options& options, int64_t low, int64_t high, float* weights, int64_t width, float* top,
                  float* total, float* state) {
  Floats logit[kVectors], largest = Splat(kNothing);
  for (int c = 0; c < kVectors; ++c) {
    const Ints at = Iota() + SplatInt(c * kLanes);
    logit[c] = Load(weights + c * kLanes) * Splat(options.scale);
    if (options.cap != 0) logit[c] = Tanh(logit[c] / Splat(options.cap)) * Splat(options.cap);
    const Ints in = (at >= SplatInt(static_cast<int32_t>(low))) & (at < SplatInt(static_cast<int32_t>(high)));
    logit[c] = Select(in, logit[c], Splat(kNothing));
    // A NaN would be lost in a comparison, and with it the row's answer, which is NaN.
    largest = Select((logit[c] > largest) | (logit[c] != logit[c]), logit[c], largest);
  }
  float most = *top;
  for (int i = 0; i < kLanes; ++i) most = largest[i] > most || largest[i] != largest[i] ? largest[i] : most;
  if (most == kNothing) {
    for (int c = 0; c < kVectors; ++c) Store(weights + c * kLanes, Floats{});
    return;
  }
  Floats sum = {};
  for (int c = 0; c < kVectors; ++c) {
    const Floats weight = Exp(logit[c] - Splat(most));
    Store(weights + c * kLanes, weight);
    sum = sum + weight;
  }
  if (most != *top) {
    const float decay = Exp(Splat(*top - most))[0];
    *total *= decay;
    for (int64_t i = 0; i < width; i += kLanes) Store(state + i, Load(state + i) * Splat(decay));
    *top = most;
  }
  *total += Sum(sum);
}

// The softmax's end: one query's state becomes its output. Returns its LSE.
inline float Finish(const Options& options, int64_t head, float top, float total, int64_t width, float* state) {
  if (top == kNothing) {
    std::fill_n(state, width, 0.0f);
    return kNothing;
  }
  float decay = 1;
  if (options.sinks) {
    const float sink = options.sinks[head];
    if (sink > top) {
      decay = Exp(Splat(top - sink))[0];
      top = sink;
    }
    total = total * decay + Exp(Splat(sink - top))[0];
  }
  for (int64_t i = 0; i < width; i += kLanes) {
    Floats out = Load(state + i) * Splat(decay) / Splat(total);
    if (options.value_scale != 1) out = out * Splat(options.value_scale);
    Store(state + i, Select(out == Floats{}, Floats{}, out));
  }
  return static_cast<float>(top + std::log(static_cast<double>(total)));
}

// One item, KV heads kv_head .. kv_head + heads − 1. `query(token, head, to)` writes a token's queries of one KV head,
// (group, padded dim); `store(token, head, outputs, stride, lses)` gets their outputs (group, stride) and LSEs.
template <typename Query, typename StoreOutput>
inline void Attend(const Pool& pool, const StepRows& rows, const Options& options, const Item& item, int64_t kv_head,
                   int64_t heads, int64_t group, const Query& query, const StoreOutput& store) {
  const int64_t queries = item.tokens * group, dim = Padded(pool.key_dim), width = Padded(pool.value_dim);
  const Scratch scratch(heads, queries, pool.key_dim, pool.value_dim);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < item.tokens; ++t) query(t, kv_head + h, scratch.query + (h * queries + t * group) * dim);
  }
  std::fill_n(scratch.state, heads * queries * width, 0.0f);
  std::fill_n(scratch.top, heads * queries, kNothing);
  std::fill_n(scratch.total, heads * queries, 0.0f);
  int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
  for (int64_t t = 0; t < item.tokens; ++t) {
    const Seen seen = SeenBy(rows, options, item, t);
    begin = std::min(begin, seen.low);
    end = std::max(end, seen.high);
  }
  const int32_t* pages = rows.page_ids + rows.page_offsets[item.row];
  for (int64_t block = begin / kBlock * kBlock; block < end; block += kBlock) {
    const int64_t from = std::max(begin - block, int64_t{0}), to = std::min(end - block, kBlock);
    int64_t slots[kBlock];
    int64_t page = (block + from) / pool.page_size, slot = (block + from) % pool.page_size;
    for (int64_t j = from; j < to; ++j) {
      slots[j] = (pages[page] + rows.page_base) * pool.page_size + slot;
      if (++slot == pool.page_size) slot = 0, ++page;
    }
    if (heads > 1) {
      Fetch(pool.keys, pool.key_dim * BytesOf(pool.kind), pool.kv_heads, kv_head, heads, slots, from, to);
      Fetch(pool.values, pool.value_dim * BytesOf(pool.kind), pool.kv_heads, kv_head, heads, slots, from, to);
    }
    Seen seen[kMostTokens];
    bool whole = true;
    for (int64_t t = 0; t < item.tokens; ++t) {
      seen[t] = SeenBy(rows, options, item, t);
      seen[t] = {std::max(seen[t].low - block, int64_t{0}), std::min(seen[t].high - block, kBlock)};
      whole = whole && seen[t].low == from && seen[t].high == to;
    }
    for (int64_t h = 0; h < heads; ++h) {
      const float* values[kBlock];
      float* const state = scratch.state + h * queries * width;
      FindRows(pool.values, pool.kind, pool.value_dim, width, slots, pool.kv_heads, kv_head + h, from, to,
               scratch.values, values);
      GatherKeys(pool, slots, kv_head + h, from, to, scratch);
      InGroups(queries, [&](int64_t q, auto r) {
        Logits<decltype(r)::value>(scratch.query + (h * queries + q) * dim, scratch.keys, dim,
                                   scratch.weights + q * kBlock);
      });
      for (int64_t q = 0; q < queries; ++q) {
        const auto [low, high] = seen[q / group];
        if (low >= high) continue;
        const int64_t at = h * queries + q;
        Weigh(options, low, high, scratch.weights + q * kBlock, width, scratch.top + at, scratch.total + at,
              state + q * width);
      }
      if (whole) {
        WeightedValues(scratch.weights, queries, values, from, to, state, width);
        continue;
      }
      for (int64_t q = 0; q < queries; q += group) {
        const auto [low, high] = seen[q / group];
        if (low >= high) continue;
        WeightedValues(scratch.weights + q * kBlock, group, values, low, high, state + q * width, width);
      }
    }
  }
  float lses[kMostGroup];
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < item.tokens; ++t) {
      float* const outputs = scratch.state + (h * queries + t * group) * width;
      for (int64_t g = 0; g < group; ++g) {
        const int64_t at = h * queries + t * group + g;
        lses[g] =
            Finish(options, (kv_head + h) * group + g, scratch.top[at], scratch.total[at], width, outputs + g * width);
      }
      store(t, kv_head + h, outputs, width, lses);
    }
  }
}

// All items and KV heads, on a team's threads.
template <typename Query, typename StoreOutput>
inline void AttendAll(Team& team, const Pool& pool, const StepRows& rows, const Options& options,
                      const std::vector<Item>& items, int64_t group, const Query& query, const StoreOutput& store) {
  const int64_t together = HeadsTogether(pool, items, team.threads());
  const int64_t parts = (pool.kv_heads + together - 1) / together;
  team.Run(static_cast<int64_t>(items.size()) * parts, [&](int64_t task) {
    const Item& item = items[task / parts];
    const int64_t head = task % parts * together;
    Attend(
        pool, rows, options, item, head, std::min(together, pool.kv_heads - head), group,
        [&](int64_t token, int64_t kv_head, float* to) { query(item.first + token, kv_head, to); },
        [&](int64_t token, int64_t kv_head, const float* outputs, int64_t stride, const float* lses) {
          store(item.first + token, kv_head, outputs, stride, lses);
        });
  });
}

}  // namespace paged
