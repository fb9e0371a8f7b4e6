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
#include "vector.h"

namespace paged {

constexpr int64_t kBlock = 64;
constexpr int64_t kVectors = kBlock / kLanes;
constexpr int64_t kQueries = kWideRegisters ? 6 : 1;  // together in registers
constexpr int64_t kMostGroup = 128, kMostDim = 512;

struct Pool {
  const char* keys;
  const char* values;
  Kind kind;
  int64_t pages, page_size, kv_heads, key_dim, value_dim;
};

struct StepRows {
  int64_t rows, listed;
  const int32_t* kv_lens;
  const int32_t* query_offsets;
  const int32_t* page_offsets;
  const int32_t* page_ids;
  int64_t page_base;
};

struct Options {
  float scale;      // of logits, that of keys included
  float cap;        // 0: none
  int64_t window;   // positions seen, the query's own included; 0: all
  bool causal;
  const float* sinks;  // by query head, or null
  float value_scale;
};

// Up to `tokens` tokens of one row, from `first` of the step.
struct Item {
  int64_t row, first, tokens;
};

inline int64_t TokensOfItem(int64_t group) { return std::max<int64_t>(1, 48 / group); }

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

// What one thread works in, kept from call to call.
struct Scratch {
  float *query, *state, *weights, *keys, *values, *zeros;

