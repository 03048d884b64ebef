// paged_attention: the split into units and threads. The computation is in paged_attention.h.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "isa.h"
#include "parallel.h"
#include "tensors.h"

namespace longspark::cpu {
namespace {

using at::Tensor;

// Query lanes (query rows times heads per KV head) of one unit. Enough to amortise what is done per
// key (fetching it, pairing its value); more would push the scores out of the first-level cache.
constexpr int64_t kUnitLanes = 64;
// Few rows over a long prefix stay together up to here: the prefix is then read only once.
constexpr int64_t kMaxUnitLanes = 128;
// A unit takes several KV heads of its tile, because a position's heads lie side by side: together
// they cost one page walk. What they accumulate must stay in the second-level cache.
constexpr int64_t kUnitBytes = 512 << 10;
// So many units per thread are enough to share out evenly.
constexpr int64_t kUnitsPerThread = 8;

// The query rows of every request, in tiles that one unit can hold; those with most keys first.
std::vector<PagedAttentionUnit> query_tiles(const PagedAttention& a, const int64_t* request_rows,
                                            const int64_t* kv_lens, const int64_t* indptr,
                                            int64_t batch, int64_t chunk_rows) {
  int64_t group = a.heads / a.kv_heads;
  std::vector<PagedAttentionUnit> tiles;
  for (int64_t b = 0; b < batch; ++b) {
    int64_t count = indptr[b + 1] - indptr[b];
    int64_t step =
        count * group <= kMaxUnitLanes ? count : std::max<int64_t>(1, kUnitLanes / group);
    for (int64_t first = 0; first < count; first += step) {
      PagedAttentionUnit tile{};
      tile.request_row = request_rows[b];
      tile.query_row = indptr[b] + first;
      tile.position = kv_lens[b] - count + first;
      tile.rows = std::min(step, count - first);
      tile.kv_len = kv_lens[b];
      tile.heads = a.kv_heads;
      int64_t keys = a.causal ? tile.position + tile.rows : tile.kv_len;
      int64_t first_key = a.window >= 0 ? std::max<int64_t>(0, tile.position - a.window) : 0;
      tile.first_chunk = first_key / chunk_rows;
      tile.last_chunk = (keys + chunk_rows - 1) / chunk_rows;
      tiles.push_back(tile);
    }
  }
  auto chunks = [](const PagedAttentionUnit& tile) { return tile.last_chunk - tile.first_chunk; };
  std::stable_sort(tiles.begin(), tiles.end(),
                   [&](const auto& x, const auto& y) { return chunks(x) > chunks(y); });
  return tiles;
}

// One unit per tile and some of its KV heads.
void attend_by_heads(const PagedAttention& a, const std::vector<PagedAttentionUnit>& tiles,
                     int64_t most_rows) {
  const Kernels& k = kernels();
  int64_t count = static_cast<int64_t>(tiles.size()), threads = at::get_num_threads();
  int64_t head_bytes = most_rows * (a.heads / a.kv_heads) * (a.head_dim + a.value_dim) * 4;
  int64_t step = std::clamp<int64_t>(kUnitBytes / std::max<int64_t>(head_bytes, 1), 1, a.kv_heads);
  if (threads > 1) {
    step = std::clamp<int64_t>(count * a.kv_heads / (kUnitsPerThread * threads), 1, step);
  }
  int64_t steps = (a.kv_heads + step - 1) / step;
  parallel_units(count * steps, k.paged_attention_scratch(a, most_rows, step),
                 [&](int64_t i, void* scratch) {
                   PagedAttentionUnit unit = tiles[i / steps];
                   unit.first_head = i % steps * step;
                   unit.heads = std::min(step, a.kv_heads - unit.first_head);
                   k.paged_attention(a, unit, scratch);
                 });
}

// One unit per tile and chunk of keys, then a merge: few tiles over many keys.
void attend_by_chunks(const PagedAttention& a, const std::vector<PagedAttentionUnit>& tiles,
                      int64_t most_rows, const at::TensorOptions& options) {
  const Kernels& k = kernels();
  auto part_size = [&](const PagedAttentionUnit& tile) {  // of one head
    int64_t lanes = (tile.rows * (a.heads / a.kv_heads) + 7) / 8 * 8;
    return lanes * (a.value_dim + 2);
  };
  std::vector<PagedAttentionUnit> units;
  std::vector<int64_t> offsets, first_unit;
  int64_t size = 0;
  for (const PagedAttentionUnit& tile : tiles) {
    first_unit.push_back(static_cast<int64_t>(units.size()));
    for (int64_t chunk = tile.first_chunk; chunk < tile.last_chunk; ++chunk) {
      PagedAttentionUnit unit = tile;
      unit.first_chunk = chunk;
      unit.last_chunk = chunk + 1;
      units.push_back(unit);
      offsets.push_back(size);
      size += a.kv_heads * part_size(tile);
    }
  }
  first_unit.push_back(static_cast<int64_t>(units.size()));
  Tensor parts = at::empty({size}, options.dtype(at::kFloat));
  for (size_t i = 0; i < units.size(); ++i) {
    units[i].partial = parts.mutable_data_ptr<float>() + offsets[i];
  }

  int64_t scratch_bytes = k.paged_attention_scratch(a, most_rows, a.kv_heads);
  parallel_units(static_cast<int64_t>(units.size()), scratch_bytes,
                 [&](int64_t i, void* scratch) { k.paged_attention(a, units[i], scratch); });
  parallel_units(static_cast<int64_t>(tiles.size()) * a.kv_heads, scratch_bytes,
                 [&](int64_t i, void* scratch) {
                   int64_t t = i / a.kv_heads;
                   PagedAttentionUnit unit = tiles[t];
                   unit.first_head = i % a.kv_heads;
                   unit.heads = 1;
                   std::vector<const float*> of_chunks;
                   for (int64_t u = first_unit[t]; u < first_unit[t + 1]; ++u) {
                     of_chunks.push_back(units[u].partial + unit.first_head * part_size(unit));
                   }
                   k.paged_attention_merge(a, unit, of_chunks.data(),
                                           static_cast<int64_t>(of_chunks.size()), scratch);
                 });
}

Tensor paged_attention(const Tensor& query, const Tensor& key_pool, const Tensor& value_pool,
                       const Tensor& req_to_token, const Tensor& req_rows, const Tensor& kv_lens,
                       const Tensor& query_indptr, double scale, bool causal, int64_t window,
                       double softcap) {
  check_head_dim(query, "paged_attention");
  PagedAttention a{};
  a.type = type_of(query);
  a.query = query.const_data_ptr();
  a.query_stride = query.stride(0);
  a.query_head_stride = query.stride(1);
  a.keys = pool_of(key_pool);
  a.values = pool_of(value_pool);
  a.req_to_token = req_to_token.const_data_ptr<int32_t>();
  a.table_stride = req_to_token.stride(0);
  a.heads = query.size(1);
  a.kv_heads = key_pool.size(-2);
  a.head_dim = query.size(2);
  a.value_dim = value_pool.size(-1);
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap);
  a.causal = causal;
  a.window = window;
  Tensor out = at::empty({query.size(0), a.heads, a.value_dim}, query.options());
  if (out.numel() == 0) return out;
  a.out = out.mutable_data_ptr();

