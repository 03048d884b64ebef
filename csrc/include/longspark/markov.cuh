// Corrected logits z = base + W2 . W1[prev] of 16 requests x 32 tokens, computed by one warp.
//
// With g = lane / 4 and t = lane % 4 a lane ends up with z of requests g and g + 8 at the eight
// tokens 8t .. 8t+7. The product is rounded to the weights' dtype and then to the logits' dtype,
// the sum to the logits' dtype, as the published drafters were evaluated. Its fp32 accumulation
// depends on neither batch nor position, so every operator that needs z gets the same bits.
#pragma once

#include "longspark/launchers.h"
#include "longspark/tensor_core.cuh"
#include "longspark/warp.cuh"

namespace longspark {

constexpr int kMarkovThreads = 256;
constexpr int kMarkovRequests = 16;
constexpr int kMarkovTokens = 32;  // per warp

// Product W2 . W1[prev] on the tensor cores. Columns of the 16 x 8 results are dealt out so that a
// lane gets neighbouring tokens: column n of result j is token 4n + j. The order of the dimensions
// is dealt out too (free in a dot product), so that every load is 16 contiguous bytes.
template <class W>
__device__ __forceinline__ void markov_product_tensor_cores(const Markov& p, int64_t prev_low,
                                                            int64_t prev_high, int first_token,
                                                            float (&product)[2][8]) {
  int g = lane_id() / 4, t = lane_id() % 4;
  const W* w1 = static_cast<const W*>(p.w1);
  const W* w2 = static_cast<const W*>(p.w2);
  float c[4][4] = {};
  for (int k = 8 * t; k < p.rank; k += 32) {
    Words low = {}, high = {};
    if (prev_low >= 0) low = load(reinterpret_cast<const Words*>(w1 + prev_low * p.w1_stride + k));
    if (prev_high >= 0) {
      high = load(reinterpret_cast<const Words*>(w1 + prev_high * p.w1_stride + k));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int token = first_token + 4 * g + j;
      Words row = {};
      if (token < p.vocab) {
        row = load(reinterpret_cast<const Words*>(w2 + token * p.w2_stride + k));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4] = {low.at[2 * half], high.at[2 * half], low.at[2 * half + 1],
                         high.at[2 * half + 1]};
        uint32_t b[2] = {row.at[2 * half], row.at[2 * half + 1]};
        multiply_add(W{}, c[j], a, b);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    product[0][i] = c[i % 4][i / 4];
    product[1][i] = c[i % 4][2 + i / 4];
  }
}

// The same for any rank, alignment and dtype.
template <class W>
__device__ __forceinline__ void markov_product_plain(const Markov& p, int64_t prev_low,
                                                     int64_t prev_high, int first_token,
                                                     float (&product)[2][8]) {
  int first = first_token + 8 * (lane_id() % 4);
  const W* w1 = static_cast<const W*>(p.w1);
  const W* w2 = static_cast<const W*>(p.w2);
  for (int k = 0; k < p.rank; ++k) {
    float low = prev_low >= 0 ? to_float(load(w1 + prev_low * p.w1_stride + k)) : 0.0f;
    float high = prev_high >= 0 ? to_float(load(w1 + prev_high * p.w1_stride + k)) : 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i >= p.vocab) continue;
      float weight = to_float(load(w2 + (first + i) * p.w2_stride + k));
      product[0][i] += low * weight;
      product[1][i] += high * weight;
    }
  }
}

template <class W>
__device__ __forceinline__ float corrected(const Markov& p, float base, float product) {
  float rounded_product = rounded(p.logits_dtype, rounded<W>(product));
  return rounded(p.logits_dtype, base + rounded_product);
}

// z of this lane's two requests (first_request + g and + 8) at its eight tokens; -inf where there
// is no such request, nobody needs its row, or no such token.
template <class W, bool kTensorCores>
__device__ __forceinline__ void markov_tile(const Markov& p, int first_request, int first_token,
                                            float (&z)[2][8]) {
  int64_t prev[2];
  int64_t logits[2];  // where the rows begin
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int b = first_request + lane_id() / 4 + 8 * half;
    int slot = b < p.batch ? (p.slots == nullptr ? 0 : load(p.slots + b)) : -1;
    prev[half] = slot >= 0 ? load(p.prev + b) : -1;
    logits[half] = b * p.logits_stride + slot * p.slot_stride;
  }
  float product[2][8] = {};
  if constexpr (kTensorCores) {
    markov_product_tensor_cores<W>(p, prev[0], prev[1], first_token, product);
  } else {
    markov_product_plain<W>(p, prev[0], prev[1], first_token, product);
  }
  int first = first_token + 8 * (lane_id() % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (prev[half] < 0 || first >= p.vocab) {
#pragma unroll
      for (int i = 0; i < 8; ++i) z[half][i] = minus_infinity();
    } else if (first + 8 <= p.vocab) {
      float base[8];
      load_floats<8>(p.logits_dtype, p.logits, logits[half] + first, p.vector_logits, base);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        z[half][i] = corrected<W>(p, base[i], product[half][i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        z[half][i] = minus_infinity();
        if (first + i < p.vocab) {
          float base = load_float(p.logits_dtype, p.logits, logits[half] + first + i);
          z[half][i] = corrected<W>(p, base, product[half][i]);
        }
      }
    }
  }
}

template <bool value>
struct Bool {
  static constexpr bool kValue = value;
};

// Calls launch_for(W{}, Bool<tensor cores?>{}) with the types that the parameters name.
template <class LaunchFor>
void with_markov_types(const Markov& p, LaunchFor launch_for) {
  switch (p.weights_dtype) {
    case Dtype::kFloat32:
      return launch_for(float{}, Bool<false>{});
    case Dtype::kBfloat16:
      return p.tensor_cores ? launch_for(bf16{}, Bool<true>{}) : launch_for(bf16{}, Bool<false>{});
    case Dtype::kFloat16:
      return p.tensor_cores ? launch_for(fp16{}, Bool<true>{}) : launch_for(fp16{}, Bool<false>{});
  }
}

}  // namespace longspark
