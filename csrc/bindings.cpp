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

int64_t address(const Tensor& tensor) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
}

Dtype dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kBFloat16:
      return Dtype::kBfloat16;
    case at::kHalf:
      return Dtype::kFloat16;
    default:
      TORCH_CHECK(false, name, " must be float32, bfloat16 or float16, not ", tensor.scalar_type());
  }
}

// Whether rows that begin at multiples of `strides` elements can be read `elements` at a time.
bool is_aligned(const Tensor& tensor, std::initializer_list<int64_t> strides, int64_t elements) {
  bool aligned = address(tensor) % (elements * tensor.element_size()) == 0;
  for (int64_t stride : strides) aligned = aligned && stride % elements == 0;
  return aligned;
}

// Bytes of scratch memory for `count` items of T.
template <class T>
Tensor scratch_for(int64_t count, const Tensor& like) {
  return at::empty({count * static_cast<int64_t>(sizeof(T))}, like.options().dtype(at::kByte));
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

// ---- The summary
// ---------------------------------------------------------------------------------

bool are_pools_aligned(TensorList pools, int64_t elements) {
  return std::all_of(pools.begin(), pools.end(), [&](const Tensor& pool) {
    int64_t last = pool.dim() - 1;
    for (int64_t i = 0; i < last; ++i) {
      if (pool.stride(i) % elements) return false;
    }
    return pool.size(last) % elements == 0 && is_aligned(pool, {}, elements);
  });
}

bool has_tensor_core_dim(int64_t dim) { return dim == 64 || dim == 128 || dim == 256; }

Summary summary_of(const Call& call, const Tensor& queries, TensorList key_pools,
                   TensorList value_pools, Tensor& state_value, Tensor& state_lse,
                   const Tensor& slots, double scale) {
  check_rows_contiguous(queries, "queries", 0);
  check_rows_contiguous(state_value, "state_value", 3);
  check_rows_contiguous(state_lse, "state_lse", 3);
  check_rows_contiguous(slots, "slots", 0);
  Summary p;
  p.dtype = dtype_of(queries, "queries");
  p.queries = call.in(queries, "queries");
  p.pools = layer_pools(call, key_pools, value_pools);
  TORCH_CHECK(key_pools[0].scalar_type() == queries.scalar_type(),
              "key_pools must have the dtype of", " queries");
  p.layers = to_int(queries.size(0));
  p.heads = to_int(queries.size(1));
  p.slots = to_int(queries.size(2));
  p.dim = to_int(queries.size(3));
  p.kv_heads = to_int(key_pools[0].size(-2));
  TORCH_CHECK(p.layers == static_cast<int>(key_pools.size()), "one pool per layer of queries");
  TORCH_CHECK(p.heads % p.kv_heads == 0, p.heads, " query heads on ", p.kv_heads, " KV heads");
  p.scale = static_cast<float>(scale);
  p.state_value = call.out<float>(state_value, "state_value");
  p.state_lse = call.out<float>(state_lse, "state_lse");
  p.value_state_stride = state_value.stride(0);
  p.value_layer_stride = state_value.stride(1);
  p.value_head_stride = state_value.stride(2);
  p.lse_state_stride = state_lse.stride(0);
  p.lse_layer_stride = state_lse.stride(1);
  p.lse_head_stride = state_lse.stride(2);
  p.state_rows = call.in<int64_t>(slots, "slots");
  p.batch = to_int(slots.size(0));
  p.vector_rows =
      are_pools_aligned(key_pools, 4) && are_pools_aligned(value_pools, 4) &&
      is_aligned(queries, {}, 4) &&
      is_aligned(state_value, {p.value_state_stride, p.value_layer_stride, p.value_head_stride}, 4);
  return p;
}

void summary_merge_op(const Tensor& queries, TensorList key_pools, TensorList value_pools,
                      const Tensor& rows, const Tensor& counts, Tensor& state_value,
                      Tensor& state_lse, const Tensor& slots, double scale) {
  Call call(queries);
  check_rows_contiguous(rows, "rows", 1);
  check_rows_contiguous(counts, "counts", 0);
  SummaryMerge p;
  p.summary =
      summary_of(call, queries, key_pools, value_pools, state_value, state_lse, slots, scale);
  p.rows = call.in<int32_t>(rows, "rows");
  p.rows_stride = rows.stride(0);
  p.columns = to_int(rows.size(1));
  p.counts = call.in<int32_t>(counts, "counts");
  summary_merge(p, call.stream());
}

void summary_merge_bulk_op(const Tensor& queries, TensorList key_pools, TensorList value_pools,
                           const Tensor& rows, const Tensor& indptr, Tensor& state_value,
                           Tensor& state_lse, const Tensor& slots, double scale) {
  // A chunk keeps one block busy for long enough to be worth its partial state; the number of
  // chunks is bounded, so that scratch memory is too.
  constexpr int64_t kLeastChunkRows = 512, kMostChunks = 16;
  Call call(queries);
  check_rows_contiguous(rows, "rows", 0);
  check_rows_contiguous(indptr, "indptr", 0);
  if (rows.numel() == 0) return;
  SummaryMergeBulk p;
  p.summary =
      summary_of(call, queries, key_pools, value_pools, state_value, state_lse, slots, scale);
  p.rows = call.in<int32_t>(rows, "rows");
  bool is_wide = indptr.scalar_type() == at::kLong;
  p.indptr = is_wide ? nullptr : call.in<int32_t>(indptr, "indptr");
  p.indptr_wide = is_wide ? call.in<int64_t>(indptr, "indptr") : nullptr;
  int64_t total = rows.size(0);
  int64_t chunk = std::max(kLeastChunkRows, (total + kMostChunks - 1) / kMostChunks);
  p.chunk_rows = to_int((chunk + 15) / 16 * 16);
  p.segments = to_int((total + p.chunk_rows - 1) / p.chunk_rows + p.summary.batch);
  Tensor partial_value =
      at::empty({p.segments, p.summary.layers, p.summary.heads, p.summary.slots, p.summary.dim},
                state_value.options());
  Tensor partial_lse = at::empty({p.segments, p.summary.layers, p.summary.heads, p.summary.slots},
                                 state_lse.options());
  p.partial_value = call.out<float>(partial_value, "partial_value");
  p.partial_lse = call.out<float>(partial_lse, "partial_lse");
  p.tensor_cores = p.summary.dtype != Dtype::kFloat32 && has_tensor_core_dim(p.summary.dim) &&
                   are_pools_aligned(key_pools, 8) && are_pools_aligned(value_pools, 8) &&
                   is_aligned(queries, {}, 8);
  summary_merge_bulk(p, call.stream());
}

// ---- The block's attention
// -----------------------------------------------------------------------

Tensor block_attention_op(const Tensor& query, const Tensor& summary_key,
                          const Tensor& summary_value, const Tensor& slots, const Tensor& key_pool,
                          const Tensor& value_pool, const Tensor& rows, const Tensor& lens,
                          const Tensor& block_key, const Tensor& block_value, double scale) {
  Call call(query);
  check_rows_contiguous(query, "query", 3);
  check_rows_contiguous(summary_key, "summary_key", 1);
  check_rows_contiguous(summary_value, "summary_value", 2);
  check_rows_contiguous(slots, "slots", 0);
  check_rows_contiguous(rows, "rows", 1);
  check_rows_contiguous(lens, "lens", 0);
  check_rows_contiguous(block_key, "block_key", 3);
  check_rows_contiguous(block_value, "block_value", 3);
  TORCH_CHECK(key_pool.strides() == value_pool.strides(), "pools of different layouts");
  for (const Tensor* tensor : {&summary_key, &key_pool, &value_pool, &block_key, &block_value}) {
    TORCH_CHECK(tensor->scalar_type() == query.scalar_type(), "all dtypes must be the query's");
  }
  Tensor out = at::empty(query.sizes(), query.options());
  if (out.numel() == 0) return out;
  BlockAttention p;
  p.dtype = dtype_of(query, "query");
  p.query = call.in(query, "query");
  p.query_batch_stride = query.stride(0);
  p.query_slot_stride = query.stride(1);
  p.query_head_stride = query.stride(2);
  p.summary_key = call.in(summary_key, "summary_key");
  p.summary_key_head_stride = summary_key.stride(0);
  p.summary_value = call.in<float>(summary_value, "summary_value");
  p.summary_value_state_stride = summary_value.stride(0);
  p.summary_value_head_stride = summary_value.stride(1);
  p.state_rows = call.in<int64_t>(slots, "slots");
  p.key_pool = call.in(key_pool, "key_pool");
  p.value_pool = call.in(value_pool, "value_pool");
  p.layout = layout_of(key_pool);
  p.rows = call.in<int32_t>(rows, "rows");
  p.rows_stride = rows.stride(0);
  p.lens = call.in<int32_t>(lens, "lens");
  p.block_key = call.in(block_key, "block_key");
  p.block_value = call.in(block_value, "block_value");
  p.key_batch_stride = block_key.stride(0);
  p.key_slot_stride = block_key.stride(1);
  p.key_head_stride = block_key.stride(2);
  p.value_batch_stride = block_value.stride(0);
  p.value_slot_stride = block_value.stride(1);
  p.value_head_stride = block_value.stride(2);
  p.batch = to_int(query.size(0));
  p.block = to_int(query.size(1));
  p.heads = to_int(query.size(2));
  p.dim = to_int(query.size(3));
  p.kv_heads = to_int(block_key.size(2));
  p.slots = to_int(summary_key.size(1));
  TORCH_CHECK(p.heads % p.kv_heads == 0, p.heads, " query heads on ", p.kv_heads, " KV heads");
  p.scale = static_cast<float>(scale);
  p.out = call.out(out, "out");
  p.tensor_cores =
      p.dtype != Dtype::kFloat32 && has_tensor_core_dim(p.dim) && p.block <= 16 &&
      are_pools_aligned({key_pool, value_pool}, 8) &&
      is_aligned(summary_key, {summary_key.stride(0)}, 8) &&
      is_aligned(query, {query.stride(0), query.stride(1), query.stride(2)}, 8) &&
      is_aligned(block_key, {block_key.stride(0), block_key.stride(1), block_key.stride(2)}, 8) &&
      is_aligned(block_value, {block_value.stride(0), block_value.stride(1), block_value.stride(2)},
                 8) &&
      is_aligned(summary_value, {summary_value.stride(0), summary_value.stride(1)}, 4);
  block_attention(p, call.stream());
  return out;
}

// ---- Markov correction, draft sampling, acceptance
// -----------------------------------------------

Markov markov_of(const Call& call, const Tensor& logits, const Tensor& markov_w1,
                 const Tensor& markov_w2) {
  check_rows_contiguous(logits, "base_logits", logits.dim() - 1);
  check_rows_contiguous(markov_w1, "markov_w1", 1);
  check_rows_contiguous(markov_w2, "markov_w2", 1);
  Markov p;
  p.logits_dtype = dtype_of(logits, "base_logits");
  p.weights_dtype = dtype_of(markov_w1, "markov_w1");
  TORCH_CHECK(markov_w1.scalar_type() == markov_w2.scalar_type(), "markov_w1 and markov_w2 differ");
  TORCH_CHECK(markov_w1.size(0) >= logits.size(-1) && markov_w2.size(0) >= logits.size(-1),
              "markov_w1 and markov_w2 must have a row for every token");
  p.logits = call.in(logits, "base_logits");
  p.logits_stride = logits.stride(0);
  p.slot_stride = logits.dim() == 3 ? logits.stride(1) : 0;
  p.slots = nullptr;
  p.prev = nullptr;
  p.w1 = call.in(markov_w1, "markov_w1");
  p.w2 = call.in(markov_w2, "markov_w2");
  p.w1_stride = markov_w1.stride(0);
  p.w2_stride = markov_w2.stride(0);
  p.batch = to_int(logits.size(0));
  p.vocab = to_int(logits.size(-1));
  p.rank = to_int(markov_w1.size(1));
  p.tensor_cores = p.weights_dtype != Dtype::kFloat32 && p.rank % 32 == 0 &&
                   is_aligned(markov_w1, {p.w1_stride}, 8) &&
                   is_aligned(markov_w2, {p.w2_stride}, 8);
  p.vector_logits = is_aligned(logits, {p.logits_stride, p.slot_stride}, 8);
  return p;
}

Tensor markov_step_op(const Tensor& base_logits, const Tensor& prev, const Tensor& markov_w1,
                      const Tensor& markov_w2) {
  Call call(base_logits);
  check_rows_contiguous(prev, "prev", 0);
  Tensor out = at::empty(base_logits.sizes(), base_logits.options().dtype(at::kFloat));
  MarkovStep p;
  p.markov = markov_of(call, base_logits, markov_w1, markov_w2);
  p.markov.prev = call.in<int64_t>(prev, "prev");
  p.out = call.out<float>(out, "out");
  markov_step(p, call.stream());
  return out;
}

std::tuple<Tensor, Tensor> draft_sample_op(const Tensor& base_logits, const Tensor& prev,
                                           const Tensor& markov_w1, const Tensor& markov_w2,
                                           const Tensor& temperature, const Tensor& seed,
                                           const Tensor& position, int64_t vocab_limit) {
  Call call(base_logits);
  check_rows_contiguous(prev, "prev", 0);
  check_rows_contiguous(temperature, "temperature", 0);
  check_rows_contiguous(seed, "seed", 0);
  check_rows_contiguous(position, "position", 0);
  int64_t batch = base_logits.size(0), vocab = base_logits.size(1);
  TORCH_CHECK(vocab_limit >= 1 && vocab_limit <= vocab, "vocab_limit must be in 1..", vocab);
  Tensor token = at::empty({batch}, prev.options());
  Tensor logq = at::empty({batch}, temperature.options());
  Tensor partials = scratch_for<DraftPartial>(batch * num_ranges(to_int(vocab)), base_logits);
  DraftSample p;
  p.markov = markov_of(call, base_logits, markov_w1, markov_w2);
  p.markov.prev = call.in<int64_t>(prev, "prev");
  p.temperature = call.in<float>(temperature, "temperature");
  p.seed = call.in<int64_t>(seed, "seed");
  p.position = call.in<int64_t>(position, "position");
  p.vocab_limit = to_int(vocab_limit);
  p.partials = reinterpret_cast<DraftPartial*>(call.out<uint8_t>(partials, "partials"));
  p.token = call.out<int64_t>(token, "token");
  p.logq = call.out<float>(logq, "logq");
  draft_sample(p, call.stream());
  return {token, logq};
}

std::tuple<Tensor, Tensor> accept_chain_op(const Tensor& target_probs, const Tensor& draft_tokens,
                                           const Tensor& draft_logq, const Tensor& base_logits,
                                           const Tensor& anchors, const Tensor& markov_w1,
                                           const Tensor& markov_w2, const Tensor& temperature,
                                           const Tensor& point_mass, const Tensor& uniforms,
                                           const Tensor& uniform_final, const Tensor& limit,
                                           int64_t vocab_limit) {
  Call call(target_probs);
  int64_t batch = base_logits.size(0), vocab = base_logits.size(2);
  TORCH_CHECK(vocab_limit >= 1 && vocab_limit <= vocab, "vocab_limit must be in 1..", vocab);
  // Mostly no copies; the tensors live until the launches are queued, which is long enough.
  Tensor probs = target_probs.contiguous(), tokens = draft_tokens.contiguous();
  Tensor logq = draft_logq.contiguous(), draws = uniforms.contiguous();
  Tensor each_anchor = anchors.contiguous(), each_temperature = temperature.contiguous();
  Tensor each_point = point_mass.contiguous(), final_draw = uniform_final.contiguous();
  Tensor each_limit = limit.contiguous();

  Tensor accepted = at::empty({batch}, limit.options());
  Tensor next_token = at::empty({batch}, draft_tokens.options());
  Tensor slots = at::empty({batch}, limit.options());
  Tensor prev = at::empty({batch}, draft_tokens.options());
  Tensor logits = at::empty({batch, vocab}, base_logits.options());
  Tensor lse = at::empty({batch}, temperature.options());
  Tensor partials = scratch_for<Lse>(batch * num_ranges(to_int(vocab)), base_logits);
  Tensor masses = scratch_for<TileMass>(batch * num_tiles(to_int(vocab)), base_logits);

  AcceptChain p;
  p.markov = markov_of(call, base_logits, markov_w1, markov_w2);
  p.target_probs = call.in<float>(probs, "target_probs");
  p.draft_tokens = call.in<int64_t>(tokens, "draft_tokens");
  p.draft_logq = call.in<float>(logq, "draft_logq");
  p.anchors = call.in<int64_t>(each_anchor, "anchors");
  p.temperature = call.in<float>(each_temperature, "temperature");
  p.point_mass = call.in<bool>(each_point, "point_mass");
  p.uniforms = call.in<float>(draws, "uniforms");
  p.uniform_final = call.in<float>(final_draw, "uniform_final");
  p.limit = call.in<int32_t>(each_limit, "limit");
  p.block = to_int(draft_tokens.size(1));
  p.vocab_limit = to_int(vocab_limit);
  p.slots = call.out<int32_t>(slots, "slots");
  p.prev = call.out<int64_t>(prev, "prev");
  p.logits = call.out(logits, "logits");
  p.partials = reinterpret_cast<Lse*>(call.out<uint8_t>(partials, "partials"));
  p.lse = call.out<float>(lse, "lse");
  p.masses = reinterpret_cast<TileMass*>(call.out<uint8_t>(masses, "masses"));
  p.accepted = call.out<int32_t>(accepted, "accepted");
  p.next_token = call.out<int64_t>(next_token, "next_token");
  accept_chain(p, call.stream());
  return {accepted, next_token};
}

std::tuple<Tensor, Tensor> accept_greedy_op(const Tensor& target_tokens, const Tensor& draft_tokens,
                                            const Tensor& limit) {
  Call call(draft_tokens);
  Tensor target = target_tokens.contiguous(), draft = draft_tokens.contiguous();
  Tensor each_limit = limit.contiguous();
  Tensor accepted = at::empty({draft.size(0)}, limit.options());
  Tensor next_token = at::empty({draft.size(0)}, draft.options());
  AcceptGreedy p;
  p.target_tokens = call.in<int64_t>(target, "target_tokens");
  p.draft_tokens = call.in<int64_t>(draft, "draft_tokens");
  p.limit = call.in<int32_t>(each_limit, "limit");
  p.batch = to_int(draft.size(0));
  p.block = to_int(draft.size(1));
  p.accepted = call.out<int32_t>(accepted, "accepted");
  p.next_token = call.out<int64_t>(next_token, "next_token");
  accept_greedy(p, call.stream());
  return {accepted, next_token};
}

void implement(torch::Library& m) {
  m.impl("summary_merge", summary_merge_op);
  m.impl("summary_merge_bulk", summary_merge_bulk_op);
  m.impl("block_attention", block_attention_op);
  m.impl("markov_step", markov_step_op);
  m.impl("draft_sample", draft_sample_op);
  m.impl("accept_chain", accept_chain_op);
  m.impl("accept_greedy", accept_greedy_op);
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
