// Attention over a paged K/V pool, rows read where they lie. See softmax_lanes.h for the method.
//
// Keys are taken in chunks of kChunkRows positions that start at multiples of it, whoever computes
// them: a chunk's result is folded into the total in chunk order, in one unit or by the merge
// after several. So the bits of a row depend neither on the batch nor on the number of threads.
#pragma once

#include <utility>

#include "rows.h"
#include "softmax_lanes.h"

namespace longspark::cpu {
namespace LONGSPARK_ISA {

constexpr int64_t kChunkRows = 1024;

inline int64_t attention_lanes(const PagedAttention& a, int64_t rows) {
  return round_up(rows * (a.heads / a.kv_heads), kLaneUnit);
}

// dst += src, both unnormalised. Folding into cleared lanes copies.
inline void fold_lanes(const Lanes& dst, const float* top, const float* total, const float* out,
                       float scale) {
  for (int64_t lane = 0; lane < dst.count; lane += 8) {
    using F = Floats<8>;
    F old_top = load<8>(dst.top + lane), part_top = load<8>(top + lane);
    F new_top = maximum(old_top, part_top);
    F shift = new_top > kNegativeInfinity ? new_top * scale : F{};
    F scales = splat<8>(scale), one = splat<8>(1.0f);
    F keep = old_top == new_top ? one : exp2<8>(fmadd(old_top, scales, -shift));
    F take = part_top == new_top ? one : exp2<8>(fmadd(part_top, scales, -shift));
    store(dst.top + lane, new_top);
    store(dst.total + lane, fmadd(load<8>(dst.total + lane), keep, load<8>(total + lane) * take));
    for (int64_t c = 0; c < dst.value_dim; ++c) {
      float* to = dst.out + c * dst.stride + lane;
      store(to, fmadd(load<8>(to), keep, load<8>(out + c * dst.stride + lane) * take));
    }
  }
}

template <class T>
class PagedAttentionKernel {
 public:
  PagedAttentionKernel(const PagedAttention& a, int64_t rows, int64_t heads, Arena& arena)
      : a_(a),
        group_(a.heads / a.kv_heads),
        lanes_(attention_lanes(a, rows)),
        block_(arena, lanes_, a.head_dim, a.value_dim) {
    part_ = arena.take<Lanes>(heads);
    total_ = arena.take<Lanes>(heads);
    for (int64_t h = 0; h < heads; ++h) {
      Lanes part = Lanes::take(arena, lanes_, a.head_dim, a.value_dim);
      Lanes total = Lanes::take(arena, lanes_, 0, a.value_dim);
      if (part_) part_[h] = part, total_[h] = total;
    }
    last_seen_ = arena.take<int32_t>(lanes_);
    first_seen_ = arena.take<int32_t>(lanes_);
    for (auto* rows : {&here_, &ahead_}) {
      rows->keys = arena.take<const T*>(kBlockRows);
      rows->values = arena.take<const T*>(kBlockRows);
    }
    lane_rows_ = arena.take<T*>(lanes_);
    int64_t row_lines = (a.head_dim + a.value_dim) * static_cast<int64_t>(sizeof(T)) / 64 + 2;
    lines_ = arena.take<const char*>(kBlockRows * row_lines);
  }