  Scratch(int64_t queries, int64_t key_dim, int64_t value_dim) {
    static thread_local std::vector<float> kept;
    const int64_t k = Padded(key_dim), v = Padded(value_dim);
    const size_t size = queries * (k + v + kBlock) + kBlock * (k + v) + k + kLanes;
    if (kept.size() < size) kept.resize(size);
    query = kept.data();
    query += (kLanes - reinterpret_cast<uintptr_t>(query) / sizeof(float) % kLanes) % kLanes;
    state = query + queries * k;
    weights = state + queries * v;
    keys = weights + queries * kBlock;
    values = keys + kBlock * k;
    zeros = values + kBlock * v;
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
      for (int c = 0; c < kVectors; ++c) sum[r][c] += q * k[c];
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
      for (int c = 0; c < C; ++c) sum[r][c] += w * v[c];
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

// One item and KV head. `query(token, to)` writes the padded queries (group, dim) of a token of the item; `store(token,
// outputs, stride, lses)` gets its outputs (group, stride) and LSEs.
template <typename Query, typename StoreOutput>
inline void Attend(const Pool& pool, const StepRows& rows, const Options& options, const Item& item, int64_t kv_head,
                   int64_t group, Scratch& scratch, const Query& query, const StoreOutput& store) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const int64_t queries = item.tokens * group, dim = Padded(pool.key_dim), width = Padded(pool.value_dim);
  float top[kMostGroup], total[kMostGroup];
  for (int64_t t = 0; t < item.tokens; ++t) query(t, scratch.query + t * group * dim);
  std::fill_n(scratch.state, queries * width, 0.0f);
  std::fill_n(top, queries, kNothing);
  std::fill_n(total, queries, 0.0f);
  int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
  for (int64_t t = 0; t < item.tokens; ++t) {
    const Seen seen = SeenBy(rows, options, item, t);
    begin = std::min(begin, seen.low);
    end = std::max(end, seen.high);
  }
  const int64_t bytes = BytesOf(pool.kind), key_bytes = pool.key_dim * bytes, value_bytes = pool.value_dim * bytes;
  const bool keys_direct = pool.kind == Kind::kF32 && dim == pool.key_dim;
  const bool values_direct = pool.kind == Kind::kF32 && width == pool.value_dim;
  const int32_t* pages = rows.page_ids + rows.page_offsets[item.row];
  for (int64_t block = begin / kBlock * kBlock; block < end; block += kBlock) {
    const int64_t from = std::max(begin - block, int64_t{0}), to = std::min(end - block, kBlock);
    const float *key_row[kBlock], *value_row[kBlock];
    float converted[kLanes][kMostDim];
    int64_t slots[kBlock];
    for (int64_t j = from, page = (block + from) / pool.page_size, slot = (block + from) % pool.page_size; j < to; ++j) {
      slots[j] = ((pages[page] + rows.page_base) * pool.page_size + slot) * pool.kv_heads + kv_head;
      if (++slot == pool.page_size) slot = 0, ++page;
    }
    for (int64_t j = from; j < to; ++j) {
      const char* value = pool.values + slots[j] * value_bytes;
      if (values_direct) {
        value_row[j] = reinterpret_cast<const float*>(value);
      } else {
        float* row = scratch.values + j * width;
        std::fill(row + pool.value_dim, row + width, 0.0f);
        Read(pool.kind, value, pool.value_dim, row);
        value_row[j] = row;
      }
    }
    for (int64_t first = 0; first < kBlock; first += kLanes) {
      for (int64_t j = first; j < first + kLanes; ++j) {
        if (j < from || j >= to) {
          key_row[j] = scratch.zeros;
        } else if (keys_direct) {
          key_row[j] = reinterpret_cast<const float*>(pool.keys + slots[j] * key_bytes);
        } else {
          float* row = converted[j - first];
          std::fill(row + pool.key_dim, row + dim, 0.0f);
          Read(pool.kind, pool.keys + slots[j] * key_bytes, pool.key_dim, row);
          key_row[j] = row;
        }
      }
      for (int64_t i = 0; i < dim; i += kLanes) {
        Floats square[kLanes];
        for (int j = 0; j < kLanes; ++j) square[j] = Load(key_row[first + j] + i);
        Transpose(square);
        for (int j = 0; j < kLanes; ++j) Store(scratch.keys + (i + j) * kBlock + first, square[j]);
      }
    }
    InGroups(queries, [&](int64_t q, auto r) {
      Logits<decltype(r)::value>(scratch.query + q * dim, scratch.keys, dim, scratch.weights + q * kBlock);
    });
    bool whole = true;
    for (int64_t t = 0; t < item.tokens; ++t) {
      const Seen seen = SeenBy(rows, options, item, t);
      const int64_t low = std::max(seen.low - block, int64_t{0}), high = std::min(seen.high - block, kBlock);
      whole = whole && low == from && high == to;
      if (low >= high) continue;
      for (int64_t q = t * group; q < (t + 1) * group; ++q) {
        float* weights = scratch.weights + q * kBlock;
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
        float most = top[q];
        for (int i = 0; i < kLanes; ++i) most = largest[i] > most || largest[i] != largest[i] ? largest[i] : most;
        if (most == kNothing) {
          for (int c = 0; c < kVectors; ++c) Store(weights + c * kLanes, Floats{});
          continue;
        }
        Floats sum = {};
        for (int c = 0; c < kVectors; ++c) {
          const Floats weight = Exp(logit[c] - Splat(most));
          Store(weights + c * kLanes, weight);
          sum += weight;
        }
        if (most != top[q]) {
          const float decay = Exp(Splat(top[q] - most))[0];
          total[q] *= decay;
          float* state = scratch.state + q * width;
          for (int64_t i = 0; i < width; i += kLanes) Store(state + i, Load(state + i) * Splat(decay));
          top[q] = most;
        }
        total[q] += Sum(sum);
      }
    }
    if (whole) {
      WeightedValues(scratch.weights, queries, value_row, from, to, scratch.state, width);
      continue;
    }
    for (int64_t t = 0; t < item.tokens; ++t) {
      const Seen seen = SeenBy(rows, options, item, t);
      const int64_t low = std::max(seen.low - block, int64_t{0}), high = std::min(seen.high - block, kBlock);
      if (low >= high) continue;
      const int64_t q = t * group;
      WeightedValues(scratch.weights + q * kBlock, group, value_row, low, high, scratch.state + q * width, width);
    }
  }
  float lses[kMostGroup];
  for (int64_t t = 0; t < item.tokens; ++t) {
    for (int64_t g = 0; g < group; ++g) {
      const int64_t q = t * group + g;
      float* state = scratch.state + q * width;
      float above = top[q], sum = total[q];
      if (above == kNothing) {
        std::fill_n(state, width, 0.0f);
        lses[g] = kNothing;
        continue;
      }
      float decay = 1;
      if (options.sinks) {
        const float sink = options.sinks[kv_head * group + g];
        if (sink > above) {
          decay = Exp(Splat(above - sink))[0];
          above = sink;
        }
        sum = sum * decay + Exp(Splat(sink - above))[0];
      }
      lses[g] = static_cast<float>(above + std::log(static_cast<double>(sum)));
      const float factor = options.value_scale;
      for (int64_t i = 0; i < width; i += kLanes) {
        Floats out = Load(state + i);
        if (options.sinks) out *= Splat(decay);
        out = out / Splat(sum);
        if (factor != 1) out *= Splat(factor);
        Store(state + i, Select(out == Floats{}, Floats{}, out));
      }
    }
    store(t, scratch.state + t * group * width, width, lses);
  }
}

}  // namespace paged