  Tensor requests_here = req_rows.contiguous(), lens_here = kv_lens.contiguous(),
         indptr_here = query_indptr.contiguous();
  const int64_t* request = requests_here.const_data_ptr<int64_t>();
  const int64_t* len = lens_here.const_data_ptr<int64_t>();
  const int64_t* indptr = indptr_here.const_data_ptr<int64_t>();
  int64_t batch = req_rows.size(0), pool_rows = std::min(rows_of(key_pool), rows_of(value_pool));
  check_range(request, batch, req_to_token.size(0), "paged_attention", "req_rows");
  check_range(len, batch, req_to_token.size(1) + 1, "paged_attention", "kv_lens");
  check_range(indptr, batch + 1, query.size(0) + 1, "paged_attention", "query_indptr");
  for (int64_t b = 0; b < batch; ++b) {
    int64_t count = indptr[b + 1] - indptr[b];
    TORCH_CHECK_INDEX(0 <= count && count <= len[b], "longspark.paged_attention: request ", b,
                      " has ", count, " query rows, but kv_lens is ", len[b]);
    if (count > 0) {
      check_range(a.req_to_token + request[b] * a.table_stride, len[b], pool_rows,
                  "paged_attention", "req_to_token");
    }
  }
  // Rows that belong to no request (padding) are zero.
  if (indptr[0] > 0) out.narrow(0, 0, indptr[0]).zero_();
  if (indptr[batch] < out.size(0)) {
    out.narrow(0, indptr[batch], out.size(0) - indptr[batch]).zero_();
  }

  std::vector<PagedAttentionUnit> tiles =
      query_tiles(a, request, len, indptr, batch, kernels().attention_chunk_rows);
  int64_t most_rows = 0, most_chunks = 0;
  for (const PagedAttentionUnit& tile : tiles) {
    most_rows = std::max(most_rows, tile.rows);
    most_chunks = std::max(most_chunks, tile.last_chunk - tile.first_chunk);
  }
  int64_t units = static_cast<int64_t>(tiles.size()) * a.kv_heads, threads = at::get_num_threads();
  if (threads == 1 || most_chunks <= 1 || units >= kUnitsPerThread * threads) {
    attend_by_heads(a, tiles, most_rows);
  } else {
    attend_by_chunks(a, tiles, most_rows, query.options());
  }
  return out;
}

// What torch.compile and torch.export need to know.
Tensor shape_of_paged_attention(const Tensor& query, const Tensor&, const Tensor& value_pool,
                                const Tensor&, const Tensor&, const Tensor&, const Tensor&, double,
                                bool, int64_t, double) {
  return at::empty_symint({query.sym_size(0), query.sym_size(1), value_pool.sym_size(-1)},
                          query.options());
}

}  // namespace

// Declared here and not with the other operators: it exists on the CPU only.
TORCH_LIBRARY_FRAGMENT(longspark, m) {
  m.def(
      "paged_attention(Tensor query, Tensor key_pool, Tensor value_pool, Tensor req_to_token,"
      " Tensor req_rows, Tensor kv_lens, Tensor query_indptr, float scale, bool causal, int window,"
      " float softcap) -> Tensor");
}
TORCH_LIBRARY_IMPL(longspark, CPU, m) { m.impl("paged_attention", paged_attention); }
TORCH_LIBRARY_IMPL(longspark, Meta, m) { m.impl("paged_attention", shape_of_paged_attention); }

}  // namespace longspark::cpu
