// Online softmax of 16 query rows over rows of keys and values, by one warp on the tensor cores.
//
// Keys and values go from global memory straight to registers, every load 16 contiguous bytes. What
// the tensor cores want is arranged by choosing which dimension is called which:
//  - scores: the dimensions of a dot product may be taken in any order, so lane t of a row's four
//  lanes
//    takes dimensions 32i + 8t .. +7 of keys and queries alike;
//  - outputs: columns may be computed in any order, so column g of the j-th 8-column piece is
//  dimension
//    64e + 8g + j, and a lane's eight loaded values of one row feed eight pieces.
// Here g = lane / 4 and t = lane % 4, as in tensor_core.cuh. Of the 16 query rows a lane holds rows
// g
// ("low") and g + 8 ("high"); of the 16 keys of a step the columns 2t, 2t+1, 2t+8, 2t+9.
//
// Probabilities are split into 16-bit parts, each taking the bits that the one before left: two
// parts are good to 2^-17, ample for a 16-bit result; three have all of fp32's bits, for the
// summary state. Values are 16-bit to begin with.
#pragma once

#include "longspark/pool.cuh"
#include "longspark/tensor_core.cuh"
#include "longspark/warp.cuh"

namespace longspark {

constexpr int kFlashRows = 16;  // queries of a tile, and keys of a step
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class T, int kDim>
struct FlashQuery {
  Words low[kDim / 32], high[kDim / 32];  // rows g and g + 8; zero where there is no such row
};

template <class T, int kDim>
__device__ __forceinline__ FlashQuery<T, kDim> flash_query(const T* low, const T* high) {
  FlashQuery<T, kDim> query;
  int t = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    query.low[i] = query.high[i] = Words{};
    if (low != nullptr) query.low[i] = load(reinterpret_cast<const Words*>(low + 32 * i + 8 * t));
    if (high != nullptr)
      query.high[i] = load(reinterpret_cast<const Words*>(high + 32 * i + 8 * t));
  }
  return query;
}

// Softmax so far. `top` is the largest score in units of log2; `total` this lane's part of the sum
// of 2^(score - top); `out` the weighted values, not yet divided by the sum.
template <int kDim>
struct FlashState {
  float top[2], total[2];  // rows g and g + 8
  float out[kDim / 8][4];
};

template <int kDim>
__device__ __forceinline__ void flash_clear(FlashState<kDim>& state) {
  state.top[0] = state.top[1] = minus_infinity();
  state.total[0] = state.total[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) state.out[i][j] = 0.0f;
  }
}

// Scores of 16 keys: score[i][..] are the multiply_add results for keys 8i .. 8i+7. key[0] and
// key[1] are this lane's rows g and g + 8 of the step; null is a row of zeros.
template <class T, int kDim>
__device__ __forceinline__ void flash_scores(const FlashQuery<T, kDim>& query,
                                             const T* const (&key)[2], float (&score)[2][4]) {
  int t = lane_id() % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) score[n][j] = 0.0f;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      Words row = {};
      if (key[n] != nullptr) row = load(reinterpret_cast<const Words*>(key[n] + 32 * i + 8 * t));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4] = {query.low[i].at[2 * half], query.high[i].at[2 * half],
                         query.low[i].at[2 * half + 1], query.high[i].at[2 * half + 1]};
        uint32_t b[2] = {row.at[2 * half], row.at[2 * half + 1]};
        multiply_add(T{}, score[n], a, b);
      }
    }
  }
}

// Takes 16 keys into the state. `sees[row][column]` says whether query row g (0) or g + 8 (1) sees
// this lane's column 2t, 2t+1, 2t+8, 2t+9. `value(column, dim)` loads eight elements of that
// column's value row from dimension `dim` on, zeros if nobody sees it. `scale` includes log2(e).
template <class T, int kDim, int kParts, class Value>
__device__ __forceinline__ void flash_accumulate(FlashState<kDim>& state, float (&score)[2][4],
                                                 const bool (&sees)[2][4], float scale,
                                                 Value value) {
  uint32_t part[kParts][4];  // the probabilities, split
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float weight[4];
    float top = state.top[row];
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      float scaled = score[column / 2][2 * row + column % 2] * scale;
      weight[column] = sees[row][column] ? scaled : minus_infinity();
      top = fmaxf(top, weight[column]);
    }
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
    float base = top == minus_infinity() ? 0.0f : top;  // -inf - -inf: nothing seen yet
    float shrink = exp2f(state.top[row] - base);
    state.top[row] = top;
    state.total[row] *= shrink;
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      weight[column] = exp2f(weight[column] - base);
      state.total[row] += weight[column];
    }
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      part[n][row] = pack<T>(weight[0], weight[1]);
      part[n][2 + row] = pack<T>(weight[2], weight[3]);
#pragma unroll
      for (int column = 0; column < 4; ++column) weight[column] -= rounded<T>(weight[column]);
    }
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      state.out[i][2 * row] *= shrink;
      state.out[i][2 * row + 1] *= shrink;
    }
  }
  int g = lane_id() / 4;
