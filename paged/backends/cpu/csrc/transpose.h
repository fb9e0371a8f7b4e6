// Sixteen vectors of sixteen floats, transposed.
#pragma once

#include "vector.h"

namespace paged {

#if defined(__AVX512F__)

// Pairs of rows woven together within quarters of four, in units of U floats: U = 1 weaves floats, 2 pairs of them.
template <int U>
inline void Weave(FloatPart& a, FloatPart& b) {
  constexpr auto from = [](int i,
                           int second) {  // quarter q holds a's and b's units by turns, of its first or second half
    const int quarter = i / 4, unit = i % 4 / U, within = i % U;
    return quarter * 4 + (second * 2 / U + unit / 2) * U + within + (unit % 2 ? kLanes : 0);
  };
#define PAGED_ALL(f, s)                                                                                         \
  f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s), f(8, s), f(9, s), f(10, s), f(11, s), \
      f(12, s), f(13, s), f(14, s), f(15, s)
  const FloatPart low = __builtin_shufflevector(a, b, PAGED_ALL(from, 0));
  const FloatPart high = __builtin_shufflevector(a, b, PAGED_ALL(from, 1));
  a = low;
  b = high;
}

// Quarters of two rows: the even ones of both, and the odd ones.
inline void Deal(FloatPart& a, FloatPart& b) {
  constexpr auto from = [](int i, int odd) {
    const int quarter = i / 4;
    return (quarter % 2 * 2 + odd) * 4 + i % 4 + (quarter / 2 ? kLanes : 0);
  };
  const FloatPart even = __builtin_shufflevector(a, b, PAGED_ALL(from, 0));
  const FloatPart odd = __builtin_shufflevector(a, b, PAGED_ALL(from, 1));
  a = even;
  b = odd;
#undef PAGED_ALL
}

// row[i][j] becomes row[j][i].
inline void Transpose(Floats* rows) {
  FloatPart row[kLanes];
  for (int i = 0; i < kLanes; ++i) row[i] = rows[i].part[0];
  for (int i = 0; i < kLanes; i += 4) {  // quarters of four rows
    Weave<1>(row[i], row[i + 1]);
    Weave<1>(row[i + 2], row[i + 3]);
    Weave<2>(row[i], row[i + 2]);
    Weave<2>(row[i + 1], row[i + 3]);
  }
  // Row 4g + c, c of 0, 1, 2, 3, now holds columns 4q + (0, 2, 1, 3)[c] of rows 4g .. 4g + 3 in quarter q.
  for (int c = 0; c < 4; ++c) {
    FloatPart x = row[c], y = row[4 + c], z = row[8 + c], w = row[12 + c];
    Deal(x, y);
    Deal(z, w);
    Deal(x, z);
    Deal(y, w);
    const int column = c == 1 ? 2 : c == 2 ? 1 : c;
    rows[column].part[0] = x;
    rows[8 + column].part[0] = z;
    rows[4 + column].part[0] = y;
    rows[12 + column].part[0] = w;
  }
}

#else

// row[i][j] becomes row[j][i], in squares of four.
inline void Transpose(Floats* rows) {
  typedef float Four __attribute__((vector_size(16)));
  typedef float LooseFour __attribute__((vector_size(16), aligned(4), may_alias));
  float from[kLanes][kLanes], to[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) Store(from[i], rows[i]);
  for (int i = 0; i < kLanes; i += 4) {
    for (int j = 0; j < kLanes; j += 4) {
      const auto at = [&](int r) -> Four { return *reinterpret_cast<const LooseFour*>(&from[i + r][j]); };
      const Four a = at(0), b = at(1), c = at(2), d = at(3);
      const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const Four ef = __builtin_shufflevector(a, b, 2, 6, 3, 7), gh = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      const auto put = [&](int r, Four x) { *reinterpret_cast<LooseFour*>(&to[j + r][i]) = x; };
      put(0, __builtin_shufflevector(ab, cd, 0, 1, 4, 5));
      put(1, __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
      put(2, __builtin_shufflevector(ef, gh, 0, 1, 4, 5));
      put(3, __builtin_shufflevector(ef, gh, 2, 3, 6, 7));
    }
  }
  for (int i = 0; i < kLanes; ++i) rows[i] = Load(to[i]);
}

#endif

}  // namespace paged
