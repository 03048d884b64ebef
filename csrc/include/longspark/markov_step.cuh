// Corrected logits of one slot, written out.
#pragma once

#include "longspark/markov.cuh"

namespace longspark {

// A block does 16 requests x 256 tokens. Requests vary fastest over the grid, so that blocks that
// read the same rows of W2 run together and all but the first find them in the cache.
template <class W, bool kTensorCores>
__global__ void __launch_bounds__(kMarkovThreads) markov_step_kernel(MarkovStep p) {
  int first_request = blockIdx.x * kMarkovRequests;
  int first_token = blockIdx.y * (kMarkovThreads / 32 * kMarkovTokens) + warp_id() * kMarkovTokens;
  float z[2][8];
  markov_tile<W, kTensorCores>(p.markov, first_request, first_token, z);
  int first = first_token + 8 * (lane_id() % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int b = first_request + lane_id() / 4 + 8 * half;
    if (b >= p.markov.batch) continue;
    float* out = p.out + static_cast<int64_t>(b) * p.markov.vocab + first;
    if (p.markov.vocab % 4 == 0 && first + 8 <= p.markov.vocab) {
      store(reinterpret_cast<Vec<float, 4>*>(out),
            Vec<float, 4>{{z[half][0], z[half][1], z[half][2], z[half][3]}});
      store(reinterpret_cast<Vec<float, 4>*>(out + 4),
            Vec<float, 4>{{z[half][4], z[half][5], z[half][6], z[half][7]}});
    } else {
      for (int i = 0; i < 8; ++i) {
        if (first + i < p.markov.vocab) store(out + i, z[half][i]);
      }
    }
  }
}

}  // namespace longspark
