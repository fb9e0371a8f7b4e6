// Sixteen floats at a time in the compilers' own vector types: one register of AVX-512, several of anything narrower.
// Every sum here has an order that depends on nothing but its own terms, so the machine's registers do not reach bits,
// as long as it has fused multiply-add.
#pragma once

#include <cstdint>
#include <cstring>

namespace paged {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float LooseFloats __attribute__((vector_size(64), aligned(4), may_alias));

#if defined(__AVX512F__)
constexpr bool kWideRegisters = true;
#else
constexpr bool kWideRegisters = false;
#endif

inline Floats Load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }
inline void Store(float* to, Floats x) { *reinterpret_cast<LooseFloats*>(to) = x; }
inline Floats Splat(float x) { return Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline Ints SplatInt(int32_t x) { return Ints{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline Ints Iota() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline Floats Select(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }
inline Floats Max(Floats a, Floats b) { return Select(a > b, a, b); }

// e^x within 1.2 units in the last place, subnormal results included; NaN stays NaN, −∞ gives +0.
// Reduction by Cody and Waite with ln 2 in two parts; the polynomial of degree 7 is Taylor's with its last two
// coefficients moved to flatten the error over ±ln 2 / 2.
inline Floats Exp(Floats x) {
  const Floats low = Splat(-104.0f), high = Splat(89.0f);
  x = Select(x < low, low, x);
  x = Select(x > high, high, x);
  const Floats shift = Splat(12582912.0f);  // 1.5 · 2^23: what is added to it is rounded to an integer
  const Floats shifted = x * Splat(1.44269504088896341f) + shift;
  const Floats n = shifted - shift;
  Floats r = x - n * Splat(0.693145751953125f);
  r = r - n * Splat(1.42860682030941723e-6f);
  Floats p = Splat(1.9841270e-4f);
  p = p * r + Splat(1.3888889e-3f);
  p = p * r + Splat(8.3333333e-3f);
  p = p * r + Splat(4.1666667e-2f);
  p = p * r + Splat(1.6666667e-1f);
  p = p * r + Splat(0.5f);
  p = p * (r * r) + r;
  p = p + Splat(1.0f);
  // Two factors: 2^n itself may be subnormal or too large while the result is not.
  const Ints whole = (Ints)shifted - (Ints)shift;
  const Ints half = whole >> 1, rest = whole - half;
  const Ints one = (half + 127) << 23, two = (rest + 127) << 23;
  return p * (Floats)one * (Floats)two;
}

// Absolute error below 2^-23.
inline Floats Tanh(Floats x) {
  const Floats e = Exp(x + x);
  return Splat(1.0f) - Splat(2.0f) / (e + Splat(1.0f));
}

// In pairs that halve: one order, whatever the registers.
inline float Sum(Floats x) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  }
  return x[0];
}

inline float Largest(Floats x) {
  float top = x[0];
  for (int i = 1; i < kLanes; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// Pairs of rows woven together within quarters of four, in units of U floats: U = 1 weaves floats, 2 pairs of them.
template <int U>
inline void Weave(Floats& a, Floats& b) {
  constexpr auto from = [](int i, int second) {  // quarter q holds a's and b's units by turns, of its first or second half
    const int quarter = i / 4, unit = i % 4 / U, within = i % U;
    return quarter * 4 + (second * 2 / U + unit / 2) * U + within + (unit % 2 ? kLanes : 0);
  };
#define PAGED_ALL(f, s)                                                                                           \
  f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s), f(8, s), f(9, s), f(10, s), f(11, s), \
      f(12, s), f(13, s), f(14, s), f(15, s)
  const Floats low = __builtin_shufflevector(a, b, PAGED_ALL(from, 0));
  const Floats high = __builtin_shufflevector(a, b, PAGED_ALL(from, 1));
  a = low;
  b = high;
}

// Quarters of two rows: the even ones of both, and the odd ones.
inline void Deal(Floats& a, Floats& b) {
  constexpr auto from = [](int i, int odd) {
    const int quarter = i / 4;
    return (quarter % 2 * 2 + odd) * 4 + i % 4 + (quarter / 2 ? kLanes : 0);
  };
  const Floats even = __builtin_shufflevector(a, b, PAGED_ALL(from, 0));
  const Floats odd = __builtin_shufflevector(a, b, PAGED_ALL(from, 1));
  a = even;
  b = odd;
#undef PAGED_ALL
}

// row[i][j] becomes row[j][i].
inline void Transpose(Floats* row) {
  for (int i = 0; i < kLanes; i += 4) {  // quarters of four rows
    Weave<1>(row[i], row[i + 1]);
    Weave<1>(row[i + 2], row[i + 3]);
    Weave<2>(row[i], row[i + 2]);
    Weave<2>(row[i + 1], row[i + 3]);
  }
  // Row 4g + c, c of 0, 1, 2, 3, now holds columns 4q + (0, 2, 1, 3)[c] of rows 4g .. 4g + 3 in quarter q.
  Floats out[kLanes];
  for (int c = 0; c < 4; ++c) {
    Floats x = row[c], y = row[4 + c], z = row[8 + c], w = row[12 + c];
    Deal(x, y);
    Deal(z, w);
    Deal(x, z);
    Deal(y, w);
    const int column = c == 1 ? 2 : c == 2 ? 1 : c;
    out[column] = x;
    out[8 + column] = z;
    out[4 + column] = y;
    out[12 + column] = w;
  }
  for (int i = 0; i < kLanes; ++i) row[i] = out[i];
}

}  // namespace paged
