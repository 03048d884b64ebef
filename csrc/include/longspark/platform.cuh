// The one place that knows whether kernels are compiled by nvcc for a GPU or by a C++ compiler for
// the host emulation (host_emulation/host_emulation.h), which runs the same source in tests.
//
// Kernels keep to a subset of CUDA that both understand (docs/kernels.md): every access to global
// and shared memory goes through load() and store(), shared memory is declared with
// LONGSPARK_SHARED, collectives name all 32 lanes, and kernels start through launch().
#pragma once

#include <cstdint>

#include "longspark/launchers.h"

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <type_traits>

// Shared memory of the block. `Type` must be trivial; its contents are undefined until stored to.
#define LONGSPARK_SHARED(Type, name) __shared__ Type name
// The launch's dynamic shared memory, 16-byte aligned, as `name` of type unsigned char*.
#define LONGSPARK_DYNAMIC_SHARED(name)        \
  extern __shared__ uint4 longspark_shared[]; \
  unsigned char* name = reinterpret_cast<unsigned char*>(longspark_shared)

namespace longspark {

// Global or shared memory. T's alignment is the access' alignment: a 16-byte struct aligned to 16
// is one vector load.
template <class T>
__device__ __forceinline__ T load(const T* from) {
  return *from;
}
template <class T>
__device__ __forceinline__ void store(T* to, std::type_identity_t<T> value) {
  *to = value;
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_shared,
            Stream stream, const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  cudaError_t status = cudaSuccess;
  if (dynamic_shared > 48 * 1024) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(dynamic_shared));
  }
  if (status == cudaSuccess) {
    kernel<<<grid, block, dynamic_shared, stream>>>(arguments...);
    status = cudaGetLastError();
  }
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("longspark: kernel launch failed: ") +
                             cudaGetErrorString(status));
  }
}

}  // namespace longspark

#else

#include "host_emulation/host_emulation.h"

#endif
