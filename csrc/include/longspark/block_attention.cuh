// One softmax over [summary | window | block] for the K queries of every request and head.
#pragma once

#include "longspark/flash.cuh"

namespace longspark {

// ---- On the tensor cores
// -------------------------------------------------------------------------
//
// A tile is 16 query rows that share a KV head: two query heads of up to 8 slots, or one of up
// to 16. So every half of a tile (rows g, rows g + 8) belongs to one query head, whose summary it
// alone sees. The keys are taken 16 at a time: the summaries of the tile's heads, the window, the
// block. Those steps are dealt out to the block's warps and the parts put together at the end.

// Which query rows a tile holds.
struct BlockTile {
  int head[2];  // query head of rows 0..7 and 8..15; -1: no such head
  int slot[2];  // block slot of this lane's rows g and g + 8; -1: no such query
};

__device__ __forceinline__ BlockTile block_tile(const BlockAttention& p, int kv_head, int tile) {
  int group = p.heads / p.kv_heads;
  int g = lane_id() / 4;
  BlockTile at;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    bool two_heads = p.block <= 8;
    int in_group = two_heads ? 2 * tile + half : tile;
    int slot = two_heads ? g : g + 8 * half;
    at.head[half] = in_group < group ? kv_head * group + in_group : -1;
    at.slot[half] = at.head[half] >= 0 && slot < p.block ? slot : -1;
  }
  return at;
}

// Takes summary slots first .. first + 15 of one query head into the state; only the halves of the
// tile that belong to this head see them.
template <class T, int kDim>
__device__ __forceinline__ void block_summary_step(const BlockAttention& p, FlashState<kDim>& state,
                                                   const FlashQuery<T, kDim>& query,
                                                   const BlockTile& tile, int head, int state_row,
                                                   int first) {
  const T* keys = static_cast<const T*>(p.summary_key) + head * p.summary_key_head_stride;
  const float* values = p.summary_value + state_row * p.summary_value_state_stride +
                        head * p.summary_value_head_stride;
  const T* key[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    int slot = first + lane_id() / 4 + 8 * n;
    key[n] = slot < p.slots ? keys + slot * kDim : nullptr;
  }
  float score[2][4];
  flash_scores<T, kDim>(query, key, score);
  bool sees[2][4];
#pragma unroll
  for (int column = 0; column < 4; ++column) {
    bool exists = first + flash_column(column) < p.slots;
    sees[0][column] = exists && tile.head[0] == head;
    sees[1][column] = exists && tile.head[1] == head;
  }
  flash_accumulate<T, kDim, 2>(state, score, sees, p.scale * kLog2e, [&](int column, int dim) {
    int slot = first + flash_column(column);
    Words words = {};
    if (slot < p.slots) {
      const auto* from = reinterpret_cast<const Vec<float, 4>*>(values + slot * kDim + dim);
      Vec<float, 4> left = load(from), right = load(from + 1);
      words = {{pack<T>(left.at[0], left.at[1]), pack<T>(left.at[2], left.at[3]),
                pack<T>(right.at[0], right.at[1]), pack<T>(right.at[2], right.at[3])}};
    }
    return words;
  });
}

// Pointers to the block's own key and value rows of request b.
template <class T>
__device__ __forceinline__ FlashRows<T> block_own_rows(const BlockAttention& p, int b,
                                                       int kv_head) {
  const T* keys =
      static_cast<const T*>(p.block_key) + b * p.key_batch_stride + kv_head * p.key_head_stride;
  const T* values = static_cast<const T*>(p.block_value) + b * p.value_batch_stride +
                    kv_head * p.value_head_stride;
  FlashRows<T> at;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    int slot = lane_id() / 4 + 8 * n;
    at.key[n] = slot < p.block ? keys + slot * p.key_slot_stride : nullptr;
  }
#pragma unroll
  for (int column = 0; column < 4; ++column) {
    int slot = flash_column(column);
    at.value[column] = slot < p.block ? values + slot * p.value_slot_stride : nullptr;
  }
  return at;
}

template <class T, int kDim>
__device__ __forceinline__ void block_store(const BlockAttention& p, const FlashState<kDim>& state,
                                            const BlockTile& tile, int b) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float inverse = 1.0f / flash_row_total(state.total[half]);
    if (tile.slot[half] < 0) continue;
    int64_t row = (static_cast<int64_t>(b) * p.block + tile.slot[half]) * p.heads + tile.head[half];
    T* out = static_cast<T*>(p.out) + row * kDim + 16 * (lane_id() % 4);
