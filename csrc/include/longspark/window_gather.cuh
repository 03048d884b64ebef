// The window: row ids of the last committed rows, and their copy into a ring.
#pragma once

#include "longspark/pool.cuh"

namespace longspark {

constexpr int kWindowThreads = 256;

__global__ void __launch_bounds__(kWindowThreads) window_index_kernel(WindowIndex p) {
  int b = blockIdx.y;
  int column = blockIdx.x * kWindowThreads + threadIdx.x;
  if (column >= p.window) return;
  int64_t length = load(p.seq_lens + b);
  int64_t used = length < p.window ? (length > 0 ? length : 0) : p.window;
  int32_t row = 0;
  if (column < used) {
    const int32_t* table = p.req_to_token + load(p.req_rows + b) * p.table_stride;
    row = load(table + (length - used) + column);
  }
  store(p.rows + static_cast<int64_t>(b) * p.window + column, row);
  if (column == 0) store(p.lens + b, static_cast<int32_t>(used));
}

__global__ void __launch_bounds__(kWindowThreads) window_index_paged_kernel(WindowIndexPaged p) {
  int b = blockIdx.y;
  int column = blockIdx.x * kWindowThreads + threadIdx.x;
  if (column >= p.window) return;
  int first_page = load(p.kv_indptr + b);
  int pages = load(p.kv_indptr + b + 1) - first_page;
  int length = pages > 0 ? (pages - 1) * p.page_size + load(p.kv_last_page_len + b) : 0;
  int used = length < p.window ? length : p.window;
  int32_t row = 0;
  if (column < used) {
    int position = length - used + column;
    int page = load(p.kv_indices + first_page + position / p.page_size);
    row = page * p.page_size + position % p.page_size;
  }
  store(p.rows + static_cast<int64_t>(b) * p.window + column, row);
  if (column == 0) store(p.lens + b, used);
}

// One thread per unit; blockIdx.y is the request, blockIdx.z twice the layer plus key/value.
template <class Unit>
__global__ void __launch_bounds__(kWindowThreads) window_gather_kernel(WindowGather p) {
  int b = blockIdx.y;
  int layer = blockIdx.z / 2;
  bool is_value = blockIdx.z % 2;
  int index = blockIdx.x * kWindowThreads + threadIdx.x;
  int unit = index % p.units_per_head;
  int head = index / p.units_per_head % p.kv_heads;
  int column = index / p.units_per_head / p.kv_heads;
  int used = load(p.lens + b);
  if (column >= used) return;

  int row = load(p.rows + b * p.rows_stride + column);
  // 32 bits hold any position, and dividing 64 would cost more than the copy.
  unsigned position = static_cast<unsigned>(load(p.seq_lens + b)) - used + column;
  unsigned ring_slot = position % static_cast<unsigned>(p.window);
  const void* pool = is_value ? p.pools.values[layer] : p.pools.keys[layer];
  void* out = is_value ? p.out_value : p.out_key;
  int64_t to = (static_cast<int64_t>(layer) * p.batch + b) * p.window + ring_slot;
  to = (to * p.kv_heads + head) * p.units_per_head + unit;
  store(static_cast<Unit*>(out) + to,
        load(static_cast<const Unit*>(pool) + row_offset(p.pools.layout, row, head) + unit));
}

}  // namespace longspark
