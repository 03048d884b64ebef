// Attention of query lanes over rows, block by block, with a running softmax per lane.
//
// `Lanes` are the query rows that share one KV head: packed queries, and for each lane the largest
// score so far, the sum of weights and the unnormalised output. A lane's arithmetic is the same
// whatever its neighbours are and rows that it doesn't see change nothing, so a query row gets the
// same bits alone, in a verify of eight rows, and in a prefill of thousands.
#pragma once

#include "tiles.h"

namespace longspark::cpu {
namespace LONGSPARK_ISA {

constexpr float kNegativeInfinity = -__builtin_inff();
constexpr float kLog2e = 1.44269504f;
constexpr int64_t kBlockRows = 64;  // rows whose scores are held at a time

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Hands out pieces of one allocation; over a null base it only measures.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    char* piece = base_ ? base_ + used_ : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// How rows of T are multiplied: `Score` for query times key, `Weigh` for weight times value.
// fp32 weights keep the precision of a long-lived fp32 state; bf16 weights are twice as fast and as
// precise as a bf16 output can show.
template <class T>
struct Fp32Weights {
  using Score = MultiplyF32;
  using Weigh = MultiplyF32;
};
template <class T>
struct NativeWeights : Fp32Weights<T> {};
#if LONGSPARK_ISA_LEVEL >= 3
template <>
struct Fp32Weights<Bf16> {
  using Score = MultiplyBf16Pair;
  using Weigh = MultiplyF32;
};
template <>
struct NativeWeights<Bf16> {
  using Score = MultiplyBf16Pair;
  using Weigh = MultiplyBf16Pair;
};
#endif

struct Lanes {
  int64_t stride;  // lanes in memory, a multiple of 8
  int64_t count;   // lanes of this view, a multiple of 8
  int64_t head_dim, value_dim;
  uint32_t* packed;  // [depth][stride] floats or bf16 pairs
  float* top;        // [stride] largest raw score
  float* total;      // [stride] sum of 2^(scale * (score - top))
  float* out;        // [value_dim][stride] sum of 2^(scale * (score - top)) * value

  static Lanes take(Arena& arena, int64_t lanes, int64_t head_dim, int64_t value_dim) {
    Lanes made{lanes, lanes, head_dim, value_dim, nullptr, nullptr, nullptr, nullptr};
    made.packed = arena.take<uint32_t>(lanes * head_dim);
    made.top = arena.take<float>(lanes);
    made.total = arena.take<float>(lanes);
    made.out = arena.take<float>(lanes * value_dim);
    return made;
  }
  Lanes part(int64_t first, int64_t lanes) const {
    return {stride,         lanes,       head_dim,      value_dim,
            packed + first, top + first, total + first, out + first};
  }
  void clear() const {
    for (int64_t i = 0; i < stride; ++i) top[i] = kNegativeInfinity, total[i] = 0;
    std::memset(out, 0, sizeof(float) * stride * value_dim);
  }
};

// An 8 x 8 transposition of words in registers.
inline void transpose8(Words<8> (&m)[8]) {
  using W = Words<8>;
  W a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = __builtin_shuffle(m[i], m[i + 1], W{0, 8, 1, 9, 4, 12, 5, 13});
    a[i + 1] = __builtin_shuffle(m[i], m[i + 1], W{2, 10, 3, 11, 6, 14, 7, 15});
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = __builtin_shuffle(a[i + j], a[i + j + 2], W{0, 1, 8, 9, 4, 5, 12, 13});
      b[i + 2 * j + 1] = __builtin_shuffle(a[i + j], a[i + j + 2], W{2, 3, 10, 11, 6, 7, 14, 15});
    }
  }
  for (int i = 0; i < 4; ++i) {
    m[i] = __builtin_shuffle(b[i], b[i + 4], W{0, 1, 2, 3, 8, 9, 10, 11});
    m[i + 4] = __builtin_shuffle(b[i], b[i + 4], W{4, 5, 6, 7, 12, 13, 14, 15});
  }
}

// Columns `first` .. `first + 8` of a row as the words that Multiply takes; past the end zero.
template <class Multiply, class T>
inline Words<8> row_words(const T* row, int64_t first, int64_t dim) {
  alignas(32) uint32_t words[8] = {};
  if constexpr (Multiply::kPack == 2) {
    int64_t n = dim - 2 * first < 16 ? dim - 2 * first : 16;
    std::memcpy(words, row + 2 * first, n * sizeof(T));
  } else {
    float values[8] = {};
    to_floats(row + first, values, dim - first < 8 ? dim - first : 8);
    std::memcpy(words, values, sizeof(words));
  }
  return load<8>(words);
}