#pragma unroll
    for (int e = 0; e < kDim / 64; ++e) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        Words words;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words.at[j] = pack<T>(state.out[8 * e + 2 * j][2 * half + side] * inverse,
                                state.out[8 * e + 2 * j + 1][2 * half + side] * inverse);
        }
        store(reinterpret_cast<Words*>(out + 64 * e + 8 * side), words);
      }
    }
  }
}

// blockIdx: group of tiles, KV head, request.
template <class T, int kDim>
__global__ void __launch_bounds__(32 * kFlashWarps)
    block_attention_kernel(BlockAttention p, int tiles_per_block) {
  LONGSPARK_DYNAMIC_SHARED(shared);
  int b = blockIdx.z, kv_head = blockIdx.y;
  int tile_in_block = warp_id() % tiles_per_block;
  int slice = warp_id() / tiles_per_block, slices = kFlashWarps / tiles_per_block;
  BlockTile tile = block_tile(p, kv_head, blockIdx.x * tiles_per_block + tile_in_block);

  const T* query_row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    query_row[half] = tile.slot[half] < 0
                          ? nullptr
                          : static_cast<const T*>(p.query) + b * p.query_batch_stride +
                                tile.slot[half] * p.query_slot_stride +
                                tile.head[half] * p.query_head_stride;
  }
  FlashQuery<T, kDim> query = flash_query<T, kDim>(query_row[0], query_row[1]);
  FlashState<kDim> state;
  flash_clear(state);

  int used = load(p.lens + b);
  const int32_t* rows = p.rows + b * p.rows_stride;
  int state_row = static_cast<int>(load(p.state_rows + b));
  float scale = p.scale * kLog2e;

  // Steps: the first head's summary, the second head's (if the tile has one), the window, the
  // block.
  int per_summary = ceil_div(p.slots, kFlashRows);
  int heads_here =
      tile.head[0] < 0 ? 0 : (tile.head[1] == tile.head[0] || tile.head[1] < 0 ? 1 : 2);
  int summary_end = heads_here * per_summary;
  int window_end = summary_end + ceil_div(used, kFlashRows);
  int end = heads_here == 0 ? 0 : window_end + 1;
  // The row ids of a step are fetched one step ahead: they are addresses of everything else.
  auto row_of_step = [&](int step) {
    int column = (step - summary_end) * kFlashRows + lane_id();
    bool is_row = step >= summary_end && lane_id() < kFlashRows && column < used;
    return is_row ? load(rows + column) : -1;
  };
  int row = row_of_step(slice);
  for (int step = slice; step < end; step += slices) {
    int next_row = row_of_step(step + slices);
    if (step < summary_end) {
      bool is_second = step >= per_summary;
      block_summary_step<T, kDim>(p, state, query, tile, is_second ? tile.head[1] : tile.head[0],
                                  state_row, (step - is_second * per_summary) * kFlashRows);
    } else if (step < window_end) {
      FlashRows<T> at = flash_pool_rows<T>(p.key_pool, p.value_pool, p.layout, kv_head, row);
      flash_step<T, kDim, 2>(state, query, at, scale);
    } else {
      flash_step<T, kDim, 2>(state, query, block_own_rows<T>(p, b, kv_head), scale);
    }
    row = next_row;
  }
  flash_combine<kDim>(state, reinterpret_cast<FlashExchange<kDim>*>(shared), tile_in_block, slice,
                      slices);
  if (slice == 0) block_store<T, kDim>(p, state, tile, b);
}

// ---- For any dtype, head dimension, block size and alignment
// --------------------------------------

constexpr int kPlainThreads = 128;
constexpr int kPlainRows = 64;  // keys per round

// Dynamic shared memory of the plain kernel, in floats.
struct PlainBlockLayout {
  int weights, out, top, total, shrink, size;
  __host__ __device__ PlainBlockLayout(int block, int dim) {
    weights = 0;                         // [block, kPlainRows]
    out = weights + block * kPlainRows;  // [block, dim]
    top = out + block * dim;             // [block]
    total = top + block;
    shrink = total + block;
    size = shrink + block;
  }
};

