// summary_merge and summary_merge_bulk on the CPU. The computation is in summary_merge.h.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "isa.h"
#include "parallel.h"
#include "tensors.h"

namespace longspark::cpu {
namespace {

using at::Tensor;
using at::TensorList;

// One call: request b's rows are ids[b], counts[b] of them.
void merge(const char* op, const Tensor& queries, TensorList key_pools, TensorList value_pools,
           const Tensor& state_value, const Tensor& state_lse, const Tensor& slots, double scale,
           const std::vector<const int32_t*>& ids, const std::vector<int64_t>& counts) {
  TORCH_CHECK(!key_pools.empty() && key_pools.size() == value_pools.size(), "longspark.", op,
              ": one key and value pool per layer");
  check_head_dim(key_pools[0], op);
  SummaryMerge a{};
  a.type = type_of(key_pools[0]);
  TORCH_CHECK(type_of(queries) == a.type, "longspark.", op, ": queries and pools differ in dtype");
  a.queries = queries.const_data_ptr();
  copy_strides(queries, a.query_strides);
  std::vector<Pool> keys, values;
  int64_t pool_rows = INT64_MAX;
  for (size_t l = 0; l < key_pools.size(); ++l) {
    keys.push_back(pool_of(key_pools[l]));
    values.push_back(pool_of(value_pools[l]));
    pool_rows = std::min({pool_rows, rows_of(key_pools[l]), rows_of(value_pools[l])});
  }
  a.keys = keys.data();
  a.values = values.data();
  a.state_value = state_value.mutable_data_ptr<float>();
  copy_strides(state_value, a.value_strides);
  a.state_lse = state_lse.mutable_data_ptr<float>();
  copy_strides(state_lse, a.lse_strides);
  a.heads = queries.size(1);
  a.kv_heads = key_pools[0].size(-2);
  a.slots_per_head = queries.size(2);
  a.head_dim = queries.size(3);
  a.scale = static_cast<float>(scale);

  Tensor slots_here = slots.contiguous();
  const int64_t* slot = slots_here.const_data_ptr<int64_t>();
  check_range(slot, slots.size(0), state_value.size(0), op, "slots");
  std::vector<int64_t> busy;  // requests with rows
  for (size_t b = 0; b < counts.size(); ++b) {
    if (counts[b] == 0) continue;
    check_range(ids[b], counts[b], pool_rows, op, "rows");
    busy.push_back(b);
  }
  if (queries.numel() == 0 || busy.empty()) return;
  const Kernels& k = kernels();
  int64_t layers = queries.size(0), per_request = layers * a.kv_heads;
  parallel_units(
      static_cast<int64_t>(busy.size()) * per_request, k.summary_merge_scratch(a),
      [&](int64_t i, void* scratch) {
        int64_t b = busy[i / per_request];
        k.summary_merge(
            a, {i % per_request / a.kv_heads, i % a.kv_heads, slot[b], ids[b], counts[b]}, scratch);
      });
}

void summary_merge(const Tensor& queries, TensorList key_pools, TensorList value_pools,
                   const Tensor& rows, const Tensor& counts, const Tensor& state_value,
                   const Tensor& state_lse, const Tensor& slots, double scale) {
  Tensor counts_here = counts.contiguous();
  const int32_t* count = counts_here.const_data_ptr<int32_t>();
  check_range(count, counts.size(0), rows.size(1) + 1, "summary_merge", "counts");
  std::vector<const int32_t*> ids;
  for (int64_t b = 0; b < rows.size(0); ++b) {
    ids.push_back(rows.const_data_ptr<int32_t>() + b * rows.stride(0));
  }
  merge("summary_merge", queries, key_pools, value_pools, state_value, state_lse, slots, scale, ids,
        std::vector<int64_t>(count, count + counts.size(0)));
}

void summary_merge_bulk(const Tensor& queries, TensorList key_pools, TensorList value_pools,
                        const Tensor& rows, const Tensor& indptr, const Tensor& state_value,
                        const Tensor& state_lse, const Tensor& slots, double scale) {
  Tensor indptr_here = indptr.to(at::kLong).contiguous(), rows_here = rows.contiguous();
  const int64_t* start = indptr_here.const_data_ptr<int64_t>();
  check_range(start, indptr.size(0), rows.size(0) + 1, "summary_merge_bulk", "indptr");
  std::vector<const int32_t*> ids;
  std::vector<int64_t> counts;
  for (int64_t b = 0; b + 1 < indptr.size(0); ++b) {
    TORCH_CHECK(start[b] <= start[b + 1], "longspark.summary_merge_bulk: indptr must not decrease");
    ids.push_back(rows_here.const_data_ptr<int32_t>() + start[b]);
    counts.push_back(start[b + 1] - start[b]);
  }
  merge("summary_merge_bulk", queries, key_pools, value_pools, state_value, state_lse, slots, scale,
        ids, counts);
}

}  // namespace

TORCH_LIBRARY_IMPL(longspark, CPU, m) {
  m.impl("summary_merge", summary_merge);
  m.impl("summary_merge_bulk", summary_merge_bulk);
}

}  // namespace longspark::cpu
