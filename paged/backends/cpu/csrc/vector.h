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

template <int S>
inline void SwapBit(Floats* row) {
  constexpr auto low = [](int j) { return j & S ? kLanes + j - S : j; };
  constexpr auto high = [](int j) { return j & S ? kLanes + j : j + S; };
  for (int i = 0; i < kLanes; ++i) {
    if (i & S) continue;
    const Floats a = row[i], b = row[i + S];
    row[i] = __builtin_shufflevector(a, b, low(0), low(1), low(2), low(3), low(4), low(5), low(6), low(7), low(8),
                                     low(9), low(10), low(11), low(12), low(13), low(14), low(15));
    row[i + S] =
        __builtin_shufflevector(a, b, high(0), high(1), high(2), high(3), high(4), high(5), high(6), high(7), high(8),
                                high(9), high(10), high(11), high(12), high(13), high(14), high(15));
  }
}

// row[i][j] becomes row[j][i].
inline void Transpose(Floats* row) {
  SwapBit<8>(row);
  SwapBit<4>(row);
  SwapBit<2>(row);
  SwapBit<1>(row);
}

}  // namespace paged
