// Merging rows into the summary state of one request, tapped layer and KV head.
//
// A few rows (a commit): reading and writing the state is the cost, so each state row is read,
// scaled, added to and written once. Many rows (a prefill chunk): the learned queries are lanes
// that attend to the rows as in attention, and the result is merged at the end. All in fp32 except
// the products of bf16 queries and keys, which are exact in fp32.
#pragma once

#include "rows.h"
#include "softmax_lanes.h"

namespace longspark::cpu {
namespace LONGSPARK_ISA {

constexpr float kLn2 = 0.69314718f;
constexpr int64_t kFewRows = 8;       // rows merged in one pass over the state
constexpr int64_t kMostFewRows = 24;  // more take the other way

// Merging (old_lse, part_lse) and what it makes of the values: new = keep * old + take * part.
struct Blend {
  Floats<8> lse, keep, take;
};

inline Blend blend(Floats<8> old_lse, Floats<8> part_lse) {
  Floats<8> top = maximum(old_lse, part_lse);
  Floats<8> safe_top = top > kNegativeInfinity ? top : Floats<8>{};
  Floats<8> keep = exp2<8>((old_lse - safe_top) * kLog2e);
  Floats<8> take = exp2<8>((part_lse - safe_top) * kLog2e);
  Floats<8> total = keep + take;
  Floats<8> inverse = total > 0.0f ? 1.0f / total : Floats<8>{};
  return {total > 0.0f ? safe_top + log<8>(total) : top, keep * inverse, take * inverse};
}

// The rows of queries and state that belong to one KV head: `count` of them, group * slots.
template <class T>
struct SummaryRows {
  SummaryRows(const SummaryMerge& a, Arena& arena)
      : count(a.heads / a.kv_heads * a.slots_per_head), padded(round_up(count, 8)) {
    query = arena.take<const T*>(padded);
    value = arena.take<float*>(padded);
    lse = arena.take<float*>(padded);
  }

  void locate(const SummaryMerge& a, int64_t layer, int64_t kv_head, int64_t state_row) {
    int64_t first_head = kv_head * (a.heads / a.kv_heads);
    for (int64_t i = 0; i < padded; ++i) {
      int64_t head = first_head + i / a.slots_per_head, slot = i % a.slots_per_head;
      if (i >= count) {
        query[i] = nullptr;
        continue;
      }
      query[i] = static_cast<const T*>(a.queries) + layer * a.query_strides[0] +
                 head * a.query_strides[1] + slot * a.query_strides[2];
      value[i] = a.state_value + state_row * a.value_strides[0] + layer * a.value_strides[1] +
                 head * a.value_strides[2] + slot * a.value_strides[3];
      lse[i] = a.state_lse + state_row * a.lse_strides[0] + layer * a.lse_strides[1] +
               head * a.lse_strides[2] + slot * a.lse_strides[3];
    }
  }

  Floats<8> old_lse(int64_t first) const {
    alignas(32) float values[8] = {};
    for (int64_t i = 0; i < 8 && first + i < count; ++i) values[i] = *lse[first + i];
    return load<8>(values);
  }
  void set_lse(int64_t first, Floats<8> new_lse) const {
    for (int64_t i = 0; i < 8 && first + i < count; ++i) *lse[first + i] = new_lse[i];
  }

  int64_t count, padded;
  const T** query;
  float** value;
  float** lse;
};

template <class T>
class MergeFewRows {
 public:
  MergeFewRows(const SummaryMerge& a, Arena& arena) : a_(a), state_(a, arena) {
    constexpr bool kConvert = Score::kPack == 1 && !std::is_same_v<T, float>;
    packed_ = arena.take<uint32_t>(kFewRows * a.head_dim);
    values_ = arena.take<float>(kFewRows * a.head_dim);
    query_copy_ = arena.take<float>(kConvert ? state_.padded * a.head_dim : 0);
    queries_ = arena.take<const typename Score::Storage*>(state_.padded);
    weights_ = arena.take<float>(kFewRows * state_.padded);
    keep_ = arena.take<float>(state_.padded);
    constexpr int64_t kLine = 64;
    lines_ =
        arena.take<const char*>((2 * kFewRows + state_.padded) *
                                (a.head_dim * static_cast<int64_t>(sizeof(float)) / kLine + 1));
  }

  void run(int64_t layer, int64_t kv_head, int64_t state_row, const int32_t* ids, int64_t count) {
    state_.locate(a_, layer, kv_head, state_row);
    set_queries();
    for (int64_t first = 0; first < count; first += kFewRows) {
      int64_t n = count - first < kFewRows ? count - first : kFewRows;
      fetch_rows(layer, kv_head, ids + first, n);
      set_rows(layer, kv_head, ids + first, n);
      dot_rows<Score>(reinterpret_cast<typename Score::Element*>(packed_), kFewRows, kFewRows,
                      queries_, state_.count, (a_.head_dim + Score::kPack - 1) / Score::kPack,
                      weights_, state_lines());
      for (int64_t i = 0; i < state_.count; i += 8) weigh(i, n);
      add_values();
    }
  }

