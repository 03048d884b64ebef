// Element types and the conversions that kernels need.
#pragma once

#include "longspark/platform.cuh"

namespace longspark {

// 16-bit floats as their bits: kernels move, widen, round and pack them, and compute in fp32.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// N elements that move as one access.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T at[N];
};

// Sixteen bytes as four registers.
using Words = Vec<uint32_t, 4>;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(fp16 x) {
#if defined(__CUDACC__)
  return __half2float(__ushort_as_half(x.bits));
#else
  return static_cast<float>(std::bit_cast<_Float16>(x.bits));
#endif
}

// Round to nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
#if defined(__CUDACC__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  uint32_t bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
#endif
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
#if defined(__CUDACC__)
  return {__half_as_ushort(__float2half_rn(x))};
#else
  return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))};
#endif
}

// x as T would hold it.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

// Two 16-bit floats in one register, `low` in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  return static_cast<uint32_t>(from_float<T>(low).bits) |
         (static_cast<uint32_t>(from_float<T>(high).bits) << 16);
}

// `N` elements from `from` as floats, as one access if `is_aligned` (to N elements) says so.
template <int N, class T>
__device__ __forceinline__ void load_floats(const T* from, bool is_aligned, float (&out)[N]) {
  if (is_aligned) {
    Vec<T, N> all = load(reinterpret_cast<const Vec<T, N>*>(from));
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(all.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(load(from + i));
  }
}

// The same for a dtype known at run time. One branch that all threads take alike, instead of
// another instance of every kernel.
template <int N>
__device__ __forceinline__ void load_floats(Dtype dtype, const void* base, int64_t index,
                                            bool is_aligned, float (&out)[N]) {
  switch (dtype) {
    case Dtype::kFloat32:
      return load_floats<N>(static_cast<const float*>(base) + index, is_aligned, out);
    case Dtype::kBfloat16:
      return load_floats<N>(static_cast<const bf16*>(base) + index, is_aligned, out);
    case Dtype::kFloat16:
      return load_floats<N>(static_cast<const fp16*>(base) + index, is_aligned, out);
  }
}

__device__ __forceinline__ float load_float(Dtype dtype, const void* base, int64_t index) {
  float one[1];
  load_floats<1>(dtype, base, index, true, one);
  return one[0];
}

__device__ __forceinline__ float rounded(Dtype dtype, float x) {
  if (dtype == Dtype::kBfloat16) return rounded<bf16>(x);
  if (dtype == Dtype::kFloat16) return rounded<fp16>(x);
  return x;
}

__device__ __forceinline__ void store_float(Dtype dtype, void* base, int64_t index, float x) {
  switch (dtype) {
    case Dtype::kFloat32:
      return store(static_cast<float*>(base) + index, x);
    case Dtype::kBfloat16:
      return store(static_cast<bf16*>(base) + index, from_float<bf16>(x));
    case Dtype::kFloat16:
      return store(static_cast<fp16*>(base) + index, from_float<fp16>(x));
  }
}

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace longspark
