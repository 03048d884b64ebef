// The two inner products that every kernel here is made of.
//
// Everything is laid out with *query lanes* side by side: lane i of a vector belongs to query row
// i. One side of a product is "packed" ([depth][lanes], a small block that stays in the first-level
// cache); the other side is rows read where they lie (a K/V pool, a weight matrix), one scalar at a
// time, broadcast to all lanes. So rows are never transposed or copied, scores come out with a
// softmax that runs down the lanes without horizontal sums, and any number of query rows that share
// a KV head is served by one pass over its rows.
//
//   dot_rows:        out[n][lane]  = sum_k rows[n][k] * packed[k][lane]     (scores)
//   accumulate_rows: out[c][lane] += sum_n rows[n][c] * weights[n][lane]    (weighted values)
//
// `Multiply` says what an element is: one float, or two bf16 that one instruction multiplies and
// sums in fp32.
#pragma once

#include <type_traits>

#include "types.h"

namespace longspark::cpu {
namespace LONGSPARK_ISA {

struct MultiplyF32 {
  using Element = float;
  using Storage = float;  // Element as it lies in memory, with whatever alignment
  static constexpr int kPack = 1;

  template <int kLanes>
  static Floats<kLanes> apply(Floats<kLanes> sum, Floats<kLanes> a, Floats<kLanes> b) {
    return fmadd(a, b, sum);
  }
};

#if LONGSPARK_ISA_LEVEL >= 3
struct MultiplyBf16Pair {
  using Element = uint32_t;
  typedef uint32_t Storage __attribute__((may_alias, aligned(2)));
  static constexpr int kPack = 2;

  template <int kLanes>
  static Floats<kLanes> apply(Floats<kLanes> sum, Words<kLanes> a, Words<kLanes> b) {
    if constexpr (kLanes == 16) {
      return (Floats<kLanes>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    } else {
      return (Floats<kLanes>)_mm256_dpbf16_ps((__m256)sum, (__m256bh)a, (__m256bh)b);
    }
  }
};
#endif

// kLanes neighbouring lanes in registers, as vectors of one width.
template <class T, int kLanes>
struct LaneBlock {
  static constexpr int kWidth = kLanes % kWide == 0 ? kWide : 8;
  static constexpr int kCount = kLanes / kWidth;
  static_assert(kCount * kWidth == kLanes);
  using Vector = typename VecOf<T, kWidth>::Type;

  Vector vectors[kCount];

  void read(const T* from) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) vectors[i] = load<kWidth>(from + i * kWidth);
  }
  void write(T* to) const {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) store(to + i * kWidth, vectors[i]);
  }
  void clear() {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) vectors[i] = Vector{};
  }
};

template <class Multiply, int kLanes>
inline void multiply_add(LaneBlock<float, kLanes>& sum,
                         const LaneBlock<typename Multiply::Element, kLanes>& lanes,
                         typename Multiply::Element scalar) {
  using Block = LaneBlock<typename Multiply::Element, kLanes>;
  auto all = scalar - typename Block::Vector{};
#pragma GCC unroll 4
  for (int i = 0; i < Block::kCount; ++i) {
    sum.vectors[i] = Multiply::template apply<Block::kWidth>(sum.vectors[i], lanes.vectors[i], all);
  }
}

// Widest lane block, and rows (or columns) per tile: as many accumulators as leave registers for
// the packed side and the broadcast, and enough to hide the latency of a multiply-add.
constexpr int kBlockLanes = kWide == 16 ? 32 : kWide == 8 ? 16 : 8;
template <int kLanes>
constexpr int kTileRows =
    kWide == 16 ? (kLanes == 8 ? 16 : 8) : (kLanes == 8 && kWide == 8 ? 8 : 4);

// Cache lines to fetch while a product runs: a few at every step of the inner loop, because a burst
// of prefetches holds up the loads behind it.
struct Fetch {
  const char* const* lines = nullptr;
  int64_t count = 0;

  // Lines per step that spread what is left over `steps`.
  int64_t per_step(int64_t steps) const { return steps > 0 ? (count + steps - 1) / steps : count; }

  void next(int64_t n) {
    if (n > count) n = count;
    count -= n;
    // Into the second-level cache: on Zen 4 a prefetch into the first gains nothing, its few
    // outstanding misses are taken by the loads proper.
    for (; n > 0; --n) __builtin_prefetch(*lines++, 0, 2);
  }
};

class LineList {
 public:
  explicit LineList(const char** lines) : lines_(lines) {}
  template <class T>
  void add(const T* row, int64_t elements) {
    const char* bytes = reinterpret_cast<const char*>(row);
    int64_t size = elements * static_cast<int64_t>(sizeof(T));
    for (int64_t i = 0; i < size; i += 64) lines_[count_++] = bytes + i;
  }
  Fetch fetch() const { return {lines_, count_}; }

 private:
  const char** lines_;
  int64_t count_ = 0;
};

// Elements per step of dot_tile, as registers allow: a row's pointer is loaded once per step.
template <int kLanes>
constexpr int kStepOf = kWide == 16 && kLanes != 24 ? 4 : 2;