 private:
  using Score = typename Fp32Weights<T>::Score;

  void set_queries() {
    for (int64_t i = 0; i < state_.count; ++i) {
      if constexpr (Score::kPack == 1 && !std::is_same_v<T, float>) {
        float* copy = query_copy_ + i * a_.head_dim;
        to_floats(state_.query[i], copy, a_.head_dim);
        queries_[i] = copy;
      } else {
        queries_[i] = reinterpret_cast<const typename Score::Storage*>(state_.query[i]);
      }
    }
  }

  // The rows lie scattered, and nothing can be done before the keys and queries are there.
  void fetch_rows(int64_t layer, int64_t kv_head, const int32_t* ids, int64_t n) {
    PoolRows<T> keys(a_.keys[layer]), values(a_.values[layer]);
    LineList list(lines_);
    for (int64_t i = 0; i < n; ++i) {
      list.add(keys(ids[i]) + kv_head * a_.keys[layer].head_stride, a_.head_dim);
    }
    for (int64_t i = 0; i < n; ++i) {
      list.add(values(ids[i]) + kv_head * a_.values[layer].head_stride, a_.head_dim);
    }
    for (int64_t i = 0; i < state_.count; ++i) list.add(state_.query[i], a_.head_dim);
    Fetch all = list.fetch();
    all.next(all.count);
  }

  // The state, fetched while the scores are computed.
  Fetch state_lines() {
    LineList list(lines_);
    for (int64_t i = 0; i < state_.count; ++i) list.add(state_.value[i], a_.head_dim);
    return list.fetch();
  }

  // The new keys become the lanes, because there are just as many as fit.
  void set_rows(int64_t layer, int64_t kv_head, const int32_t* ids, int64_t n) {
    PoolRows<T> keys(a_.keys[layer]), values(a_.values[layer]);
    const T* key_rows[kFewRows] = {};
    std::memset(values_, 0, sizeof(float) * kFewRows * a_.head_dim);
    for (int64_t i = 0; i < n; ++i) {
      key_rows[i] = keys(ids[i]) + kv_head * a_.keys[layer].head_stride;
      const T* value = values(ids[i]) + kv_head * a_.values[layer].head_stride;
      to_floats(value, values_ + i * a_.head_dim, a_.head_dim);
    }
    pack_rows<Score>(key_rows, kFewRows, a_.head_dim, kFewRows, packed_);
  }

  // Turns the scores of 8 queries into weights, [query][row], and updates their lse.
  void weigh(int64_t first, int64_t n) {
    Words<8> block[8];
    for (int i = 0; i < 8; ++i) {
      block[i] = first + i < state_.count ? (Words<8>)load<8>(weights_ + (first + i) * kFewRows)
                                          : Words<8>{};
    }
    transpose8(block);
    Floats<8> old = state_.old_lse(first), top = old;
    for (int64_t i = 0; i < n; ++i) top = maximum(top, (Floats<8>)block[i] * a_.scale);
    Floats<8> keep = exp2<8>((old - top) * kLog2e), total = keep;
    for (int64_t i = 0; i < kFewRows; ++i) {
      Floats<8> weight{};
      if (i < n) weight = exp2<8>(((Floats<8>)block[i] * a_.scale - top) * kLog2e);
      total += weight;
      block[i] = (Words<8>)weight;
    }
    state_.set_lse(first, top + log<8>(total));
    Floats<8> inverse = 1.0f / total;
    store(keep_ + first, keep * inverse);
    for (auto& weight : block) weight = (Words<8>)((Floats<8>)weight * inverse);
    transpose8(block);
    for (int i = 0; i < 8; ++i) store(weights_ + (first + i) * kFewRows, (Floats<8>)block[i]);
  }

  // state = keep * state + sum_i weight_i * value_i, column by column block.
  void add_values() {
    int64_t column = 0;
    constexpr int kVectors = kWide == 16 ? 2 : 1;
    for (; column + kVectors * kWide <= a_.head_dim; column += kVectors * kWide) {
      add_columns<kWide, kVectors>(column);
    }
    for (; column + 4 <= a_.head_dim; column += 4) add_columns<4, 1>(column);
    for (; column < a_.head_dim; ++column) {
      for (int64_t q = 0; q < state_.count; ++q) {
        float sum = state_.value[q][column] * keep_[q];
        for (int i = 0; i < kFewRows; ++i) {
          sum += weights_[q * kFewRows + i] * values_[i * a_.head_dim + column];
        }
        state_.value[q][column] = sum;
      }
    }
  }

  template <int kLanes, int kVectors>
  void add_columns(int64_t column) {
    Floats<kLanes> value[kFewRows][kVectors];
    for (int i = 0; i < kFewRows; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        value[i][v] = load<kLanes>(values_ + i * a_.head_dim + column + v * kLanes);
      }
    }
    const int64_t count = state_.count;
    for (int64_t q = 0; q < count; ++q) {
      float* row = state_.value[q] + column;
      const float* weight = weights_ + q * kFewRows;
      for (int v = 0; v < kVectors; ++v) {
        Floats<kLanes> sum = load<kLanes>(row + v * kLanes) * keep_[q];
        for (int i = 0; i < kFewRows; ++i) {
          sum = fmadd(splat<kLanes>(weight[i]), value[i][v], sum);
        }
        store(row + v * kLanes, sum);
      }
    }
  }