  void run(const PagedAttentionUnit& unit) {
    prepare(unit);
    int64_t first_key = a_.window >= 0 ? unit.position - a_.window : 0;
    first_key = first_key < 0 ? 0 : first_key / kBlockRows * kBlockRows;
    int64_t end_key = a_.causal ? unit.position + unit.rows : unit.kv_len;
    for (int64_t chunk = unit.first_chunk; chunk < unit.last_chunk; ++chunk) {
      int64_t begin = chunk * kChunkRows, end = begin + kChunkRows;
      begin = begin < first_key ? first_key : begin;
      end = end < end_key ? end : end_key;
      for (int64_t h = 0; h < unit.heads; ++h) part_[h].clear();
      locate(unit, begin, end, here_);
      for (; begin < end; begin += kBlockRows) {
        locate(unit, begin + kBlockRows, end, ahead_);
        attend_block(unit, begin);
        std::swap(here_, ahead_);
      }
      if (unit.partial == nullptr) {
        for (int64_t h = 0; h < unit.heads; ++h) {
          fold_lanes(total_[h], part_[h].top, part_[h].total, part_[h].out, score_scale());
        }
      }
    }
    for (int64_t h = 0; h < unit.heads; ++h) {
      if (unit.partial == nullptr) {
        write(unit, h);
      } else {
        float* to = unit.partial + h * lanes_ * (a_.value_dim + 2);
        std::memcpy(to, part_[h].top, sizeof(float) * lanes_);
        std::memcpy(to + lanes_, part_[h].total, sizeof(float) * lanes_);
        std::memcpy(to + 2 * lanes_, part_[h].out, sizeof(float) * lanes_ * a_.value_dim);
      }
    }
  }

  void merge(const PagedAttentionUnit& unit, const float* const* partials, int64_t count) {
    for (int64_t h = 0; h < unit.heads; ++h) {
      total_[h].clear();
      for (int64_t i = 0; i < count; ++i) {
        const float* part = partials[i] + h * lanes_ * (a_.value_dim + 2);
        fold_lanes(total_[h], part, part + lanes_, part + 2 * lanes_, score_scale());
      }
      write(unit, h);
    }
  }

 private:
  // With a soft cap the scores are capped to (-1, 1) * softcap before the softmax.
  float score_scale() const { return (a_.softcap > 0 ? a_.softcap : a_.scale) * kLog2e; }

  // Lane r * group + j is query row r of the j-th query head of the KV head.
  void prepare(const PagedAttentionUnit& unit) {
    int64_t used = unit.rows * group_;
    for (int64_t lane = 0; lane < lanes_; ++lane) {
      int64_t position = unit.position + (lane < used ? lane / group_ : unit.rows - 1);
      last_seen_[lane] = static_cast<int32_t>(a_.causal ? position : unit.kv_len - 1);
      first_seen_[lane] = static_cast<int32_t>(a_.window >= 0 ? position - a_.window : 0);
    }
    masked_from_ = a_.causal ? unit.position + 1 : unit.kv_len;
    masked_below_ = a_.window >= 0 ? unit.position + unit.rows - 1 - a_.window : 0;
    for (int64_t h = 0; h < unit.heads; ++h) {
      const T* query = static_cast<const T*>(a_.query) + unit.query_row * a_.query_stride +
                       (unit.first_head + h) * group_ * a_.query_head_stride;
      for (int64_t lane = 0; lane < lanes_; ++lane) {
        const T* row = lane < used ? query + lane / group_ * a_.query_stride +
                                         lane % group_ * a_.query_head_stride
                                   : nullptr;
        lane_rows_[lane] = const_cast<T*>(row);
      }
      pack_rows<typename Block::Score>(lane_rows_, lanes_, a_.head_dim, lanes_, part_[h].packed);
      total_[h].clear();
    }
  }

  // Where a block's rows lie, for the unit's first head.
  struct Located {
    const T** keys;
    const T** values;
    int64_t count;
  };

  void locate(const PagedAttentionUnit& unit, int64_t first, int64_t end, Located& block) {
    const int32_t* ids = a_.req_to_token + unit.request_row * a_.table_stride + first;
    PoolRows<T> keys(a_.keys), values(a_.values);
    block.count = end - first < kBlockRows ? end - first : kBlockRows;
    for (int64_t n = 0; n < block.count; ++n) {
      block.keys[n] = keys(ids[n]) + unit.first_head * a_.keys.head_stride;
      block.values[n] = values(ids[n]) + unit.first_head * a_.values.head_stride;
    }
  }

