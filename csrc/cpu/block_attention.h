// Attention of the drafter's block over summary, window and block rows, for one request and KV
// head.
#pragma once

#include "rows.h"
#include "softmax_lanes.h"

namespace longspark::cpu {
namespace LONGSPARK_ISA {

// Up to this many rows the weights stay fp32. Rounded to bf16 they cost half as much and, over more
// rows, less accuracy than rounding the result does; over a few the errors don't average out.
constexpr int64_t kExactRows = 128;

// Lanes: the K queries of each head of the group, padded to whole lane units per head, so that the
// summary, whose rows belong to one query head, is attended to by that head's lanes alone.
template <class T, class Math>
class BlockAttentionKernel {
 public:
  BlockAttentionKernel(const BlockAttention& a, Arena& arena)
      : a_(a),
        group_(a.heads / a.kv_heads),
        head_lanes_(round_up(a.block, kLaneUnit)),
        lanes_(Lanes::take(arena, group_ * head_lanes_, a.head_dim, a.head_dim)),
        rows_(arena, group_ * head_lanes_, a.head_dim, a.head_dim) {
    lane_rows_ = arena.take<T*>(lanes_.stride);
    keys_ = arena.take<const T*>(a.window + kBlockRows);
    values_ = arena.take<const T*>(a.window + kBlockRows);
    stored_ = arena.take<const float*>(kBlockRows);
    lines_ = arena.take<const char*>(kBlockRows * (2 * a.head_dim * sizeof(T) / 64 + 2));
  }

  void run(int64_t request, int64_t kv_head) {
    const int64_t dim = a_.head_dim;
    const float scale = a_.scale * kLog2e;
    const T* query = static_cast<const T*>(a_.query) + request * a_.query_strides[0] +
                     kv_head * group_ * a_.query_strides[2];
    set_lane_rows([&](int64_t k, int64_t j) {
      return const_cast<T*>(query + k * a_.query_strides[1] + j * a_.query_strides[2]);
    });
    pack_rows<typename Rows::Score>(lane_rows_, lanes_.stride, dim, lanes_.stride, lanes_.packed);
    lanes_.clear();

    // The window's rows come from far away; their first block is fetched while the rest is done.
    int64_t window = locate_window(request, kv_head);
    attend_block_rows(request, kv_head, scale);
    for (int64_t j = 0; j < group_; ++j) {
      attend_summary(request, kv_head * group_ + j, j, scale, j == 0 ? lines(0, window) : Fetch{});
    }
    for (int64_t first = 0; first < window; first += kBlockRows) {
      int64_t count = window - first < kBlockRows ? window - first : kBlockRows;
      attend(lanes_, keys_ + first, values_ + first, count, scale,
             lines(first + kBlockRows, window));
    }

    T* out = static_cast<T*>(a_.out) + request * a_.block * a_.heads * dim + kv_head * group_ * dim;
    set_lane_rows([&](int64_t k, int64_t j) { return out + (k * a_.heads + j) * dim; });
    write_rows(lanes_, lane_rows_);
  }

 private:
  using Rows = RowBlock<T, Math>;

  template <class F>
  void set_lane_rows(F&& row) {
    for (int64_t lane = 0; lane < lanes_.stride; ++lane) {
      int64_t k = lane % head_lanes_;
      lane_rows_[lane] = k < a_.block ? row(k, lane / head_lanes_) : nullptr;
    }
  }

  int64_t locate_window(int64_t request, int64_t kv_head) {
    const int32_t* ids = a_.rows + request * a_.rows_stride;
    PoolRows<T> keys(a_.keys), values(a_.values);
    int64_t count = a_.lens[request];
    for (int64_t n = 0; n < count; ++n) {
      keys_[n] = keys(ids[n]) + kv_head * a_.keys.head_stride;
      values_[n] = values(ids[n]) + kv_head * a_.values.head_stride;
    }
    return count;
  }