// packed[k][lane] = element k of rows[lane]; a null row packs zeros.
template <class Multiply, class T>
void pack_rows(const T* const* rows, int64_t lanes, int64_t dim, int64_t lane_stride,
               uint32_t* packed) {
  int64_t depth = (dim + Multiply::kPack - 1) / Multiply::kPack;
  for (int64_t lane = 0; lane < lanes; lane += 8) {
    for (int64_t k = 0; k < depth; k += 8) {
      Words<8> block[8];
      for (int i = 0; i < 8; ++i) {
        const T* row = rows[lane + i];
        block[i] = row ? row_words<Multiply>(row, k, dim) : Words<8>{};
      }
      transpose8(block);
      for (int i = 0; i < 8 && k + i < depth; ++i) {
        store(packed + (k + i) * lane_stride + lane, block[i]);
      }
    }
  }
}

// rows[lane][c] = out[c][lane] / total[lane]; a null row is left out. A lane that saw no row is 0.
template <class T>
void write_rows(const Lanes& lanes, T* const* rows) {
  for (int64_t lane = 0; lane < lanes.count; lane += 8) {
    float factor[8];
    for (int i = 0; i < 8; ++i) {
      float total = lanes.total[lane + i];
      factor[i] = total > 0 ? 1.0f / total : 0.0f;
    }
    for (int64_t c = 0; c < lanes.value_dim; c += 8) {
      Words<8> block[8] = {};
      int64_t n = lanes.value_dim - c < 8 ? lanes.value_dim - c : 8;
      for (int i = 0; i < n; ++i) {
        block[i] = (Words<8>)(load<8>(lanes.out + (c + i) * lanes.stride + lane) * load<8>(factor));
      }
      transpose8(block);
      for (int i = 0; i < 8; ++i) {
        if (rows[lane + i] == nullptr) continue;
        float values[8];
        store(values, (Floats<8>)block[i]);
        from_floats(values, rows[lane + i] + c, n);
      }
    }
  }
}

// The rows of one block, in the form the multiplications take.
template <class T, class Math>
class RowBlock {
 public:
  using Score = typename Math::Score;
  using Weigh = typename Math::Weigh;
  using Key = typename Score::Storage;
  using Value = typename Weigh::Storage;

  RowBlock(Arena& arena, int64_t lanes, int64_t head_dim, int64_t value_dim)
      : head_dim_(head_dim), value_dim_(value_dim) {
    keys_ = arena.take<const Key*>(kBlockRows);
    values_ = arena.take<const Value*>(kBlockRows);
    if (kConvertKeys) key_copy_ = arena.take<float>(kBlockRows * head_dim);
    value_copy_ = arena.take<typename Weigh::Element>(kBlockRows * value_dim);
    scores_ = arena.take<float>(kBlockRows * lanes);
    factor_ = arena.take<float>(lanes);
    weights_ = reinterpret_cast<typename Weigh::Element*>(scores_);
    if (Weigh::kPack == 2) {
      weights_ = arena.take<typename Weigh::Element>(kBlockRows / 2 * lanes);
    }
  }

  void set_keys(const T* const* rows, int64_t count) {
    count_ = count;
    for (int64_t n = 0; n < count; ++n) {
      if constexpr (kConvertKeys) {
        float* copy = key_copy_ + n * head_dim_;
        to_floats(rows[n], copy, head_dim_);
        keys_[n] = copy;
      } else {
        keys_[n] = reinterpret_cast<const Key*>(rows[n]);
      }
    }
  }

  // U is T, or float for values that are to be rounded to T first.
  template <class U>
  void set_values(const U* const* rows, int64_t count) {
    const int64_t dim = value_dim_;
    if constexpr (Weigh::kPack == 2) {
      for (int64_t n = 0; n < count; n += 2) {
        auto* pairs = value_copy_ + n / 2 * dim;
        pair_rows(rows[n], n + 1 < count ? rows[n + 1] : nullptr, dim, pairs);
        values_[n / 2] = pairs;
      }
    } else if constexpr (std::is_same_v<U, float> && std::is_same_v<T, float>) {
      for (int64_t n = 0; n < count; ++n) values_[n] = rows[n];
    } else {
      for (int64_t n = 0; n < count; ++n) {
        float* copy = value_copy_ + n * dim;
        if constexpr (std::is_same_v<U, T>) {
          to_floats(rows[n], copy, dim);
        } else {
          for (int64_t c = 0; c < dim; ++c) copy[c] = to_float(from_float<T>(rows[n][c]));
        }
        values_[n] = copy;
      }
    }
  }

  // Raw scores of the lanes against the keys: scores()[row * lanes.stride + lane].
  void score(const Lanes& lanes, Fetch fetch = {}) {
    dot_rows<Score>(reinterpret_cast<typename Score::Element*>(lanes.packed), lanes.stride,
                    lanes.count, keys_, count_, (head_dim_ + Score::kPack - 1) / Score::kPack,
                    scores_, fetch);
  }
  float* scores() { return scores_; }

  // Fold the block's scores and values into the lanes. `scale` includes log2(e).
  void fold(const Lanes& lanes, float scale) {
    int64_t lane = 0;
    bool moved = false;
    for (; lane + kWide <= lanes.count; lane += kWide) {
      moved |= softmax<kWide>(lanes, lane, scale);
    }
    if (lane < lanes.count) moved |= softmax<8>(lanes, lane, scale);
    if (moved) rescale(lanes);
    accumulate_rows<Weigh>(weights_, lanes.stride, lanes.count, values_,
                           (count_ + Weigh::kPack - 1) / Weigh::kPack, value_dim_, lanes.out);
  }

