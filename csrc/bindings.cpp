// From torch tensors to the kernels' launchers, and the registration of the CUDA implementations.
//
// Compiled twice: with the CUDA kernels, and with the host emulation of the same kernels
// (LONGSPARK_HOST_EMULATION), where the operators appear as torch.ops.longspark_emu.* on CPU
// tensors. Shapes and dtypes were checked by python/longspark_sglang/ops; what is checked here is
// what would let a kernel touch memory that isn't its own.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

#include "longspark/launchers.h"
#if defined(LONGSPARK_HOST_EMULATION)
#include "host_emulation/host_emulation.h"
#include "schemas.h"
#else
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace longspark {
namespace {

using at::Tensor;
using at::TensorList;

#if defined(LONGSPARK_HOST_EMULATION)
constexpr auto kDevice = at::kCPU;
void permit(const Tensor& tensor, bool writable, const char* name) {
  if (tensor.numel() == 0) return;
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  emulation::allow(tensor.const_data_ptr(), (last + 1) * tensor.element_size(), writable, name);
}
#else
constexpr auto kDevice = at::kCUDA;
void permit(const Tensor&, bool, const char*) {}
#endif

// One operator call: device and stream of the launches, and (emulated) the memory they may touch.
class Call {
 public:
  explicit Call(const Tensor& decides_device)
#if defined(LONGSPARK_HOST_EMULATION)
  {
    TORCH_CHECK(decides_device.is_cpu(), "the emulation runs on CPU tensors");
  }
  Stream stream() const { return nullptr; }
#else
      : guard_(decides_device.device()) {
  }
  Stream stream() const { return c10::cuda::getCurrentCUDAStream(); }
#endif

  template <class T = void>
  const T* in(const Tensor& tensor, const char* name) const {
    check_device(tensor, name);
    permit(tensor, false, name);
    return static_cast<const T*>(tensor.const_data_ptr());
  }
  template <class T = void>
  T* out(const Tensor& tensor, const char* name) const {
    check_device(tensor, name);
    permit(tensor, true, name);
    return static_cast<T*>(tensor.mutable_data_ptr());
  }

 private:
  static void check_device(const Tensor& tensor, const char* name) {
    TORCH_CHECK(tensor.device().type() == kDevice, name, " is on ", tensor.device());
  }
#if defined(LONGSPARK_HOST_EMULATION)
  emulation::MemoryScope scope_;
#else
  c10::cuda::CUDAGuard guard_;
#endif
};

void check_rows_contiguous(const Tensor& tensor, const char* name, int64_t from_dimension) {
  int64_t expected = 1;
  for (int64_t i = tensor.dim() - 1; i >= from_dimension; --i) {
    TORCH_CHECK(tensor.size(i) == 1 || tensor.stride(i) == expected, name,
                " must be contiguous from dimension ", from_dimension, " on");
    expected *= tensor.size(i);
  }
}

int to_int(int64_t value) {
  TORCH_CHECK(value <= INT32_MAX, "size ", value, " is beyond 32 bits");
  return static_cast<int>(value);
}

PoolLayout layout_of(const Tensor& pool) {
  if (pool.dim() == 3) return {1, pool.stride(0), 0, pool.stride(1)};
  return {to_int(pool.size(1)), pool.stride(0), pool.stride(1), pool.stride(2)};
}

LayerPools layer_pools(const Call& call, TensorList keys, TensorList values) {
  TORCH_CHECK(!keys.empty() && keys.size() == values.size(), "one key and value pool per layer");
  TORCH_CHECK(keys.size() <= kMaxLayers, keys.size(), " tapped layers; the kernels take at most ",
              kMaxLayers);
  LayerPools pools;
  pools.layout = layout_of(keys[0]);
  for (size_t i = 0; i < keys.size(); ++i) {
    TORCH_CHECK(keys[i].strides() == keys[0].strides() && values[i].strides() == keys[0].strides(),
                "pools of different layouts");
    pools.keys[i] = call.in(keys[i], "key_pools");
    pools.values[i] = call.in(values[i], "value_pools");
  }
  return pools;
}

// ---- The window ---------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> window_index_op(const Tensor& req_to_token, const Tensor& req_rows,
                                           const Tensor& seq_lens, int64_t window) {
  Call call(req_to_token);
  check_rows_contiguous(req_to_token, "req_to_token", 1);
  check_rows_contiguous(req_rows, "req_rows", 0);
  check_rows_contiguous(seq_lens, "seq_lens", 0);
  int64_t batch = seq_lens.size(0);
  Tensor rows = at::empty({batch, window}, req_to_token.options());
  Tensor lens = at::empty({batch}, req_to_token.options());
  WindowIndex p;
  p.req_to_token = call.in<int32_t>(req_to_token, "req_to_token");
  p.table_stride = req_to_token.stride(0);
  p.req_rows = call.in<int64_t>(req_rows, "req_rows");
  p.seq_lens = call.in<int64_t>(seq_lens, "seq_lens");
  p.batch = to_int(batch);
  p.window = to_int(window);
  p.rows = call.out<int32_t>(rows, "rows");
  p.lens = call.out<int32_t>(lens, "lens");
  window_index(p, call.stream());
  return {rows, lens};
}

std::tuple<Tensor, Tensor> window_index_paged_op(const Tensor& kv_indptr, const Tensor& kv_indices,
                                                 const Tensor& kv_last_page_len, int64_t page_size,
                                                 int64_t window) {
  Call call(kv_indptr);
  check_rows_contiguous(kv_indptr, "kv_indptr", 0);
  check_rows_contiguous(kv_indices, "kv_indices", 0);
  check_rows_contiguous(kv_last_page_len, "kv_last_page_len", 0);
  int64_t batch = kv_last_page_len.size(0);
  Tensor rows = at::empty({batch, window}, kv_indptr.options());
  Tensor lens = at::empty({batch}, kv_indptr.options());
  WindowIndexPaged p;
  p.kv_indptr = call.in<int32_t>(kv_indptr, "kv_indptr");
  p.kv_indices = call.in<int32_t>(kv_indices, "kv_indices");
  p.kv_last_page_len = call.in<int32_t>(kv_last_page_len, "kv_last_page_len");
  p.batch = to_int(batch);
  p.window = to_int(window);
  p.page_size = to_int(page_size);
  p.rows = call.out<int32_t>(rows, "rows");
  p.lens = call.out<int32_t>(lens, "lens");
  window_index_paged(p, call.stream());
  return {rows, lens};
}

// The most bytes, up to 16, that divide all of these offsets.
int common_unit(std::initializer_list<int64_t> byte_offsets) {
  int64_t divisor = 16;
  for (int64_t offset : byte_offsets) divisor = std::gcd(divisor, offset);
  return static_cast<int>(divisor);
}

int64_t address(const Tensor& tensor) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
}