// Key or value row `i` of [summary | window | block] for one request and head.
template <class T>
struct PlainRow {
  const T* key;
  const T* value;
  const float* summary_value;  // instead of value
};

template <class T>
__device__ __forceinline__ PlainRow<T> plain_row(const BlockAttention& p, int b, int head, int used,
                                                 int i) {
  int kv_head = head / (p.heads / p.kv_heads);
  if (i < p.slots) {
    return {static_cast<const T*>(p.summary_key) + head * p.summary_key_head_stride + i * p.dim,
            nullptr,
            p.summary_value + load(p.state_rows + b) * p.summary_value_state_stride +
                head * p.summary_value_head_stride + i * p.dim};
  }
  i -= p.slots;
  if (i < used) {
    int64_t offset = row_offset(p.layout, load(p.rows + b * p.rows_stride + i), kv_head);
    return {static_cast<const T*>(p.key_pool) + offset,
            static_cast<const T*>(p.value_pool) + offset, nullptr};
  }
  i -= used;
  return {static_cast<const T*>(p.block_key) + b * p.key_batch_stride + i * p.key_slot_stride +
              kv_head * p.key_head_stride,
          static_cast<const T*>(p.block_value) + b * p.value_batch_stride +
              i * p.value_slot_stride + kv_head * p.value_head_stride,
          nullptr};
}

// blockIdx: query head, request.
template <class T>
__global__ void __launch_bounds__(kPlainThreads) block_attention_plain_kernel(BlockAttention p) {
  LONGSPARK_DYNAMIC_SHARED(bytes);
  float* shared = reinterpret_cast<float*>(bytes);
  PlainBlockLayout at(p.block, p.dim);
  int head = blockIdx.x, b = blockIdx.y;
  int used = load(p.lens + b);
  int count = p.slots + used + p.block;
  for (int i = threadIdx.x; i < p.block * p.dim; i += kPlainThreads)
    store(shared + at.out + i, 0.0f);
  for (int slot = threadIdx.x; slot < p.block; slot += kPlainThreads) {
    store(shared + at.top + slot, minus_infinity());
    store(shared + at.total + slot, 0.0f);
  }
  for (int first = 0; first < count; first += kPlainRows) {
    int rows = count - first < kPlainRows ? count - first : kPlainRows;
    for (int i = threadIdx.x; i < p.block * rows; i += kPlainThreads) {
      int slot = i / rows, column = i % rows;
      const T* key = plain_row<T>(p, b, head, used, first + column).key;
      const T* query = static_cast<const T*>(p.query) + b * p.query_batch_stride +
                       slot * p.query_slot_stride + head * p.query_head_stride;
      float score = 0.0f;
      for (int k = 0; k < p.dim; ++k) score += to_float(load(query + k)) * to_float(load(key + k));
      store(shared + at.weights + slot * kPlainRows + column, score * p.scale);
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < p.block; slot += kPlainThreads) {
      float* weights = shared + at.weights + slot * kPlainRows;
      float old_top = load(shared + at.top + slot), top = old_top;
      for (int i = 0; i < rows; ++i) top = fmaxf(top, load(weights + i));
      float shrink = expf(old_top - top), total = load(shared + at.total + slot) * shrink;
      for (int i = 0; i < rows; ++i) {
        float weight = expf(load(weights + i) - top);
        store(weights + i, weight);
        total += weight;
      }
      store(shared + at.top + slot, top);
      store(shared + at.total + slot, total);
      store(shared + at.shrink + slot, shrink);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.block * p.dim; i += kPlainThreads) {
      int slot = i / p.dim, k = i % p.dim;
      float out = load(shared + at.out + i) * load(shared + at.shrink + slot);
      for (int column = 0; column < rows; ++column) {
        PlainRow<T> row = plain_row<T>(p, b, head, used, first + column);
        float value =
            row.value ? to_float(load(row.value + k)) : rounded<T>(load(row.summary_value + k));
        out += load(shared + at.weights + slot * kPlainRows + column) * value;
      }
      store(shared + at.out + i, out);
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < p.block * p.dim; i += kPlainThreads) {
    int slot = i / p.dim, k = i % p.dim;
    int64_t row = (static_cast<int64_t>(b) * p.block + slot) * p.heads + head;
    float out = load(shared + at.out + i) / load(shared + at.total + slot);
    store(static_cast<T*>(p.out) + row * p.dim + k, from_float<T>(out));
  }
}

}  // namespace longspark
