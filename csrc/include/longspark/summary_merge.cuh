// Merging rows into the summary state: scores of the learned queries, log-normaliser, values.
//
// The state of one (request, layer, head) is [slots, dim] values and [slots] natural-log
// normalisers. Both are read and written in place, so one block owns a state from the read to the
// write.
#pragma once

#include "longspark/flash.cuh"

namespace longspark {

constexpr int kMergeThreads = 128;
constexpr int kMergeRows = 8;  // rows per round; a commit after a verification is one round

struct SummaryState {
  float* value;
  float* lse;
};

__device__ __forceinline__ SummaryState summary_state(const Summary& p, int b, int layer,
                                                      int head) {
  int64_t state = load(p.state_rows + b);
  return {p.state_value + state * p.value_state_stride + layer * p.value_layer_stride +
              head * p.value_head_stride,
          p.state_lse + state * p.lse_state_stride + layer * p.lse_layer_stride +
              head * p.lse_head_stride};
}

// The partial state of a segment lies as [segments, layers, heads, slots(, dim)].
__device__ __forceinline__ SummaryState partial_state(const SummaryMergeBulk& p, int segment,
                                                      int layer, int head) {
  const Summary& s = p.summary;
  int64_t index = ((static_cast<int64_t>(segment) * s.layers + layer) * s.heads + head) * s.slots;
  return {p.partial_value + index * s.dim, p.partial_lse + index};
}

// ---- Plain: any dtype, head dimension and number of slots
// ------------------------------------------

// Dynamic shared memory, in floats. Key rows are padded so that a warp's eight rows lie in
// different banks; `pitch` keeps them aligned to four elements.
struct MergeLayout {
  int pitch, keys, values, weights, keep, size;
  __host__ __device__ MergeLayout(int slots, int dim) {
    pitch = (dim + 3) / 4 * 4 + 4;
    keys = 0;
    values = keys + kMergeRows * pitch;
    weights = values + kMergeRows * pitch;  // [slots, kMergeRows]
    keep = weights + slots * kMergeRows;    // [slots], factor of the old value
    size = keep + slots;
  }
};

// Merges rows[0 .. count) into the state of one head. `is_fresh`: the state holds nothing yet, not
// even zeros. All threads of the block call this; count is above 0.
template <class T>
__device__ __forceinline__ void merge_rows(const Summary& p, int layer, int head,
                                           const int32_t* rows, int count, SummaryState state,
                                           bool is_fresh, float* shared) {
  MergeLayout at(p.slots, p.dim);
  int kv_head = head / (p.heads / p.kv_heads);
  const T* queries = static_cast<const T*>(p.queries) +
                     (static_cast<int64_t>(layer) * p.heads + head) * p.slots * p.dim;
  const T* keys = static_cast<const T*>(p.pools.keys[layer]);
  const T* values = static_cast<const T*>(p.pools.values[layer]);
  int quads = ceil_div(p.dim, 4);

  for (int first = 0; first < count; first += kMergeRows) {
    int round = count - first < kMergeRows ? count - first : kMergeRows;
    __syncthreads();  // the round before has read its rows
    for (int i = threadIdx.x; i < round * quads; i += kMergeThreads) {
      int row = i / quads, k = i % quads * 4;
      int64_t from = row_offset(p.pools.layout, load(rows + first + row), kv_head) + k;
      float key[4] = {}, value[4] = {};
      if (k + 4 <= p.dim) {
        load_floats<4>(keys + from, p.vector_rows, key);
        load_floats<4>(values + from, p.vector_rows, value);
      } else {
        for (int j = 0; j < p.dim - k; ++j) {
          key[j] = to_float(load(keys + from + j));
          value[j] = to_float(load(values + from + j));
        }
      }
      store(reinterpret_cast<Vec<float, 4>*>(shared + at.keys + row * at.pitch + k),
            Vec<float, 4>{{key[0], key[1], key[2], key[3]}});
      store(reinterpret_cast<Vec<float, 4>*>(shared + at.values + row * at.pitch + k),
            Vec<float, 4>{{value[0], value[1], value[2], value[3]}});
    }
    __syncthreads();

    // Scores: one thread per (slot, row). The padding of a key row is zero, that of a query is
    // skipped.
    for (int i = threadIdx.x; i < p.slots * round; i += kMergeThreads) {
      int slot = i / round, row = i % round;
      const float* key = shared + at.keys + row * at.pitch;
      const T* query = queries + slot * p.dim;
      float score = 0.0f;
      for (int k = 0; k < p.dim; k += 4) {
        auto four = load(reinterpret_cast<const Vec<float, 4>*>(key + k));
        float q[4] = {};
        if (k + 4 <= p.dim) {
          load_floats<4>(query + k, p.vector_rows, q);
        } else {
          for (int j = 0; j < p.dim - k; ++j) q[j] = to_float(load(query + k + j));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) score += four.at[j] * q[j];
      }
      store(shared + at.weights + slot * kMergeRows + row, score * p.scale);
    }
    __syncthreads();

    bool is_empty = is_fresh && first == 0;
    for (int slot = threadIdx.x; slot < p.slots; slot += kMergeThreads) {
      float* weights = shared + at.weights + slot * kMergeRows;
      float old_lse = is_empty ? minus_infinity() : load(state.lse + slot);
      float top = old_lse;
      for (int row = 0; row < round; ++row) top = fmaxf(top, load(weights + row));
      float base = top == minus_infinity() ? 0.0f : top;
      float total = expf(old_lse - base);
      for (int row = 0; row < round; ++row) total += expf(load(weights + row) - base);
      float lse = base + logf(total);
      store(state.lse + slot, lse);
      float off = lse == minus_infinity() ? 0.0f : lse;
      store(shared + at.keep + slot, expf(old_lse - off));
      for (int row = 0; row < round; ++row) {
        store(weights + row, expf(load(weights + row) - off));
      }
    }
    __syncthreads();

    // Values: one thread per (slot, four dimensions), always the same one.
    for (int i = threadIdx.x; i < p.slots * quads; i += kMergeThreads) {
      int slot = i / quads, k = i % quads * 4;
      float* out = state.value + slot * p.dim + k;
      bool whole = k + 4 <= p.dim;
      int width = whole ? 4 : p.dim - k;
      bool is_vector = whole && p.dim % 4 == 0;
      float sum[4] = {};
      if (!is_empty) {
        if (is_vector) {
          load_floats<4>(out, true, sum);
        } else {
          for (int j = 0; j < width; ++j) sum[j] = load(out + j);
        }
        float keep = load(shared + at.keep + slot);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] *= keep;
      }
      for (int row = 0; row < round; ++row) {
        float weight = load(shared + at.weights + slot * kMergeRows + row);
        auto four =
            load(reinterpret_cast<const Vec<float, 4>*>(shared + at.values + row * at.pitch + k));
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += weight * four.at[j];
      }
      if (is_vector) {
        store(reinterpret_cast<Vec<float, 4>*>(out),
              Vec<float, 4>{{sum[0], sum[1], sum[2], sum[3]}});
      } else {
        for (int j = 0; j < width; ++j) store(out + j, sum[j]);
      }
    }
  }
}

