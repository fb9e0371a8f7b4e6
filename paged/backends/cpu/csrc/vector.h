// Sixteen floats at a time: one register of AVX-512, two of AVX, four of anything narrower.
//
// Every sum here has an order that depends on nothing but its own terms, and a multiply-add is fused where `Fma` says
// so and nowhere else (the library is compiled with -ffp-contract=off). So neither the machine's registers nor the
// compiler reach bits, as long as the machine has fused multiply-add; one without rounds twice, and has its own bits.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace paged {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kPart = 16;  // floats of a register
#elif defined(__AVX__)
constexpr int kPart = 8;
#else
constexpr int kPart = 4;
#endif
constexpr int kParts = kLanes / kPart;
constexpr bool kWideRegisters = kParts == 1;  // with which come 32 of them, not 16

typedef float FloatPart __attribute__((vector_size(kPart * 4)));
typedef int32_t IntPart __attribute__((vector_size(kPart * 4)));
typedef float LoosePart __attribute__((vector_size(kPart * 4), aligned(4), may_alias));

#define PAGED_INLINE inline __attribute__((always_inline))

// Compilers keep a vector wider than a register in memory, but not an array of registers.
struct Floats {
  FloatPart part[kParts];

  float operator[](int lane) const { return part[lane / kPart][lane % kPart]; }
};

struct Ints {
  IntPart part[kParts];
};

template <typename Result, typename Call>
PAGED_INLINE Result ByPart(const Call& call) {
  Result result;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) result.part[i] = call(i);
  return result;
}

#define PAGED_OPERATOR(Result, Operand, sign)                               \
  PAGED_INLINE Result operator sign(const Operand& a, const Operand& b) {   \
    return ByPart<Result>([&](int i) { return a.part[i] sign b.part[i]; }); \
  }
PAGED_OPERATOR(Floats, Floats, +)
PAGED_OPERATOR(Floats, Floats, -)
PAGED_OPERATOR(Floats, Floats, *)
PAGED_OPERATOR(Floats, Floats, /)
PAGED_OPERATOR(Ints, Floats, <)
PAGED_OPERATOR(Ints, Floats, >)
PAGED_OPERATOR(Ints, Floats, ==)
PAGED_OPERATOR(Ints, Floats, !=)
PAGED_OPERATOR(Ints, Ints, +)
PAGED_OPERATOR(Ints, Ints, -)
PAGED_OPERATOR(Ints, Ints, <)
PAGED_OPERATOR(Ints, Ints, >=)
PAGED_OPERATOR(Ints, Ints, &)
PAGED_OPERATOR(Ints, Ints, |)
#undef PAGED_OPERATOR

PAGED_INLINE Floats operator-(const Floats& a) {
  return ByPart<Floats>([&](int i) { return -a.part[i]; });
}
PAGED_INLINE Ints operator<<(const Ints& a, int bits) {
  return ByPart<Ints>([&](int i) { return a.part[i] << bits; });
}
PAGED_INLINE Ints operator>>(const Ints& a, int bits) {
  return ByPart<Ints>([&](int i) { return a.part[i] >> bits; });
}
PAGED_INLINE Ints BitsOf(const Floats& a) {
  return ByPart<Ints>([&](int i) { return (IntPart)a.part[i]; });
}
PAGED_INLINE Floats OfBits(const Ints& a) {
  return ByPart<Floats>([&](int i) { return (FloatPart)a.part[i]; });
}
PAGED_INLINE Floats Select(const Ints& mask, const Floats& yes, const Floats& no) {
  return ByPart<Floats>([&](int i) { return mask.part[i] ? yes.part[i] : no.part[i]; });
}
PAGED_INLINE Floats Load(const float* from) {
  return ByPart<Floats>([&](int i) { return *reinterpret_cast<const LoosePart*>(from + i * kPart); });
}
PAGED_INLINE void Store(float* to, const Floats& x) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) *reinterpret_cast<LoosePart*>(to + i * kPart) = x.part[i];
}
PAGED_INLINE Floats Splat(float x) {
  return ByPart<Floats>([&](int) { return x - FloatPart{}; });  // x − 0 is x, −0 and NaN included
}
PAGED_INLINE Ints SplatInt(int32_t x) {
  return ByPart<Ints>([&](int) { return x - IntPart{}; });
}
PAGED_INLINE Ints Iota() {
  return ByPart<Ints>([&](int i) {
    IntPart lane;
    for (int j = 0; j < kPart; ++j) lane[j] = i * kPart + j;
    return lane;
  });
}

// a · b + c, rounded once where the machine can.
PAGED_INLINE Floats Fma(const Floats& a, const Floats& b, const Floats& c) {
  return ByPart<Floats>([&](int i) {
#if defined(__AVX512F__)
    return (FloatPart)_mm512_fmadd_ps((__m512)a.part[i], (__m512)b.part[i], (__m512)c.part[i]);
#elif defined(__FMA__)
    return (FloatPart)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]);
#elif defined(__aarch64__)
    return (FloatPart)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i], (float32x4_t)b.part[i]);
#else
    return a.part[i] * b.part[i] + c.part[i];
#endif
  });
}

// 1 / √x
inline Floats Rsqrt(const Floats& x) {
  return ByPart<Floats>([&](int i) {
    FloatPart root = x.part[i];
    for (int j = 0; j < kPart; ++j) root[j] = 1.0f / std::sqrt(root[j]);
    return root;
  });
}

// e^x within 1.1 units in the last place, subnormal results included; NaN stays NaN, −∞ gives +0.
// Reduction by Cody and Waite with ln 2 in two parts; the polynomial of degree 7 is Taylor's with its last two
// coefficients moved to flatten the error over ±ln 2 / 2.
inline Floats Exp(Floats x) {
  const Floats low = Splat(-104.0f), high = Splat(89.0f);
  x = Select(x < low, low, x);
  x = Select(x > high, high, x);
  const Floats shift = Splat(12582912.0f);  // 1.5 · 2^23: what is added to it is rounded to an integer
  const Floats shifted = Fma(x, Splat(1.44269504088896341f), shift);
  const Floats n = shifted - shift;
  Floats r = Fma(n, Splat(-0.693145751953125f), x);
  r = Fma(n, Splat(-1.42860682030941723e-6f), r);
  Floats p = Splat(1.9841270e-4f);
  p = Fma(p, r, Splat(1.3888889e-3f));
  p = Fma(p, r, Splat(8.3333333e-3f));
  p = Fma(p, r, Splat(4.1666667e-2f));
  p = Fma(p, r, Splat(1.6666667e-1f));
  p = Fma(p, r, Splat(0.5f));
  p = Fma(p, r * r, r);
  p = p + Splat(1.0f);
  // Two factors: 2^n itself may be subnormal or too large while the result is not.
  const Ints whole = BitsOf(shifted) - BitsOf(shift);
  const Ints half = whole >> 1, rest = whole - half;
  const Ints one = (half + SplatInt(127)) << 23, two = (rest + SplatInt(127)) << 23;
  return p * OfBits(one) * OfBits(two);
}

// Absolute error below 2^-22.
inline Floats Tanh(const Floats& x) {
  const Floats e = Exp(x + x);
  return Splat(1.0f) - Splat(2.0f) / (e + Splat(1.0f));
}

// In pairs that halve: one order, whatever the registers.
inline float Sum(const Floats& x) {
  alignas(64) float lane[kLanes];
  Store(lane, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
}

}  // namespace paged
