// Vectors of floats and 32-bit words for the instruction set this file is compiled for.
//
// They are GCC/Clang vector extensions rather than at::vec: a kernel file is compiled once per
// instruction set into its own namespace (see isa_*.cpp), so it must not include any header whose
// inline functions the linker could mix up between instruction sets, and AVX-512 code needs half
// vectors (8 lanes) and bf16 dot products, which at::vec doesn't have. What the extensions lack
// (fused multiply-add, rounding, conversions) are the few overloads below.
//
// LONGSPARK_ISA_LEVEL, set by isa_*.cpp: 0 nothing assumed, 1 AVX2 + FMA + F16C, 2 AVX-512 F, BW,
// VL, DQ, 3 also AVX-512 BF16. (The compiler's own macros don't follow `#pragma GCC target` in
// C++.)
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
// Vectors are passed between inlined functions only, so their calling convention doesn't matter.
#pragma GCC diagnostic ignored "-Wpsabi"
// GCC 12 says so of its own intrinsics headers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace longspark::cpu {
namespace LONGSPARK_ISA {

#if LONGSPARK_ISA_LEVEL >= 2
constexpr int kWide = 16;  // lanes of the widest vector
#elif LONGSPARK_ISA_LEVEL >= 1
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif
// Lanes are handled in units of 8 on every instruction set, so that layouts agree.
constexpr int kLaneUnit = 8;

template <class T, int kLanes>
struct VecOf {
  typedef T Type __attribute__((vector_size(kLanes * 4)));
  typedef T Unaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
};
template <int kLanes>
using Floats = typename VecOf<float, kLanes>::Type;
template <int kLanes>
using Words = typename VecOf<uint32_t, kLanes>::Type;
template <int kLanes>
using Ints = typename VecOf<int32_t, kLanes>::Type;

template <int kLanes, class T>
inline typename VecOf<T, kLanes>::Type load(const T* from) {
  return *reinterpret_cast<const typename VecOf<T, kLanes>::Unaligned*>(from);
}

template <class T, class V>
inline void store(T* to, V value) {
  *reinterpret_cast<typename VecOf<T, sizeof(V) / 4>::Unaligned*>(to) = value;
}

template <int kLanes>
inline Floats<kLanes> splat(float value) {
  return value - Floats<kLanes>{};  // the compiler sees that it's the value; + would lose a -0
}

// a * b + c with one rounding where the instruction set has it. Explicit, so that the result of a
// lane doesn't depend on what the compiler chose to contract in one function and not in another.
template <class V>
inline V fmadd(V a, V b, V c) {
#if LONGSPARK_ISA_LEVEL >= 2
  if constexpr (sizeof(V) == 64) {
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  }
#endif
#if LONGSPARK_ISA_LEVEL >= 1
  if constexpr (sizeof(V) == 32) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  if constexpr (sizeof(V) == 16) return (V)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#endif
  return a * b + c;
}

template <class V>
inline V maximum(V a, V b) {
  return a > b ? a : b;
}

// 2^x for x <= 127; relative error below 2e-7; exactly 1 at 0 and exactly 0 from -126 downwards.
template <int kLanes>
inline Floats<kLanes> exp2(Floats<kLanes> x) {
  using F = Floats<kLanes>;
  using I = Ints<kLanes>;
  // Adding 1.5 * 2^23 rounds to an integer, which then sits in the low bits of the sum.
  const F shifter = splat<kLanes>(0x1.8p23f);
  F clamped = maximum(x, splat<kLanes>(-126.0f));
  F shifted = clamped + shifter;
  F fraction = clamped - (shifted - shifter);  // in [-0.5, 0.5]
  // Minimax for (2^f - 1) / f on [-0.5, 0.5], error relative to 2^f 9.2e-8.
  F result = splat<kLanes>(1.3264727313e-3f);
  result = fmadd(result, fraction, splat<kLanes>(9.6715129912e-3f));
  result = fmadd(result, fraction, splat<kLanes>(5.5507335812e-2f));
  result = fmadd(result, fraction, splat<kLanes>(2.4022242427e-1f));
  result = fmadd(result, fraction, splat<kLanes>(6.9314700365e-1f));
  result = fmadd(result, fraction, splat<kLanes>(1.0f));
  result = (F)((I)result + ((I)shifted << 23));
  return x > -126.0f ? result : F{};
}

// Natural logarithm of 2^exponent * (1 + m), for 1 + m in [sqrt(1/2), sqrt(2)). Taking m itself
// lets a caller who knows 1 + m - 1 better than a rounded 1 + m does keep its relative accuracy.
template <int kLanes>
inline Floats<kLanes> log_reduced(Floats<kLanes> exponent, Floats<kLanes> m) {
  // ln(1 + m) = 2 artanh(s), s = m / (2 + m): odd in s, which keeps the series short.
  Floats<kLanes> s = m / (m + 2.0f);
  Floats<kLanes> t = s * s;
  Floats<kLanes> series = splat<kLanes>(0.22222222f);
  series = fmadd(series, t, splat<kLanes>(0.28571429f));
  series = fmadd(series, t, splat<kLanes>(0.4f));
  series = fmadd(series, t, splat<kLanes>(0.66666667f));
  return fmadd(exponent, splat<kLanes>(0.69314718f), fmadd(series * t, s, s + s));
}

// Natural logarithm of a positive, normal x; relative error about 2e-7.
template <int kLanes>
inline Floats<kLanes> log(Floats<kLanes> x) {
  Ints<kLanes> bits = (Ints<kLanes>)x - 0x3f3504f3;  // sqrt(1/2)
  Floats<kLanes> exponent = __builtin_convertvector(bits >> 23, Floats<kLanes>);
  return log_reduced<kLanes>(exponent, (Floats<kLanes>)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f);
}

#define LONGSPARK_INLINE __attribute__((always_inline))

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

}  // namespace LONGSPARK_ISA
}  // namespace longspark::cpu
