// Element types of tensors as the CPU kernels see them, and their conversion to and from float.
#pragma once

#include <type_traits>

#include "vec.h"

namespace longspark::cpu {
namespace LONGSPARK_ISA {

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return bits_to_float(uint32_t{x.bits} << 16); }
inline float to_float(Half x) {
  // Shift exponent and mantissa into a float's place and rescale: exact, subnormals included.
  uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  float magnitude = bits_to_float((x.bits & 0x7fffu) << 13) * 0x1p112f;
  uint32_t special = magnitude >= 0x1p16f ? 0x7f800000u : 0;  // infinity or NaN
  return bits_to_float(float_to_bits(magnitude) | special | sign);
}

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline Bf16 from_float<Bf16>(float x) {
  uint32_t bits = float_to_bits(x);
  if (x != x) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <>
inline Half from_float<Half>(float x) {
  uint32_t bits = float_to_bits(x);
  uint16_t sign = (bits >> 16) & 0x8000;
  float magnitude = bits_to_float(bits & 0x7fffffffu);
  if (x != x) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  uint32_t rounded;
  if (magnitude < 0x1p-14f) {
    // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits.
    rounded = float_to_bits(magnitude + 0.5f) - 0x3f000000u;
  } else {
    uint32_t m = float_to_bits(magnitude);
    rounded = (m + 0xfff + ((m >> 13) & 1) - (112u << 23)) >> 13;
  }
  return {static_cast<uint16_t>(sign | rounded)};
}

template <class T>
inline void to_floats(const T* from, float* to, int64_t n) {
  int64_t i = 0;
#if LONGSPARK_ISA_LEVEL >= 1
  if constexpr (std::is_same_v<T, Half>) {
    for (; i + 8 <= n; i += 8) {
      __m128i bits;
      std::memcpy(&bits, from + i, 16);
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(bits));
    }
  }
#endif
  for (; i < n; ++i) to[i] = to_float(from[i]);
}

template <class T>
inline void from_floats(const float* from, T* to, int64_t n) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(to, from, n * sizeof(float));
    return;
  }
  if constexpr (std::is_same_v<T, Bf16>) {
    for (; i + 8 <= n; i += 8) {
      typedef uint16_t Shorts __attribute__((vector_size(16)));
      Floats<8> x = load<8>(from + i);
      Words<8> bits = (Words<8>)x;
      bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      bits = x == x ? bits : Words<8>{} + 0x7fc0;
      Shorts halves = __builtin_convertvector(bits, Shorts);
      std::memcpy(to + i, &halves, 16);
    }
  }
#if LONGSPARK_ISA_LEVEL >= 1
  if constexpr (std::is_same_v<T, Half>) {
    for (; i + 8 <= n; i += 8) {
      __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      std::memcpy(to + i, &bits, 16);
    }
  }
#endif
  for (; i < n; ++i) to[i] = from_float<T>(from[i]);
}

}  // namespace LONGSPARK_ISA
}  // namespace longspark::cpu
