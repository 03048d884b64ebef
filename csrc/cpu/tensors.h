// From torch tensors to what the kernels take. Shapes and dtypes were checked by
// python/longspark_sglang/ops; what is checked here is that no index leads out of a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace longspark::cpu {

inline Type type_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Type::kFloat;
    case at::kBFloat16:
      return Type::kBf16;
    case at::kHalf:
      return Type::kHalf;
    default:
      TORCH_CHECK(false, "longspark: dtype must be float32, bfloat16 or float16, not ", type);
  }
}

inline Type type_of(const at::Tensor& tensor) { return type_of(tensor.scalar_type()); }

// [N, Hkv, d] or [pages, P, Hkv, d], any outer strides.
inline Pool pool_of(const at::Tensor& pool) {
  TORCH_CHECK(pool.dim() == 3 || pool.dim() == 4, "longspark: a pool has 3 or 4 dimensions");
  if (pool.dim() == 3) return {pool.const_data_ptr(), 1, pool.stride(0), 0, pool.stride(1)};
  return {pool.const_data_ptr(), pool.size(1), pool.stride(0), pool.stride(1), pool.stride(2)};
}

inline int64_t rows_of(const at::Tensor& pool) {
  return pool.dim() == 3 ? pool.size(0) : pool.size(0) * pool.size(1);
}

template <int kCount>
inline void copy_strides(const at::Tensor& tensor, int64_t (&strides)[kCount]) {
  for (int i = 0; i < kCount; ++i) strides[i] = tensor.stride(i);
}

template <class T>
inline void check_range(const T* values, int64_t count, int64_t limit, const char* op,
                        const char* name) {
  T low = 0, high = 0;
  for (int64_t i = 0; i < count; ++i) {
    low = std::min(low, values[i]);
    high = std::max(high, values[i]);
  }
  if (count == 0) return;
  TORCH_CHECK_INDEX(low >= 0 && high < limit, "longspark.", op, ": ", name, " holds ",
                    low < 0 ? low : high, ", allowed is 0..", limit - 1);
}

// bf16 is multiplied in pairs.
inline void check_head_dim(const at::Tensor& rows, const char* op) {
  TORCH_CHECK(rows.scalar_type() != at::kBFloat16 || rows.size(-1) % 2 == 0, "longspark.", op,
              ": the head dimension must be even in bfloat16, not ", rows.size(-1));
}

}  // namespace longspark::cpu
