// Elements of the pool and of queries as floats, and one rounding to nearest even on the way back.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace paged {

inline float FloatOfBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t BitsOfFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct Float32 {
  using Word = float;
  static float Load(Word word) { return word; }
  static Word Store(float value) { return value; }
  static Word Nan() { return std::numeric_limits<float>::quiet_NaN(); }
};

struct BFloat16 {
  using Word = uint16_t;
  static float Load(Word word) { return FloatOfBits(static_cast<uint32_t>(word) << 16); }
  static Word Store(float value) {
    const uint32_t bits = BitsOfFloat(value);
    if (std::isnan(value)) return static_cast<Word>((bits >> 16) | 0x40);
    return static_cast<Word>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  static Word Nan() { return 0x7fc0; }
};

struct Float16 {
  using Word = uint16_t;
  static float Load(Word word) {
    const uint32_t sign = static_cast<uint32_t>(word & 0x8000) << 16;
    const uint32_t exponent = (word >> 10) & 0x1f, fraction = word & 0x3ff;
    if (exponent == 0) {
      const float magnitude = std::ldexp(static_cast<float>(fraction), -24);
      return sign ? -magnitude : magnitude;
    }
    if (exponent == 31) return FloatOfBits(sign | 0x7f800000 | (fraction << 13));
    return FloatOfBits(sign | ((exponent + 112) << 23) | (fraction << 13));
  }
  static Word Store(float value) {
    const uint32_t bits = BitsOfFloat(value);
    const Word sign = static_cast<Word>((bits >> 16) & 0x8000);
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    if (magnitude < 6.103515625e-05f) {  // subnormal: a multiple of 2^-24, ties to even
      return sign | static_cast<Word>(std::nearbyint(std::ldexp(magnitude, 24)));
    }
    const uint32_t rebased = (bits & 0x7fffffff) - (112u << 23);
    return sign | static_cast<Word>((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13);
  }
  static Word Nan() { return 0x7e00; }
};

}  // namespace paged