template <class Multiply, int kLanes, int kRows>
inline void dot_tile(const typename Multiply::Element* packed, int64_t lane_stride,
                     const typename Multiply::Storage* const* rows, int64_t depth, float* out,
                     Fetch& fetch, int64_t fetch_step) {
  constexpr int kStep = kStepOf<kLanes>;
  using Storage = typename Multiply::Storage;
  using Packed = LaneBlock<typename Multiply::Element, kLanes>;
  LaneBlock<float, kLanes> sum[kRows];
#pragma GCC unroll 16
  for (int n = 0; n < kRows; ++n) sum[n].clear();
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep) {
    Packed lanes[kStep];
#pragma GCC unroll 4
    for (int i = 0; i < kStep; ++i) lanes[i].read(packed + (k + i) * lane_stride);
    fetch.next(fetch_step);
#pragma GCC unroll 16
    for (int n = 0; n < kRows; ++n) {
      const Storage* row = rows[n] + k;
      asm("" : "+r"(row));  // else GCC keeps a register per element instead of a displacement
#pragma GCC unroll 4
      for (int i = 0; i < kStep; ++i) multiply_add<Multiply, kLanes>(sum[n], lanes[i], row[i]);
    }
  }
  for (; k < depth; ++k) {
    Packed lanes;
    lanes.read(packed + k * lane_stride);
#pragma GCC unroll 16
    for (int n = 0; n < kRows; ++n) multiply_add<Multiply, kLanes>(sum[n], lanes, rows[n][k]);
  }
#pragma GCC unroll 16
  for (int n = 0; n < kRows; ++n) sum[n].write(out + n * lane_stride);
}

template <class Multiply, int kLanes, int kColumns>
inline void accumulate_tile(const typename Multiply::Element* weights, int64_t lane_stride,
                            const typename Multiply::Storage* const* rows, int64_t row_count,
                            int64_t column, float* out) {
  LaneBlock<float, kLanes> sum[kColumns];
#pragma GCC unroll 16
  for (int c = 0; c < kColumns; ++c) sum[c].read(out + c * lane_stride);
  for (int64_t n = 0; n < row_count; ++n) {
    LaneBlock<typename Multiply::Element, kLanes> lanes;
    lanes.read(weights + n * lane_stride);
    const typename Multiply::Storage* row = rows[n] + column;
    asm("" : "+r"(row));  // as in dot_tile
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) multiply_add<Multiply, kLanes>(sum[c], lanes, row[c]);
  }
#pragma GCC unroll 16
  for (int c = 0; c < kColumns; ++c) sum[c].write(out + c * lane_stride);
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Call f(first_lane, Constant<block lanes>) for lane blocks that cover `lanes`, a multiple of 8.
template <class F>
inline void for_lane_blocks(int64_t lanes, F&& f) {
  int64_t lane = 0;
  for (; lane + kBlockLanes <= lanes; lane += kBlockLanes) f(lane, Constant<kBlockLanes>{});
  int64_t left = lanes - lane;
  if constexpr (kBlockLanes > 24) {
    if (left == 24) f(lane, Constant<24>{});
  }
  if constexpr (kBlockLanes > 16) {
    if (left == 16) f(lane, Constant<16>{});
  }
  if constexpr (kBlockLanes > 8) {
    if (left == 8) f(lane, Constant<8>{});
  }
}

// Call f(first, Constant<size>) for tiles that cover 0..count-1: full ones, then powers of two.
template <int kTile, class F>
inline void for_tiles(int64_t count, F&& f) {
  int64_t first = 0;
  for (; first + kTile <= count; first += kTile) f(first, Constant<kTile>{});
  if constexpr (kTile > 8) {
    if (count - first >= 8) f(first, Constant<8>{}), first += 8;
  }
  if constexpr (kTile > 4) {
    if (count - first >= 4) f(first, Constant<4>{}), first += 4;
  }
  if (count - first >= 2) f(first, Constant<2>{}), first += 2;
  if (count - first >= 1) f(first, Constant<1>{});
}

// out[n * lane_stride + lane] = sum_k rows[n][k] * packed[k * lane_stride + lane], any row count.
template <class Multiply>
void dot_rows(const typename Multiply::Element* packed, int64_t lane_stride, int64_t lanes,
              const typename Multiply::Storage* const* rows, int64_t row_count, int64_t depth,
              float* out, Fetch fetch = {}) {
  for_lane_blocks(lanes, [&](int64_t lane, auto block) {
    int64_t fetch_step = fetch.per_step(row_count / kTileRows<block> * (depth / kStepOf<block>));
    for_tiles<kTileRows<block>>(row_count, [&](int64_t n, auto tile) {
      dot_tile<Multiply, block, tile>(packed + lane, lane_stride, rows + n, depth,
                                      out + n * lane_stride + lane, fetch, fetch_step);
    });
  });
}

// out[c * lane_stride + lane] += sum_n rows[n][c] * weights[n * lane_stride + lane], c < columns.
template <class Multiply>
void accumulate_rows(const typename Multiply::Element* weights, int64_t lane_stride, int64_t lanes,
                     const typename Multiply::Storage* const* rows, int64_t row_count,
                     int64_t columns, float* out) {
  for_lane_blocks(lanes, [&](int64_t lane, auto block) {
    for_tiles<kTileRows<block>>(columns, [&](int64_t c, auto tile) {
      accumulate_tile<Multiply, block, tile>(weights + lane, lane_stride, rows, row_count, c,
                                             out + c * lane_stride + lane);
    });
  });
}

}  // namespace LONGSPARK_ISA
}  // namespace longspark::cpu