// blockIdx: head, layer, request.
template <class T>
__global__ void __launch_bounds__(kMergeThreads) summary_merge_kernel(SummaryMerge p) {
  LONGSPARK_DYNAMIC_SHARED(shared);
  int head = blockIdx.x, layer = blockIdx.y, b = blockIdx.z;
  int count = load(p.counts + b);
  if (count <= 0) return;
  merge_rows<T>(p.summary, layer, head, p.rows + b * p.rows_stride, count,
                summary_state(p.summary, b, layer, head), false, reinterpret_cast<float*>(shared));
}

// ---- Bulk: partial states of segments, then their exact merge
// --------------------------------------

__device__ __forceinline__ int first_row_of(const SummaryMergeBulk& p, int b) {
  return p.indptr != nullptr ? load(p.indptr + b) : static_cast<int>(load(p.indptr_wide + b));
}

// The request and rows of a segment; count 0 for numbers that no segment has.
struct Segment {
  int request, first, count;
};

__device__ __forceinline__ Segment segment_of(const SummaryMergeBulk& p, int number) {
  // The last request whose first segment isn't after `number`.
  int low = 0, high = p.summary.batch - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (first_row_of(p, middle) / p.chunk_rows + middle <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  int begin = first_row_of(p, low), end = first_row_of(p, low + 1);
  int chunk_begin = (number - low) * p.chunk_rows;
  if (chunk_begin > begin) begin = chunk_begin;
  if (chunk_begin + p.chunk_rows < end) end = chunk_begin + p.chunk_rows;
  return {low, begin, begin < end ? end - begin : 0};
}

// blockIdx: segment, head, layer.
template <class T>
__global__ void __launch_bounds__(kMergeThreads) summary_bulk_plain_kernel(SummaryMergeBulk p) {
  LONGSPARK_DYNAMIC_SHARED(shared);
  Segment segment = segment_of(p, blockIdx.x);
  if (segment.count == 0) return;
  int head = blockIdx.y, layer = blockIdx.z;
  merge_rows<T>(p.summary, layer, head, p.rows + segment.first, segment.count,
                partial_state(p, blockIdx.x, layer, head), true, reinterpret_cast<float*>(shared));
}

// The same on the tensor cores. A tile is 16 of the (head, slot) pairs that share a KV head.
// blockIdx: segment, group of tiles, layer and KV head.
template <class T, int kDim>
__global__ void __launch_bounds__(32 * kFlashWarps)
    summary_bulk_kernel(SummaryMergeBulk p, int tiles_per_block) {
  LONGSPARK_DYNAMIC_SHARED(shared);
  Segment segment = segment_of(p, blockIdx.x);
  if (segment.count == 0) return;
  const Summary& s = p.summary;
  int layer = blockIdx.z / s.kv_heads, kv_head = blockIdx.z % s.kv_heads;
  int group = s.heads / s.kv_heads, pairs = group * s.slots;
  int tile_in_block = warp_id() % tiles_per_block;
  int slice = warp_id() / tiles_per_block, slices = kFlashWarps / tiles_per_block;
  int pair = (blockIdx.y * tiles_per_block + tile_in_block) * kFlashRows + lane_id() / 4;

  const T* queries = static_cast<const T*>(s.queries) +
                     (static_cast<int64_t>(layer) * s.heads + kv_head * group) * s.slots * kDim;
  FlashQuery<T, kDim> query =
      flash_query<T, kDim>(pair < pairs ? queries + pair * kDim : nullptr,
                           pair + 8 < pairs ? queries + (pair + 8) * kDim : nullptr);
  FlashState<kDim> state;
  flash_clear(state);
  const int32_t* rows = p.rows + segment.first;
  auto row_of_step = [&](int step) {
    int i = step * kFlashRows + lane_id();
    return lane_id() < kFlashRows && i < segment.count ? load(rows + i) : -1;
  };
  int steps = ceil_div(segment.count, kFlashRows);
  int row = row_of_step(slice);
  for (int step = slice; step < steps; step += slices) {
    int next_row = row_of_step(step + slices);
    FlashRows<T> at = flash_pool_rows<T>(s.pools.keys[layer], s.pools.values[layer], s.pools.layout,
                                         kv_head, row);
    flash_step<T, kDim, 3>(state, query, at, s.scale * kLog2e);
    row = next_row;
  }
  flash_combine<kDim>(state, reinterpret_cast<FlashExchange<kDim>*>(shared), tile_in_block, slice,
                      slices);
  if (slice > 0) return;
  SummaryState out = partial_state(p, blockIdx.x, layer, kv_head * group);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = flash_row_total(state.total[half]);
    int index = pair + 8 * half;
    if (index >= pairs) continue;
    if (lane_id() % 4 == 0) store(out.lse + index, state.top[half] * kLn2 + logf(total));
    float* value = out.value + static_cast<int64_t>(index) * kDim + 16 * (lane_id() % 4);
    float inverse = 1.0f / total;
#pragma unroll
    for (int e = 0; e < kDim / 64; ++e) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
#pragma unroll
        for (int four = 0; four < 2; ++four) {
          Vec<float, 4> v;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            v.at[j] = state.out[8 * e + 4 * four + j][2 * half + side] * inverse;
          }
          store(reinterpret_cast<Vec<float, 4>*>(value + 64 * e + 8 * side + 4 * four), v);
        }
      }
    }
  }
}

