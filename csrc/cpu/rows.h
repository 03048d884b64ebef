// Rows of K/V pools, and the choice of element type at run time.
#pragma once

#include "kernels.h"
#include "types.h"

namespace longspark::cpu {
namespace LONGSPARK_ISA {

template <class T>
struct PoolRows {
  explicit PoolRows(const Pool& pool) : pool_(pool) {}
  // The row `id` of head 0.
  const T* operator()(int64_t id) const {
    const T* data = static_cast<const T*>(pool_.data);
    if (pool_.page_size == 1) return data + id * pool_.page_stride;
    return data + id / pool_.page_size * pool_.page_stride +
           id % pool_.page_size * pool_.row_stride;
  }
  const Pool& pool_;
};

// f(T{}) for the C++ type T of `type`.
template <class F>
inline auto with_type(Type type, F&& f) {
  switch (type) {
    case Type::kFloat:
      return f(float{});
    case Type::kBf16:
      return f(Bf16{});
    default:
      return f(Half{});
  }
}

}  // namespace LONGSPARK_ISA
}  // namespace longspark::cpu