  // Attend to the rows located in here_, the first at position `first`, and fetch those in ahead_
  // meanwhile: rows lie scattered over the pool, where no hardware prefetcher follows.
  void attend_block(const PagedAttentionUnit& unit, int64_t first) {
    const int64_t count = here_.count;
    for (int64_t h = 0; h < unit.heads; ++h) {
      block_.set_keys(here_.keys, count);
      block_.score(part_[h], lines_ahead(h));
      if (a_.softcap > 0) cap(count);
      if (first + count > masked_from_ || first < masked_below_) mask(first, count);
      block_.set_values(here_.values, count);
      block_.fold(part_[h], score_scale());
      for (int64_t n = 0; n < count; ++n) {
        here_.keys[n] += a_.keys.head_stride;
        here_.values[n] += a_.values.head_stride;
      }
    }
  }

  Fetch lines_ahead(int64_t h) {
    LineList list(lines_);
    for (int64_t n = 0; n < ahead_.count; ++n) {
      list.add(ahead_.keys[n] + h * a_.keys.head_stride, a_.head_dim);
      list.add(ahead_.values[n] + h * a_.values.head_stride, a_.value_dim);
    }
    return list.fetch();
  }

  // score <- tanh(score * scale / softcap), as 1 - 2 / (e^2x + 1).
  void cap(int64_t count) {
    float* scores = block_.scores();
    float factor = 2 * kLog2e * a_.scale / a_.softcap;
    for (int64_t i = 0; i < count * lanes_; i += 8) {
      Floats<8> x = load<8>(scores + i) * factor;
      x = x > 126.0f ? splat<8>(126.0f) : x;
      store(scores + i, 1.0f - 2.0f / (exp2<8>(x) + 1.0f));
    }
  }

  void mask(int64_t first, int64_t count) {
    for (int64_t n = 0; n < count; ++n) {
      float* scores = block_.scores() + n * lanes_;
      int32_t position = static_cast<int32_t>(first + n);
      for (int64_t lane = 0; lane < lanes_; ++lane) {
        bool seen = position <= last_seen_[lane] && position >= first_seen_[lane];
        scores[lane] = seen ? scores[lane] : kNegativeInfinity;
      }
    }
  }

  void write(const PagedAttentionUnit& unit, int64_t h) {
    T* out = static_cast<T*>(a_.out) +
             (unit.query_row * a_.heads + (unit.first_head + h) * group_) * a_.value_dim;
    for (int64_t lane = 0; lane < lanes_; ++lane) {
      lane_rows_[lane] = lane < unit.rows * group_
                             ? out + (lane / group_ * a_.heads + lane % group_) * a_.value_dim
                             : nullptr;
    }
    write_rows(total_[h], lane_rows_);
  }

  using Block = RowBlock<T, NativeWeights<T>>;
  const PagedAttention& a_;
  int64_t group_, lanes_;
  Block block_;
  Lanes *part_, *total_;  // per head: of this chunk, of all chunks so far
  int32_t *last_seen_, *first_seen_;
  int64_t masked_from_ = 0, masked_below_ = 0;  // keys outside are hidden from some lane
  Located here_{}, ahead_{};
  T** lane_rows_;
  const char** lines_;  // to fetch
};

inline int64_t paged_attention_scratch(const PagedAttention& a, int64_t rows, int64_t heads) {
  return with_type(a.type, [&](auto t) {
    Arena arena(nullptr);
    PagedAttentionKernel<decltype(t)> measured(a, rows, heads, arena);
    return arena.used();
  });
}

inline void paged_attention(const PagedAttention& a, const PagedAttentionUnit& unit,
                            void* scratch) {
  with_type(a.type, [&](auto t) {
    Arena arena(scratch);
    PagedAttentionKernel<decltype(t)>(a, unit.rows, unit.heads, arena).run(unit);
  });
}

inline void paged_attention_merge(const PagedAttention& a, const PagedAttentionUnit& unit,
                                  const float* const* partials, int64_t count, void* scratch) {
  with_type(a.type, [&](auto t) {
    Arena arena(scratch);
    PagedAttentionKernel<decltype(t)>(a, unit.rows, unit.heads, arena).merge(unit, partials, count);
  });
}

}  // namespace LONGSPARK_ISA
}  // namespace longspark::cpu
