// Work over the vocabulary: the Markov correction of one slot's logits, the draw of a draft token,
// and the residual distribution at a rejection.
//
// W2 (vocabulary x rank) is by far the most memory, so it is read once for all requests: its rows
// are taken where they lie, the requests' W1 rows are the lanes. Corrected logits exist for one
// block of kBlockRows ids at a time.
#pragma once

#include "rows.h"
#include "softmax_lanes.h"

namespace longspark::cpu {
namespace LONGSPARK_ISA {

template <class T>
inline void round_values(float* values, int64_t n) {
  if constexpr (!std::is_same_v<T, float>) {
    T rounded[kBlockRows];
    from_floats(values, rounded, n);
    to_floats(rounded, values, n);
  }
}

// z = base + W2 W1[prev] of a block of ids, request by request.
template <class T>
class CorrectedBlock {
 public:
  CorrectedBlock(const Markov& m, Arena& arena) : m_(m), lanes_(round_up(m.batch, kLaneUnit)) {
    rows_ = arena.take<const Storage*>(kBlockRows);
    copy_ = arena.take<float>(kConvert ? kBlockRows * m.rank : 0);
    even_rank_ = round_up(m.rank, Multiply::kPack);
    even_copy_ = arena.take<T>(even_rank_ != m.rank ? kBlockRows * even_rank_ : 0);
    bias_ = arena.take<float>(kBlockRows * lanes_);
    z_ = arena.take<float>(lanes_ * kBlockRows);
    lines_ = arena.take<const char*>(kBlockRows * (m.rank * sizeof(T) / 64 + 1));
  }

  static int64_t packed_words(const Markov& m) {
    return round_up(m.batch, kLaneUnit) * round_up(m.rank, 2);
  }

  // The requests' W1 rows as lanes; done once per call.
  static void pack(const Markov& m, uint32_t* packed) {
    const T* rows[kLaneUnit];
    int64_t lanes = round_up(m.batch, kLaneUnit);
    for (int64_t lane = 0; lane < lanes; lane += kLaneUnit) {
      for (int64_t i = 0; i < kLaneUnit; ++i) {
        int64_t b = lane + i;
        rows[i] = b < m.batch ? static_cast<const T*>(m.w1) + m.prev[b] * m.w1_stride : nullptr;
      }
      pack_rows<Multiply>(rows, kLaneUnit, m.rank, lanes, packed + lane);
    }
  }

  // The products for ids [first, first + count).
  void compute(const uint32_t* packed, int64_t first, int64_t count) {
    first_ = first, count_ = count;
    const T* w2 = static_cast<const T*>(m_.w2) + first * m_.w2_stride;
    for (int64_t n = 0; n < count; ++n) {
      const T* row = w2 + n * m_.w2_stride;
      if constexpr (kConvert) {
        to_floats(row, copy_ + n * m_.rank, m_.rank);
        rows_[n] = copy_ + n * m_.rank;
      } else if (even_rank_ != m_.rank) {
        // The last pair of an odd row would take in what lies behind it, NaN perhaps.
        T* copy = even_copy_ + n * even_rank_;
        std::memcpy(copy, row, m_.rank * sizeof(T));
        copy[m_.rank] = T{};
        rows_[n] = reinterpret_cast<const Storage*>(copy);
      } else {
        rows_[n] = reinterpret_cast<const Storage*>(row);
      }
    }
    dot_rows<Multiply>(reinterpret_cast<const typename Multiply::Element*>(packed), lanes_, lanes_,
                       rows_, count, (m_.rank + Multiply::kPack - 1) / Multiply::kPack, bias_,
                       lines_from(first + count));
    for (int64_t lane = 0; lane < lanes_; lane += 8) {
      for (int64_t n = 0; n < count; n += 8) {
        Words<8> block[8];
        for (int i = 0; i < 8; ++i) block[i] = (Words<8>)load<8>(bias_ + (n + i) * lanes_ + lane);
        transpose8(block);
        for (int i = 0; i < 8; ++i) store(z_ + (lane + i) * kBlockRows + n, (Floats<8>)block[i]);
      }
    }
  }

  // z of the block's ids for request b, kBlockRows of them: past the last id -inf. Once per block.
  const float* logits(int64_t b) {
    float* z = z_ + b * kBlockRows;
    with_type(m_.weight_type, [&](auto t) { round_values<decltype(t)>(z, count_); });
    with_type(m_.logit_type, [&](auto t) {
      using L = decltype(t);
      float base[kBlockRows];
      round_values<L>(z, count_);
      to_floats(static_cast<const L*>(m_.base[b]) + first_, base, count_);
      for (int64_t n = 0; n < count_; ++n) z[n] += base[n];
      round_values<L>(z, count_);
    });
    for (int64_t n = count_; n < kBlockRows; ++n) z[n] = kNegativeInfinity;
    return z;
  }

