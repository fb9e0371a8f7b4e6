// Products of weights with the tokens of a step, in panels.
//
// A panel holds up to 32 tokens, feature by feature: element (feature, token) lies at feature · width + token, where
// width is 32, or 16 for a last panel of no more than 16 tokens. A weight (outputs, inputs) then needs no second form:
// its elements are read in their order and spread over the tokens. Every output is one chain of fused multiply-adds
// over the inputs in their order, so its bits do not depend on how many tokens there are, nor on who computes it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "team.h"
#include "vector.h"

namespace paged {

constexpr int64_t kPanel = 2 * kLanes;

struct Panels {
  int64_t tokens;

  int64_t count() const { return (tokens + kPanel - 1) / kPanel; }
  int64_t width(int64_t panel) const { return tokens - panel * kPanel > kLanes ? kPanel : kLanes; }
  // Of a buffer of `features`.
  int64_t start(int64_t panel, int64_t features) const { return panel * kPanel * features; }
  int64_t floats(int64_t features) const { return count() * kPanel * features; }
  int64_t live(int64_t panel) const { return std::min(kPanel, tokens - panel * kPanel); }
};

// out[r][c] = Σ_k weight[r][k] · x[k][c] for 4 · G rows of the weight and C vectors of tokens of a panel.
template <int G, int C>
PAGED_INLINE void Tile(const float* weight, int64_t inputs, const float* x, int64_t width, float* out) {
  constexpr int64_t kAhead = 4 * G;  // rows
  Floats sum[4 * G][C];
  const float* row[G];
#pragma GCC unroll 16
  for (int r = 0; r < 4 * G; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) sum[r][c] = Floats{};
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) row[g] = weight + 4 * g * inputs;
  const int64_t thrice = 3 * inputs;
  for (int64_t first = 0; first < inputs; first += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, inputs - first);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {  // the next rows, which hardware does not foresee
      const float* next = row[g] + kAhead * inputs;
      __builtin_prefetch(next);
      __builtin_prefetch(next + inputs);
      __builtin_prefetch(next + 2 * inputs);
      __builtin_prefetch(next + thrice);
    }
    for (int64_t k = 0; k < count; ++k) {
      Floats v[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) v[c] = Load(x + c * kLanes);
      x += width;
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const Floats w0 = Splat(row[g][0]), w1 = Splat(row[g][inputs]);
        const Floats w2 = Splat(row[g][2 * inputs]), w3 = Splat(row[g][thrice]);
        ++row[g];
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
          sum[4 * g][c] = Fma(w0, v[c], sum[4 * g][c]);
          sum[4 * g + 1][c] = Fma(w1, v[c], sum[4 * g + 1][c]);
          sum[4 * g + 2][c] = Fma(w2, v[c], sum[4 * g + 2][c]);
          sum[4 * g + 3][c] = Fma(w3, v[c], sum[4 * g + 3][c]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < 4 * G; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) Store(out + r * width + c * kLanes, sum[r][c]);
  }
}

template <int C>
inline void OneRow(const float* weight, int64_t inputs, const float* x, int64_t width, float* out) {
  Floats sum[C] = {};
  for (int64_t k = 0; k < inputs; ++k) {
    for (int c = 0; c < C; ++c) sum[c] = Fma(Splat(weight[k]), Load(x + k * width + c * kLanes), sum[c]);
  }
  for (int c = 0; c < C; ++c) Store(out + c * kLanes, sum[c]);
}

constexpr int64_t kRows = kWideRegisters ? 12 : 4;     // rows of a tile: accumulators fill the registers
constexpr int64_t kTogether = kWideRegisters ? 2 : 1;  // vectors of tokens of a tile

// `rows` ≤ kRows rows of a weight times C vectors of a panel.
template <int C>
inline void RowsOf(const float* weight, int64_t inputs, int64_t rows, const float* x, int64_t width, float* out) {
  if (rows == kRows) return Tile<kRows / 4, C>(weight, inputs, x, width, out);
  for (; rows >= 4; rows -= 4, weight += 4 * inputs, out += 4 * width) Tile<1, C>(weight, inputs, x, width, out);
  for (; rows > 0; --rows, weight += inputs, out += width) OneRow<C>(weight, inputs, x, width, out);
}

// `rows` ≤ kRows rows of a weight times one panel, into out (rows, width).
inline void Rows(const float* weight, int64_t inputs, int64_t rows, const float* x, int64_t width, float* out) {
  if (width == kTogether * kLanes) return RowsOf<kTogether>(weight, inputs, rows, x, width, out);
  for (int64_t c = 0; c < width; c += kLanes) RowsOf<1>(weight, inputs, rows, x + c, width, out + c);
}

// All rows of a weight times all panels. `take(row, rows, panel)` is asked to compute up to kRows rows of one panel.
// Panels of one task stay in a core's own cache, and rows in its first level, while one meets the other.
template <typename Take>
inline void Product(Team& team, int64_t outputs, int64_t inputs, const Panels& panels, const Take& take) {
  constexpr int64_t kCache = 512 * 1024, kTasksPerThread = 6;
  const int64_t units = (outputs + kRows - 1) / kRows;
  const int64_t bytes = inputs * kPanel * static_cast<int64_t>(sizeof(float));
  const int64_t together = std::clamp<int64_t>(kCache / bytes, 1, panels.count());
  const int64_t groups = (panels.count() + together - 1) / together;
  const int64_t wanted = team.threads() == 1 ? 1 : kTasksPerThread * team.threads();
  const int64_t cuts = std::clamp<int64_t>((wanted + groups - 1) / groups, 1, units);
  team.Run(groups * cuts, [&](int64_t task) {
    const int64_t group = task / cuts, cut = task % cuts;
    const int64_t first = group * together, last = std::min(first + together, panels.count());
    for (int64_t unit = units * cut / cuts; unit < units * (cut + 1) / cuts; ++unit) {
      const int64_t row = unit * kRows;
      for (int64_t panel = first; panel < last; ++panel) take(row, std::min(kRows, outputs - row), panel);
    }
  });
}

}  // namespace paged
