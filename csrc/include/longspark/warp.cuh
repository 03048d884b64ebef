// Reductions and scans over a warp or a block.
#pragma once

#include "longspark/launchers.h"
#include "longspark/types.cuh"

namespace longspark {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

template <class T>
__device__ __forceinline__ T warp_max(T x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    T other = __shfl_xor_sync(kAllLanes, x, lanes);
    x = other > x ? other : x;
  }
  return x;
}

// Sum over this and all earlier lanes.
template <class T>
__device__ __forceinline__ T warp_running_sum(T x) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    T before = __shfl_up_sync(kAllLanes, x, lanes);
    if (lane_id() >= lanes) x += before;
  }
  return x;
}

// One value per warp of a block, for block-wide reductions in shared memory.
template <class T>
struct PerWarp {
  T at[32];
};

// A logsumexp as top + ln(total); total is 0 for nothing.
__device__ __forceinline__ Lse lse_of_nothing() { return {minus_infinity(), 0.0f}; }

__device__ __forceinline__ Lse lse_merge(Lse a, Lse b) {
  float top = fmaxf(a.top, b.top);
  if (top == minus_infinity()) return lse_of_nothing();
  return {top, a.total * expf(a.top - top) + b.total * expf(b.top - top)};
}

__device__ __forceinline__ Lse lse_from_lane_xor(Lse x, int lanes) {
  return {__shfl_xor_sync(kAllLanes, x.top, lanes), __shfl_xor_sync(kAllLanes, x.total, lanes)};
}

}  // namespace longspark