  // Cache lines of the window's block from row `first` on.
  Fetch lines(int64_t first, int64_t end) {
    LineList list(lines_);
    for (int64_t n = first; n < end && n < first + kBlockRows; ++n) {
      list.add(keys_[n], a_.head_dim);
      list.add(values_[n], a_.head_dim);
    }
    return list.fetch();
  }

  template <class U>
  void attend(const Lanes& lanes, const T* const* keys, const U* const* values, int64_t count,
              float scale, Fetch fetch) {
    rows_.set_keys(keys, count);
    rows_.score(lanes, fetch);
    rows_.set_values(values, count);
    rows_.fold(lanes, scale);
  }

  void attend_block_rows(int64_t request, int64_t kv_head, float scale) {
    const T* key = static_cast<const T*>(a_.block_key) + request * a_.block_key_strides[0] +
                   kv_head * a_.block_key_strides[2];
    const T* value = static_cast<const T*>(a_.block_value) + request * a_.block_value_strides[0] +
                     kv_head * a_.block_value_strides[2];
    // Past the window's pointers, which stay.
    const T **keys = keys_ + a_.window, **values = values_ + a_.window;
    for (int64_t first = 0; first < a_.block; first += kBlockRows) {
      int64_t count = a_.block - first < kBlockRows ? a_.block - first : kBlockRows;
      for (int64_t n = 0; n < count; ++n) {
        keys[n] = key + (first + n) * a_.block_key_strides[1];
        values[n] = value + (first + n) * a_.block_value_strides[1];
      }
      attend(lanes_, keys, values, count, scale, {});
    }
  }

  void attend_summary(int64_t request, int64_t head, int64_t j, float scale, Fetch fetch) {
    const T* key = static_cast<const T*>(a_.summary_key) + head * a_.summary_key_strides[0];
    const float* value = a_.summary_value + a_.slots[request] * a_.summary_value_strides[0] +
                         head * a_.summary_value_strides[1];
    const T** keys = keys_ + a_.window;
    for (int64_t first = 0; first < a_.summary; first += kBlockRows) {
      int64_t count = a_.summary - first < kBlockRows ? a_.summary - first : kBlockRows;
      for (int64_t n = 0; n < count; ++n) {
        keys[n] = key + (first + n) * a_.summary_key_strides[1];
        stored_[n] = value + (first + n) * a_.summary_value_strides[2];
      }
      attend(lanes_.part(j * head_lanes_, head_lanes_), keys, stored_, count, scale, fetch);
      fetch = {};
    }
  }

  const BlockAttention& a_;
  int64_t group_, head_lanes_;
  Lanes lanes_;
  Rows rows_;
  T** lane_rows_;
  const T **keys_, **values_;
  const float** stored_;
  const char** lines_;
};

inline int64_t block_attention_scratch(const BlockAttention& a) {
  return with_type(a.type, [&](auto t) {
    using T = decltype(t);
    Arena exact(nullptr), rounded(nullptr);
    BlockAttentionKernel<T, Fp32Weights<T>> measured_exact(a, exact);
    BlockAttentionKernel<T, NativeWeights<T>> measured_rounded(a, rounded);
    return exact.used() > rounded.used() ? exact.used() : rounded.used();
  });
}

inline void block_attention(const BlockAttention& a, int64_t unit, void* scratch) {
  with_type(a.type, [&](auto t) {
    using T = decltype(t);
    Arena arena(scratch);
    int64_t request = unit / a.kv_heads, kv_head = unit % a.kv_heads;
    if (a.summary + a.lens[request] + a.block <= kExactRows) {
      BlockAttentionKernel<T, Fp32Weights<T>>(a, arena).run(request, kv_head);
    } else {
      BlockAttentionKernel<T, NativeWeights<T>>(a, arena).run(request, kv_head);
    }
  });
}

}  // namespace LONGSPARK_ISA
}  // namespace longspark::cpu
