// window_index, window_index_paged and window_gather on the CPU: integers and copies, nothing that
// depends on the instruction set.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cstring>
#include <tuple>

#include "parallel.h"
#include "tensors.h"

namespace longspark::cpu {
namespace {

using at::Tensor;
using at::TensorList;

std::tuple<Tensor, Tensor> window_index(const Tensor& req_to_token, const Tensor& req_rows,
                                        const Tensor& seq_lens, int64_t window) {
  int64_t batch = seq_lens.size(0);
  Tensor rows = at::zeros({batch, window}, req_to_token.options());
  Tensor lens = at::empty({batch}, req_to_token.options());
  Tensor requests_here = req_rows.contiguous(), lens_here = seq_lens.contiguous();
  const int64_t* request = requests_here.const_data_ptr<int64_t>();
  const int64_t* length = lens_here.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b) {
    int64_t count = std::clamp<int64_t>(length[b], 0, window);
    lens.mutable_data_ptr<int32_t>()[b] = static_cast<int32_t>(count);
    if (count == 0) continue;
    check_range(request + b, 1, req_to_token.size(0), "window_index", "req_rows");
    check_range(length + b, 1, req_to_token.size(1) + 1, "window_index", "seq_lens");
    const int32_t* from = req_to_token.const_data_ptr<int32_t>() +
                          request[b] * req_to_token.stride(0) + length[b] - count;
    std::copy(from, from + count, rows.mutable_data_ptr<int32_t>() + b * window);
  }
  return {rows, lens};
}

std::tuple<Tensor, Tensor> window_index_paged(const Tensor& kv_indptr, const Tensor& kv_indices,
                                              const Tensor& kv_last_page_len, int64_t page_size,
                                              int64_t window) {
  int64_t batch = kv_last_page_len.size(0);
  Tensor rows = at::zeros({batch, window}, kv_indices.options());
  Tensor lens = at::empty({batch}, kv_indices.options());
  Tensor indptr_here = kv_indptr.contiguous(), indices_here = kv_indices.contiguous(),
         last_here = kv_last_page_len.contiguous();
  const int32_t* start = indptr_here.const_data_ptr<int32_t>();
  const int32_t* page = indices_here.const_data_ptr<int32_t>();
  check_range(start, batch + 1, kv_indices.size(0) + 1, "window_index_paged", "kv_indptr");
  for (int64_t b = 0; b < batch; ++b) {
    int64_t pages = start[b + 1] - start[b];
    int64_t length =
        pages > 0 ? (pages - 1) * page_size + last_here.const_data_ptr<int32_t>()[b] : 0;
    TORCH_CHECK_INDEX(0 <= length && length <= std::max<int64_t>(pages, 0) * page_size,
                      "longspark.window_index_paged: kv_last_page_len must be in 1..", page_size);
    int64_t count = std::min(length, window);
    lens.mutable_data_ptr<int32_t>()[b] = static_cast<int32_t>(count);
    int32_t* to = rows.mutable_data_ptr<int32_t>() + b * window;
    for (int64_t i = 0; i < count; ++i) {
      int64_t position = length - count + i;
      to[i] = static_cast<int32_t>(page[start[b] + position / page_size] * page_size +
                                   position % page_size);
    }
  }
  return {rows, lens};
}

const char* row_address(const Tensor& pool, const Pool& p, int64_t id) {
  return static_cast<const char*>(p.data) +
         (id / p.page_size * p.page_stride + id % p.page_size * p.row_stride) * pool.element_size();
}

void prefetch_row(const Tensor& pool, int64_t id) {
  const Pool p = pool_of(pool);
  const char* row = row_address(pool, p, id);
  int64_t head_bytes = pool.size(-1) * pool.element_size();
  for (int64_t h = 0; h < pool.size(-2); ++h) {
    for (int64_t i = 0; i < head_bytes; i += 64) {
      __builtin_prefetch(row + h * p.head_stride * pool.element_size() + i, 0, 2);
    }
  }
}

void copy_row(const Tensor& pool, int64_t id, const Tensor& out, int64_t layer, int64_t request,
              int64_t slot) {
  const Pool p = pool_of(pool);
  int64_t size = pool.element_size(), heads = pool.size(-2), dim = pool.size(-1);
  const char* from = row_address(pool, p, id);
  char* to = static_cast<char*>(out.mutable_data_ptr()) +
             (layer * out.stride(0) + request * out.stride(1) + slot * out.stride(2)) * size;
  if (p.head_stride == dim && out.stride(3) == dim) {
    std::memcpy(to, from, heads * dim * size);
    return;
  }
  for (int64_t h = 0; h < heads; ++h) {
    std::memcpy(to + h * out.stride(3) * size, from + h * p.head_stride * size, dim * size);
  }
}

void window_gather(TensorList key_pools, TensorList value_pools, const Tensor& rows,
                   const Tensor& lens, const Tensor& seq_lens, const Tensor& out_key,
                   const Tensor& out_value) {
  int64_t batch = rows.size(0), window = rows.size(1);
  int64_t layers = static_cast<int64_t>(key_pools.size());
  Tensor lens_here = lens.contiguous(), seq_lens_here = seq_lens.contiguous();
  const int32_t* count = lens_here.const_data_ptr<int32_t>();
  const int64_t* length = seq_lens_here.const_data_ptr<int64_t>();
  check_range(count, batch, window + 1, "window_gather", "lens");
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t* ids = rows.const_data_ptr<int32_t>() + b * rows.stride(0);
    TORCH_CHECK_INDEX(count[b] <= length[b],
                      "longspark.window_gather: seq_lens holds less than lens");
    for (int64_t l = 0; l < layers; ++l) {
      check_range(ids, count[b], std::min(rows_of(key_pools[l]), rows_of(value_pools[l])),
                  "window_gather", "rows");
    }
  }
  parallel_units(layers * batch, 1, [&](int64_t unit, void*) {
    int64_t l = unit / batch, b = unit % batch;
    const int32_t* ids = rows.const_data_ptr<int32_t>() + b * rows.stride(0);
    constexpr int64_t kAhead = 4;  // rows lie scattered: no hardware prefetcher follows
    for (int64_t i = 0; i < count[b]; ++i) {
      int64_t slot = (length[b] - count[b] + i) % window;
      if (i + kAhead < count[b]) {
        prefetch_row(key_pools[l], ids[i + kAhead]);
        prefetch_row(value_pools[l], ids[i + kAhead]);
      }
      copy_row(key_pools[l], ids[i], out_key, l, b, slot);
      copy_row(value_pools[l], ids[i], out_value, l, b, slot);
    }
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(longspark, CPU, m) {
  m.impl("window_index", window_index);
  m.impl("window_index_paged", window_index_paged);
  m.impl("window_gather", window_gather);
}

}  // namespace longspark::cpu