 private:
  // W2 from id `first` on, a block of it: so many rows at once are no stream to the prefetcher.
  Fetch lines_from(int64_t first) {
    LineList list(lines_);
    for (int64_t id = first; id < first + kBlockRows && id < m_.vocab; ++id) {
      list.add(static_cast<const T*>(m_.w2) + id * m_.w2_stride, m_.rank);
    }
    return list.fetch();
  }

  using Multiply = typename Fp32Weights<T>::Score;
  using Storage = typename Multiply::Storage;
  static constexpr bool kConvert = Multiply::kPack == 1 && !std::is_same_v<T, float>;

  const Markov& m_;
  int64_t lanes_, first_ = 0, count_ = 0;
  const Storage** rows_;
  float *copy_, *bias_, *z_;
  int64_t even_rank_;
  T* even_copy_;
  const char** lines_;
};

inline int64_t markov_packed_words(const Markov& m) {
  return CorrectedBlock<float>::packed_words(m);
}

inline void markov_pack(const Markov& m, uint32_t* packed) {
  with_type(m.weight_type, [&](auto t) { CorrectedBlock<decltype(t)>::pack(m, packed); });
}

inline int64_t markov_scratch(const Markov& m) {
  return with_type(m.weight_type, [&](auto t) {
    Arena arena(nullptr);
    CorrectedBlock<decltype(t)> measured(m, arena);
    return arena.used();
  });
}

// f(block, first id, ids) for the blocks of ids [first, end).
template <class F>
inline void for_corrected_blocks(const Markov& m, const uint32_t* packed, int64_t first,
                                 int64_t end, void* scratch, F&& f) {
  with_type(m.weight_type, [&](auto t) {
    Arena arena(scratch);
    CorrectedBlock<decltype(t)> block(m, arena);
    for (; first < end; first += kBlockRows) {
      int64_t count = end - first < kBlockRows ? end - first : kBlockRows;
      block.compute(packed, first, count);
      f(block, first, count);
    }
  });
}

inline void markov_step(const Markov& m, const uint32_t* packed, int64_t first, int64_t end,
                        float* out, int64_t out_stride, void* scratch) {
  for_corrected_blocks(m, packed, first, end, scratch, [&](auto& block, int64_t id, int64_t count) {
    for (int64_t b = 0; b < m.batch; ++b) {
      std::memcpy(out + b * out_stride + id, block.logits(b), count * sizeof(float));
    }
  });
}

// ---- The draw -----------------------------------------------------------------------------------

// MurmurHash3 of seed (64 bit) | position (32) | token id (32); see ops/gumbel.py.
template <class V>
inline V rotate_left(V x, int bits) {
  return x << bits | x >> (32 - bits);
}

template <class V>
inline V absorb(V h, V word) {
  word = rotate_left(word * 0xcc9e2d51u, 15) * 0x1b873593u;
  return rotate_left(h ^ word, 13) * 5 + 0xe6546b64u;
}

inline uint32_t hash_prefix(int64_t seed, int64_t position) {
  uint32_t h = absorb(uint32_t{0}, static_cast<uint32_t>(seed));
  h = absorb(h, static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32));
  return absorb(h, static_cast<uint32_t>(position));
}

template <class V>
inline V hash_finish(V prefix, V id) {
  V h = absorb(prefix, id) ^ 16u;
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
}

// The noise in float64, exactly as the reference and SGLang's seeded sampler have it.
inline double gumbel(uint32_t hash) {
  double log_uniform = hash == 0 ? -__DBL_MAX__ : __builtin_log(hash / 4294967295.0);
  if (log_uniform > -0x1p-32) log_uniform = -0x1p-32;
  return -__builtin_log(-log_uniform);
}

// The noise in float32, absolute error below 1e-5: enough to tell which ids can win.
template <int kLanes>
inline Floats<kLanes> rough_gumbel(Words<kLanes> hash) {
  using F = Floats<kLanes>;
  using I = Ints<kLanes>;
  auto unit = [](Words<kLanes> w) {  // w / 2^32; signed conversions are all that AVX2 has
    F high = __builtin_convertvector((I)(w >> 16), F),
      low = __builtin_convertvector((I)(w & 0xffff), F);
    return fmadd(high, splat<kLanes>(0x1p-16f), low * 0x1p-32f);
  };
  // -ln(u), u = hash / (2^32 - 1); near u = 1, where the largest noise comes from, from 1 - u.
  const F smallest = splat<kLanes>(0x1p-32f);
  F near_one = -log_reduced<kLanes>(F{}, -unit(~hash));
  F elsewhere = -log<kLanes>(maximum(unit(hash), smallest));
  F e = hash > 0xc0000000u ? near_one : elsewhere;
  return hash == 0 ? splat<kLanes>(-709.78f) : -log<kLanes>(maximum(e, smallest));
}

inline float largest_of(const float* values) {
  Floats<8> top = load<8>(values);
  for (int64_t n = 8; n < kBlockRows; n += 8) top = maximum(top, load<8>(values + n));
  float largest = top[0];
  for (int i = 1; i < 8; ++i) largest = top[i] > largest ? top[i] : largest;
  return largest;
}

// Folds the scaled logits x of a block (kBlockRows, -inf where there is none) into the normaliser.
inline void normalise_block(const float* x, float largest, Draw& draw) {
  if (largest > draw.top) {
    draw.total *= exp2<8>(splat<8>((draw.top - largest) * kLog2e))[0];
    draw.top = largest;
  }
  if (!(draw.top > kNegativeInfinity)) return;
  Floats<8> sum{};
  for (int64_t n = 0; n < kBlockRows; n += 8) {
    sum += exp2<8>((load<8>(x + n) - draw.top) * kLog2e);
  }
  for (int i = 0; i < 8; ++i) draw.total += sum[i];
}

// Folds a block of logits z, ids from `first` on, into the best candidate so far.
inline void draw_block(const float* z, int64_t first, float temperature, uint32_t prefix,
                       Draw& draw) {
  if (temperature <= 0) {
    float largest = largest_of(z);
    if (!(largest > draw.score)) return;
    int64_t n = 0;
    while (z[n] != largest) ++n;
    draw.score = largest, draw.token = first + n;
    return;
  }
  float x[kBlockRows], rough[kBlockRows];
  for (int64_t n = 0; n < kBlockRows; n += 8) {
    Floats<8> scaled = load<8>(z + n) / temperature;
    Words<8> id = Words<8>{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<uint32_t>(first + n);
    store(x + n, scaled);
    store(rough + n, scaled + rough_gumbel<8>(hash_finish(Words<8>{} + prefix, id)));
  }
  normalise_block(x, largest_of(x), draw);

  // Only ids whose rough score comes near the best are looked at exactly: a handful per call.
  float best = largest_of(rough);
  float margin = 1e-4f + 1e-6f * (best < 0 ? -best : best);
  if (!(best > kNegativeInfinity) || best + margin < draw.score) return;
  for (int64_t n = 0; n < kBlockRows; ++n) {
    if (!(rough[n] >= best - margin)) continue;
    double score = x[n] + gumbel(hash_finish(prefix, static_cast<uint32_t>(first + n)));
    if (score > draw.score) draw.score = score, draw.token = first + n, draw.scaled = x[n];
  }
}

inline void draft_sample(const Markov& m, const Sampling& s, const uint32_t* packed, int64_t first,
                         int64_t end, Draw* draws, void* scratch) {
  for_corrected_blocks(m, packed, first, end, scratch, [&](auto& block, int64_t id, int64_t) {
    for (int64_t b = 0; b < m.batch; ++b) {
      draw_block(block.logits(b), id, s.temperature[b], hash_prefix(s.seed[b], s.position[b]),
                 draws[b]);
    }
  });
}

// ---- The residual at a rejection ----------------------------------------------------------------

// z / temperature of ids [first, end) for each request into `scaled`, and its normaliser.
inline void residual_logits(const Markov& m, const float* temperature, const uint32_t* packed,
                            int64_t first, int64_t end, float* scaled, int64_t stride, Draw* draws,
                            void* scratch) {
  for_corrected_blocks(m, packed, first, end, scratch, [&](auto& block, int64_t id, int64_t count) {
    for (int64_t b = 0; b < m.batch; ++b) {
      const float* z = block.logits(b);
      float x[kBlockRows];
      for (int64_t n = 0; n < kBlockRows; n += 8) store(x + n, load<8>(z + n) / temperature[b]);
      normalise_block(x, largest_of(x), draws[b]);
      std::memcpy(scaled + b * stride + id, x, count * sizeof(float));
    }
  });
}

// max(p - softmax(x), 0) of ids [first, end) into `weight`; x in place of which it may be written.
inline void residual_weights(const float* p, const float* x, float top, float total, int64_t first,
                             int64_t end, float* weight) {
  float inverse = 1.0f / total;
  int64_t i = first;
  for (; i + 8 <= end; i += 8) {
    Floats<8> q = exp2<8>((load<8>(x + i) - top) * kLog2e) * inverse;
    store(weight + i, maximum(load<8>(p + i) - q, Floats<8>{}));
  }
  for (; i < end; ++i) {
    float q = exp2<8>(splat<8>((x[i] - top) * kLog2e))[0] * inverse;
    weight[i] = p[i] > q ? p[i] - q : 0.0f;
  }
}

}  // namespace LONGSPARK_ISA
}  // namespace longspark::cpu
