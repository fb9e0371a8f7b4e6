// Element types of pools, queries and outputs, and their floats.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace paged {

// The order of `KINDS` in ops.py.
enum class Kind : int64_t { kF32, kBF16, kF16, kE4M3FN, kE5M2, kE4M3FNUZ, kE5M2FNUZ, kI8 };
constexpr int64_t kKinds = 8;

inline int64_t BytesOf(Kind kind) { return kind == Kind::kF32 ? 4 : kind == Kind::kBF16 || kind == Kind::kF16 ? 2 : 1; }

inline float OfBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// What an 8-bit float of `mantissa` bits means. FN has no infinities and one NaN a sign; FNUZ has NaN for −0.
inline float Decode8(uint8_t bits, int mantissa, int bias, bool fn, bool fnuz) {
  const int exponent = (bits & 0x7f) >> mantissa, fraction = bits & ((1 << mantissa) - 1);
  const int top = (1 << (7 - mantissa)) - 1;
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (fnuz && bits == 0x80) return nan;
  if (fn && (bits & 0x7f) == 0x7f) return nan;
  if (!fn && !fnuz && exponent == top) return fraction ? nan : sign * std::numeric_limits<float>::infinity();
  const float value = exponent == 0
                          ? std::ldexp(static_cast<float>(fraction), 1 - bias - mantissa)
                          : std::ldexp(static_cast<float>(fraction + (1 << mantissa)), exponent - bias - mantissa);
  return sign * value;
}

inline const float* Table8(Kind kind) {
  static const auto tables = [] {
    std::array<std::array<float, 256>, 5> found{};
    for (int i = 0; i < 256; ++i) {
      const auto bits = static_cast<uint8_t>(i);
      found[0][i] = Decode8(bits, 3, 7, true, false);
      found[1][i] = Decode8(bits, 2, 15, false, false);
      found[2][i] = Decode8(bits, 3, 8, false, true);
      found[3][i] = Decode8(bits, 2, 16, false, true);
      found[4][i] = static_cast<int8_t>(bits);
    }
    return found;
  }();
  return tables[static_cast<int64_t>(kind) - static_cast<int64_t>(Kind::kE4M3FN)].data();
}

inline float OfHalf(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return OfBits(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return OfBits(sign | BitsOf(static_cast<float>(fraction) * 0x1p-24f));
  return OfBits(sign | (exponent + 112) << 23 | fraction << 13);
}

// `count` elements as floats; exact.
inline void Read(Kind kind, const void* from, int64_t count, float* to) {
  switch (kind) {
    case Kind::kF32: std::memcpy(to, from, count * sizeof(float)); return;
    case Kind::kBF16:
      for (int64_t i = 0; i < count; ++i) {
        to[i] = OfBits(static_cast<uint32_t>(static_cast<const uint16_t*>(from)[i]) << 16);
      }
      return;
    case Kind::kF16:
      for (int64_t i = 0; i < count; ++i) to[i] = OfHalf(static_cast<const uint16_t*>(from)[i]);
      return;
    default: {
      const float* table = Table8(kind);
      for (int64_t i = 0; i < count; ++i) to[i] = table[static_cast<const uint8_t*>(from)[i]];
    }
  }
}

// To nearest, ties to even; NaN stays NaN.
inline uint16_t ToBF16(float x) {
  const uint32_t bits = BitsOf(x);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t ToHalf(float x) {
  const uint32_t bits = BitsOf(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);
  if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);  // 65,520 and more round to infinity
  if (size < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, which is one of 2^-1 above 2^23
    return static_cast<uint16_t>(sign | (BitsOf(OfBits(size) + 0.5f) & 0x7ff));
  }
  return static_cast<uint16_t>(sign | ((size - 0x38000000u + 0xfff + (size >> 13 & 1)) >> 13));
}

// `count` floats as elements of 16 or 32 bits; what rounds to zero from below is +0 (attend.10).
inline void Write(Kind kind, const float* from, int64_t count, void* to) {
  if (kind == Kind::kF32) {
    std::memcpy(to, from, count * sizeof(float));
  } else {
    auto* halves = static_cast<uint16_t*>(to);
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t half = kind == Kind::kBF16 ? ToBF16(from[i]) : ToHalf(from[i]);
      halves[i] = half == 0x8000 ? 0 : half;
    }
  }
}

}  // namespace paged
