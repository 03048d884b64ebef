// block_attention on the CPU. The computation is in block_attention.h.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "isa.h"
#include "parallel.h"
#include "tensors.h"

namespace longspark::cpu {
namespace {

using at::Tensor;

Tensor block_attention(const Tensor& query, const Tensor& summary_key, const Tensor& summary_value,
                       const Tensor& slots, const Tensor& key_pool, const Tensor& value_pool,
                       const Tensor& rows, const Tensor& lens, const Tensor& block_key,
                       const Tensor& block_value, double scale) {
  check_head_dim(query, "block_attention");
  BlockAttention a{};
  a.type = type_of(query);
  a.query = query.const_data_ptr();
  copy_strides(query, a.query_strides);
  a.summary_key = summary_key.const_data_ptr();
  copy_strides(summary_key, a.summary_key_strides);
  a.summary_value = summary_value.const_data_ptr<float>();
  copy_strides(summary_value, a.summary_value_strides);
  a.keys = pool_of(key_pool);
  a.values = pool_of(value_pool);
  a.rows = rows.const_data_ptr<int32_t>();
  a.rows_stride = rows.stride(0);
  a.block_key = block_key.const_data_ptr();
  copy_strides(block_key, a.block_key_strides);
  a.block_value = block_value.const_data_ptr();
  copy_strides(block_value, a.block_value_strides);
  a.block = query.size(1);
  a.heads = query.size(2);
  a.head_dim = query.size(3);
  a.kv_heads = block_key.size(2);
  a.summary = summary_key.size(1);
  a.window = rows.size(1);
  a.scale = static_cast<float>(scale);
  Tensor out = at::empty(query.sizes(), query.options());
  if (out.numel() == 0) return out;
  a.out = out.mutable_data_ptr();

  int64_t batch = query.size(0);
  Tensor slots_here = slots.contiguous(), lens_here = lens.contiguous();
  a.slots = slots_here.const_data_ptr<int64_t>();
  a.lens = lens_here.const_data_ptr<int32_t>();
  check_range(a.slots, batch, summary_value.size(0), "block_attention", "slots");
  check_range(a.lens, batch, a.window + 1, "block_attention", "lens");
  int64_t pool_rows = std::min(rows_of(key_pool), rows_of(value_pool));
  for (int64_t b = 0; b < batch; ++b) {
    check_range(a.rows + b * a.rows_stride, a.lens[b], pool_rows, "block_attention", "rows");
  }
  const Kernels& k = kernels();
  parallel_units(batch * a.kv_heads, k.block_attention_scratch(a),
                 [&](int64_t unit, void* scratch) { k.block_attention(a, unit, scratch); });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(longspark, CPU, m) { m.impl("block_attention", block_attention); }

}  // namespace longspark::cpu
