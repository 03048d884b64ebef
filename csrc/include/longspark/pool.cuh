// Addressing rows of the K/V pools.
#pragma once

#include "longspark/launchers.h"
#include "longspark/types.cuh"

namespace longspark {

// Element offset of row `row` of head `head` in a pool.
__device__ __forceinline__ int64_t row_offset(const PoolLayout& layout, int row, int head) {
  int64_t in_head = head * layout.head_stride;
  if (layout.page_size == 1) return row * layout.page_stride + in_head;
  unsigned page = static_cast<unsigned>(row) / static_cast<unsigned>(layout.page_size);
  int64_t in_page = static_cast<unsigned>(row) - page * layout.page_size;
  return page * layout.page_stride + in_page * layout.row_stride + in_head;
}

}  // namespace longspark