void window_gather_op(TensorList key_pools, TensorList value_pools, const Tensor& rows,
                      const Tensor& lens, const Tensor& seq_lens, Tensor& out_key,
                      Tensor& out_value) {
  Call call(rows);
  check_rows_contiguous(rows, "rows", 1);
  check_rows_contiguous(lens, "lens", 0);
  check_rows_contiguous(seq_lens, "seq_lens", 0);
  check_rows_contiguous(out_key, "out_key", 0);
  check_rows_contiguous(out_value, "out_value", 0);
  if (out_key.numel() == 0) return;
  WindowGather p;
  p.pools = layer_pools(call, key_pools, value_pools);
  p.rows = call.in<int32_t>(rows, "rows");
  p.rows_stride = rows.stride(0);
  p.lens = call.in<int32_t>(lens, "lens");
  p.seq_lens = call.in<int64_t>(seq_lens, "seq_lens");
  p.layers = to_int(out_key.size(0));
  p.batch = to_int(out_key.size(1));
  p.window = to_int(out_key.size(2));
  p.kv_heads = to_int(out_key.size(3));
  p.out_key = call.out(out_key, "out_key");
  p.out_value = call.out(out_value, "out_value");

  int64_t bytes = out_key.element_size();
  PoolLayout& layout = p.pools.layout;
  int unit =
      common_unit({out_key.size(4) * bytes, layout.page_stride * bytes, layout.row_stride * bytes,
                   layout.head_stride * bytes, address(out_key), address(out_value)});
  for (size_t i = 0; i < key_pools.size(); ++i) {
    unit = common_unit({unit, address(key_pools[i]), address(value_pools[i])});
  }
  p.unit_bytes = unit;
  p.units_per_head = to_int(out_key.size(4) * bytes / unit);
  layout.page_stride = layout.page_stride * bytes / unit;
  layout.row_stride = layout.row_stride * bytes / unit;
  layout.head_stride = layout.head_stride * bytes / unit;
  window_gather(p, call.stream());
}

void implement(torch::Library& m) {
  m.impl("window_index", window_index_op);
  m.impl("window_index_paged", window_index_paged_op);
  m.impl("window_gather", window_gather_op);
}

#if defined(LONGSPARK_HOST_EMULATION)
void configure(int64_t seed, c10::string_view order) {
  TORCH_CHECK(order == "forward" || order == "reversed" || order == "random",
              "order must be forward, reversed or random, not ", order);
  emulation::configure(seed, order == "forward"    ? emulation::Order::kForward
                             : order == "reversed" ? emulation::Order::kReversed
                                                   : emulation::Order::kRandom);
}
#endif

}  // namespace
}  // namespace longspark

#if defined(LONGSPARK_HOST_EMULATION)
TORCH_LIBRARY(longspark_emu, m) {
  longspark::define_operators(m);
  m.def("configure(int seed, str order) -> ()", longspark::configure);
}
TORCH_LIBRARY_IMPL(longspark_emu, CPU, m) { longspark::implement(m); }
#else
TORCH_LIBRARY_IMPL(longspark, CUDA, m) { longspark::implement(m); }
#endif