  const SummaryMerge& a_;
  SummaryRows<T> state_;
  uint32_t* packed_;  // [depth][8] the new keys as lanes
  float* values_;     // [8][head_dim]
  float* query_copy_;
  const typename Score::Storage** queries_;
  float* weights_;  // [queries][8] scores, then weights
  float* keep_;     // [queries]
  const char** lines_;
};

template <class T>
class MergeManyRows {
 public:
  MergeManyRows(const SummaryMerge& a, Arena& arena)
      : a_(a),
        state_(a, arena),
        lanes_(Lanes::take(arena, state_.padded, a.head_dim, a.head_dim)),
        rows_(arena, state_.padded, a.head_dim, a.head_dim) {
    part_ = arena.take<float>(state_.padded * a.head_dim);
    part_rows_ = arena.take<float*>(state_.padded);
    keys_ = arena.take<const T*>(kBlockRows);
    values_ = arena.take<const T*>(kBlockRows);
    lines_ = arena.take<const char*>(kBlockRows * (2 * a.head_dim * sizeof(T) / 64 + 2));
  }

  void run(int64_t layer, int64_t kv_head, int64_t state_row, const int32_t* ids, int64_t count) {
    state_.locate(a_, layer, kv_head, state_row);
    pack_rows<typename Rows::Score>(state_.query, state_.padded, a_.head_dim, lanes_.stride,
                                    lanes_.packed);
    lanes_.clear();
    const Pool &keys = a_.keys[layer], &values = a_.values[layer];
    PoolRows<T> key_rows(keys), value_rows(values);
    for (int64_t first = 0; first < count; first += kBlockRows) {
      int64_t n = count - first < kBlockRows ? count - first : kBlockRows;
      LineList ahead(lines_);
      for (int64_t i = 0; i < n; ++i) {
        keys_[i] = key_rows(ids[first + i]) + kv_head * keys.head_stride;
        values_[i] = value_rows(ids[first + i]) + kv_head * values.head_stride;
        if (first + kBlockRows + i < count) {
          int32_t id = ids[first + kBlockRows + i];
          ahead.add(key_rows(id) + kv_head * keys.head_stride, a_.head_dim);
          ahead.add(value_rows(id) + kv_head * values.head_stride, a_.head_dim);
        }
      }
      rows_.set_keys(keys_, n);
      rows_.score(lanes_, ahead.fetch());
      rows_.set_values(values_, n);
      rows_.fold(lanes_, a_.scale * kLog2e);
    }
    merge();
  }

 private:
  using Rows = RowBlock<T, Fp32Weights<T>>;

  void merge() {
    const int64_t dim = a_.head_dim;
    for (int64_t i = 0; i < state_.padded; ++i) {
      part_rows_[i] = i < state_.count ? part_ + i * dim : nullptr;
    }
    write_rows(lanes_, part_rows_);
    for (int64_t first = 0; first < state_.count; first += 8) {
      Floats<8> part_lse =
          load<8>(lanes_.top + first) * a_.scale + log<8>(load<8>(lanes_.total + first));
      Blend merged = blend(state_.old_lse(first), part_lse);
      state_.set_lse(first, merged.lse);
      for (int64_t i = 0; i < 8 && first + i < state_.count; ++i) {
        float *value = state_.value[first + i], keep = merged.keep[i], take = merged.take[i];
        const float* part = part_ + (first + i) * dim;
        for (int64_t c = 0; c < dim; ++c) value[c] = keep * value[c] + take * part[c];
      }
    }
  }

  const SummaryMerge& a_;
  SummaryRows<T> state_;
  Lanes lanes_;
  Rows rows_;
  float* part_;  // [queries][head_dim]
  float** part_rows_;
  const T **keys_, **values_;
  const char** lines_;
};

inline int64_t summary_merge_scratch(const SummaryMerge& a) {
  return with_type(a.type, [&](auto t) {
    Arena few(nullptr), many(nullptr);
    MergeFewRows<decltype(t)> measured_few(a, few);
    MergeManyRows<decltype(t)> measured_many(a, many);
    return few.used() > many.used() ? few.used() : many.used();
  });
}

inline void summary_merge(const SummaryMerge& a, const SummaryMergeUnit& unit, void* scratch) {
  with_type(a.type, [&](auto t) {
    Arena arena(scratch);
    if (unit.count <= kMostFewRows) {
      MergeFewRows<decltype(t)>(a, arena).run(unit.layer, unit.kv_head, unit.state_row, unit.ids,
                                              unit.count);
    } else {
      MergeManyRows<decltype(t)>(a, arena).run(unit.layer, unit.kv_head, unit.state_row, unit.ids,
                                               unit.count);
    }
  });
}

}  // namespace LONGSPARK_ISA
}  // namespace longspark::cpu