#pragma unroll
  for (int e = 0; e < kDim / 64; ++e) {
    Words v[4];
#pragma unroll
    for (int column = 0; column < 4; ++column) v[column] = value(column, 64 * e + 8 * g);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      // Element j of two neighbouring rows, side by side in a register.
      unsigned pick = j % 2 ? 0x7632 : 0x5410;
      uint32_t b[2] = {__byte_perm(v[0].at[j / 2], v[1].at[j / 2], pick),
                       __byte_perm(v[2].at[j / 2], v[3].at[j / 2], pick)};
#pragma unroll
      for (int n = 0; n < kParts; ++n) multiply_add(T{}, state.out[8 * e + j], part[n], b);
    }
  }
}

// Pointers of a lane for 16 pool rows: keys of rows g and g + 8, values of the lane's four columns.
// `row` is, in lane i < 16, the id of row i of the step, below 0 for none.
template <class T>
struct FlashRows {
  const T* key[2];
  const T* value[4];
};

template <class T>
__device__ __forceinline__ FlashRows<T> flash_pool_rows(const void* keys, const void* values,
                                                        const PoolLayout& layout, int head,
                                                        int row) {
  int g = lane_id() / 4, t = lane_id() % 4;
  FlashRows<T> at;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    int id = __shfl_sync(kAllLanes, row, g + 8 * n);
    at.key[n] = id < 0 ? nullptr : static_cast<const T*>(keys) + row_offset(layout, id, head);
  }
#pragma unroll
  for (int column = 0; column < 4; ++column) {
    int id = __shfl_sync(kAllLanes, row, 2 * t + column % 2 + 8 * (column / 2));
    at.value[column] =
        id < 0 ? nullptr : static_cast<const T*>(values) + row_offset(layout, id, head);
  }
  return at;
}

// The lane's column number within a step's 16 keys.
__device__ __forceinline__ int flash_column(int column) {
  return 2 * (lane_id() % 4) + column % 2 + 8 * (column / 2);
}

template <class T>
__device__ __forceinline__ Words flash_value(const T* row, int dim) {
  Words words = {};
  if (row != nullptr) words = load(reinterpret_cast<const Words*>(row + dim));
  return words;
}

// Takes 16 pool rows into the state of a tile; all query rows see them.
template <class T, int kDim, int kParts>
__device__ __forceinline__ void flash_step(FlashState<kDim>& state,
                                           const FlashQuery<T, kDim>& query, const FlashRows<T>& at,
                                           float scale) {
  float score[2][4];
  flash_scores<T, kDim>(query, at.key, score);
  bool sees[2][4];
#pragma unroll
  for (int column = 0; column < 4; ++column) {
    sees[0][column] = sees[1][column] = at.value[column] != nullptr;
  }
  flash_accumulate<T, kDim, kParts>(state, score, sees, scale, [&](int column, int dim) {
    return flash_value(at.value[column], dim);
  });
}

// Shared memory in which the warps of a block put the states of one tile together: one slot per
// tile. Only equal lanes exchange, so the order of elements is the lanes' and free of bank
// conflicts.
template <int kDim>
struct FlashExchange {
  Vec<float, 4> out[kDim / 8][32];
  Vec<float, 4> sums[32];  // top low, top high, total low, total high
};

// Warps warp_id() = tile + tiles * slice hold parts of the same rows' softmax; afterwards the warps
// of slice 0 hold the whole. All threads of the block call this.
template <int kDim>
__device__ __forceinline__ void flash_combine(FlashState<kDim>& state,
                                              FlashExchange<kDim>* exchange, int tile, int slice,
                                              int slices) {
  FlashExchange<kDim>& mine = exchange[tile];
  for (int from = 1; from < slices; ++from) {
    if (slice == from) {
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        store(&mine.out[i][lane_id()],
              Vec<float, 4>{{state.out[i][0], state.out[i][1], state.out[i][2], state.out[i][3]}});
      }
      store(&mine.sums[lane_id()],
            Vec<float, 4>{{state.top[0], state.top[1], state.total[0], state.total[1]}});
    }
    __syncthreads();
    if (slice == 0) {
      Vec<float, 4> sums = load(&mine.sums[lane_id()]);
      float keep[2], take[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float top = fmaxf(state.top[row], sums.at[row]);
        float base = top == minus_infinity() ? 0.0f : top;
        keep[row] = exp2f(state.top[row] - base);
        take[row] = exp2f(sums.at[row] - base);
        state.top[row] = top;
        state.total[row] = state.total[row] * keep[row] + sums.at[2 + row] * take[row];
      }
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        Vec<float, 4> other = load(&mine.out[i][lane_id()]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          state.out[i][j] = state.out[i][j] * keep[j / 2] + other.at[j] * take[j / 2];
        }
      }
    }
    __syncthreads();
  }
}

// Sum over the four lanes of a row.
__device__ __forceinline__ float flash_row_total(float total) {
  total += __shfl_xor_sync(kAllLanes, total, 1);
  return total + __shfl_xor_sync(kAllLanes, total, 2);
}

// A block's warps are tiles x slices; at most this many tiles, so that slices are left.
constexpr int kFlashWarps = 8;

}  // namespace longspark