// Merges a request's segments into its state. blockIdx: head, layer, request.
__global__ void __launch_bounds__(kMergeThreads) summary_combine_kernel(SummaryMergeBulk p) {
  const Summary& s = p.summary;
  int head = blockIdx.x, layer = blockIdx.y, b = blockIdx.z;
  int begin = first_row_of(p, b), end = first_row_of(p, b + 1);
  if (begin == end) return;
  int first = begin / p.chunk_rows + b, last = (end - 1) / p.chunk_rows + b;
  SummaryState state = summary_state(s, b, layer, head);
  int64_t step = static_cast<int64_t>(s.layers) * s.heads * s.slots;  // from segment to segment
  SummaryState partial = partial_state(p, first, layer, head);

  for (int from = 0; from < s.slots * s.dim; from += kMergeThreads) {
    int i = from + threadIdx.x;
    int slot = i / s.dim;
    bool exists = slot < s.slots;
    float old_lse = 0.0f, lse = 0.0f;
    if (exists) {
      old_lse = load(state.lse + slot);
      Lse all = {old_lse, old_lse == minus_infinity() ? 0.0f : 1.0f};
      for (int n = 0; n <= last - first; ++n) {
        all = lse_merge(all, {load(partial.lse + n * step + slot), 1.0f});
      }
      lse = all.top + logf(all.total);
      float off = lse == minus_infinity() ? 0.0f : lse;
      float sum = load(state.value + i) * expf(old_lse - off);
      for (int n = 0; n <= last - first; ++n) {
        float weight = expf(load(partial.lse + n * step + slot) - off);
        sum += weight * load(partial.value + n * step * s.dim + i);
      }
      store(state.value + i, sum);
    }
    // Threads of one slot all need the old normaliser; the one that has the slot's last dimension
    // replaces it once nobody reads it any more.
    __syncthreads();
    if (exists && i % s.dim == s.dim - 1) store(state.lse + slot, lse);
    __syncthreads();
  }
}

}  // namespace longspark