 private:
  static constexpr bool kConvertKeys = Score::kPack == 1 && !std::is_same_v<T, float>;

  static uint32_t bf16_bits(Bf16 x) { return x.bits; }
  static uint32_t bf16_bits(float x) { return from_float<Bf16>(x).bits; }

  // pairs[c] = first[c] in the low half, second[c] (zero if null) in the high half.
  template <class U>
  static void pair_rows(const U* first, const U* second, int64_t dim, uint32_t* pairs) {
    int64_t c = 0;
    if (second == nullptr) {
      for (; c < dim; ++c) pairs[c] = bf16_bits(first[c]);
      return;
    }
    if constexpr (std::is_same_v<U, Bf16>) {
      typedef uint16_t Row __attribute__((vector_size(64)));
      constexpr Row kLow = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                            8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
      for (; c + 32 <= dim; c += 32) {
        Row a, b;
        std::memcpy(&a, first + c, 64);
        std::memcpy(&b, second + c, 64);
        Row low = __builtin_shuffle(a, b, kLow), high = __builtin_shuffle(a, b, kLow + 16);
        std::memcpy(pairs + c, &low, 64);
        std::memcpy(pairs + c + 16, &high, 64);
      }
    }
    for (; c < dim; ++c) pairs[c] = bf16_bits(first[c]) | bf16_bits(second[c]) << 16;
  }

  // Turns the scores of kLanes lanes into weights. Returns whether any lane's top moved; the
  // factor for what was accumulated before is then left in factor_.
  template <int kLanes>
  bool softmax(const Lanes& lanes, int64_t lane, float scale) {
    using F = Floats<kLanes>;
    const int64_t count = count_, stride = lanes.stride;
    float* scores = scores_ + lane;
    F old_top = load<kLanes>(lanes.top + lane), top = old_top;
    for (int64_t n = 0; n < count; ++n) top = maximum(top, load<kLanes>(scores + n * stride));
    F factor_of_score = splat<kLanes>(scale);
    F shift = top > kNegativeInfinity ? top * scale : F{};
    F factor = old_top == top ? splat<kLanes>(1.0f)
                              : exp2<kLanes>(fmadd(old_top, factor_of_score, -shift));
    F sum{};
    auto weight = [&](int64_t n) LONGSPARK_INLINE {
      return exp2<kLanes>(fmadd(load<kLanes>(scores + n * stride), factor_of_score, -shift));
    };
    if constexpr (Weigh::kPack == 1) {
      for (int64_t n = 0; n < count; ++n) {
        F w = weight(n);
        sum += w;
        store(scores + n * stride, w);
      }
    } else {
      uint32_t* pairs = weights_ + lane;
      for (int64_t n = 0; n < count; n += 2, pairs += stride) {
        Words<kLanes> first = bf16_words<kLanes>(weight(n));
        Words<kLanes> second = n + 1 < count ? bf16_words<kLanes>(weight(n + 1)) : Words<kLanes>{};
        store(pairs, first | second << 16);
        // The sum of what the values are multiplied with: a row's rounding then moves the result
        // towards or away from that row's value instead of scaling it.
        sum += (F)(first << 16) + (F)(second << 16);
      }
    }
    store(lanes.top + lane, top);
    store(lanes.total + lane, fmadd(load<kLanes>(lanes.total + lane), factor, sum));
    store(factor_ + lane, factor);
    Ints<kLanes> moved = old_top != top;
    int32_t any = 0;
    for (int i = 0; i < kLanes; ++i) any |= moved[i];
    return any != 0;
  }

  // Rounded to bf16, in the low halves.
  template <int kLanes>
  static Words<kLanes> bf16_words(Floats<kLanes> x) {
#if LONGSPARK_ISA_LEVEL >= 3
    if constexpr (kLanes == 16) {
      return (Words<16>)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x));
    } else {
      return (Words<8>)_mm256_cvtepu16_epi32((__m128i)_mm256_cvtneps_pbh((__m256)x));
    }
#else
    return Words<kLanes>{};
#endif
  }

  void rescale(const Lanes& lanes) {
    for (int64_t c = 0; c < lanes.value_dim; ++c) {
      float* out = lanes.out + c * lanes.stride;
      for (int64_t lane = 0; lane < lanes.count; ++lane) out[lane] *= factor_[lane];
    }
  }

  int64_t head_dim_, value_dim_, count_ = 0;
  const Key** keys_;
  const Value** values_;
  float* key_copy_ = nullptr;
  typename Weigh::Element* value_copy_;
  float* scores_;                     // [kBlockRows][lanes]
  typename Weigh::Element* weights_;  // the same memory, or [kBlockRows / 2][lanes] pairs
  float* factor_;                     // [lanes]
};

}  // namespace LONGSPARK_ISA
}  // namespace longspark::cpu
