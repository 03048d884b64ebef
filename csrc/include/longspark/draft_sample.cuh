// Markov correction, Gumbel-max (or greedy) draw and its log probability, without storing logits.
#pragma once

#include "longspark/gumbel.cuh"
#include "longspark/markov.cuh"

namespace longspark {

constexpr int kDraftWarps = kMarkovThreads / 32;

__device__ __forceinline__ DraftPartial draft_partial_of_nothing() {
  return {minus_infinity(), 0.0f, minus_infinity(), 0.0f, INT32_MAX};
}

// Ties go to the lowest id.
__device__ __forceinline__ DraftPartial draft_merge(const DraftPartial& a, const DraftPartial& b) {
  bool b_wins = b.score > a.score || (b.score == a.score && b.token < a.token);
  Lse lse = lse_merge({a.top, a.total}, {b.top, b.total});
  return {b_wins ? b.score : a.score, b_wins ? b.scaled : a.scaled, lse.top, lse.total,
          b_wins ? b.token : a.token};
}

__device__ __forceinline__ DraftPartial draft_from_lane_xor(const DraftPartial& x, int lanes) {
  return {__shfl_xor_sync(kAllLanes, x.score, lanes), __shfl_xor_sync(kAllLanes, x.scaled, lanes),
          __shfl_xor_sync(kAllLanes, x.top, lanes), __shfl_xor_sync(kAllLanes, x.total, lanes),
          __shfl_xor_sync(kAllLanes, x.token, lanes)};
}

// Eight tokens of one request. `begun` is the hash of seed and position; greedy rows need neither
// noise nor normaliser.
__device__ __forceinline__ DraftPartial draft_of_eight(const float (&z)[8], int first, int limit,
                                                       float temperature, uint32_t begun) {
  DraftPartial best = draft_partial_of_nothing();
  bool greedy = !(temperature > 0.0f);
  float inverse = greedy ? 1.0f : 1.0f / temperature;
  float scaled[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    scaled[i] = first + i < limit ? z[i] * inverse : minus_infinity();
    best.top = fmaxf(best.top, scaled[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first + i >= limit) continue;
    float score = scaled[i];
    if (!greedy) {
      score += gumbel_noise(hash_end(begun, first + i));
      if (best.top > minus_infinity()) best.total += expf(scaled[i] - best.top);
    }
    if (score > best.score || (best.token == INT32_MAX && score == score)) {
      best.score = score;
      best.scaled = scaled[i];
      best.token = first + i;
    }
  }
  return best;
}

struct DraftShared {
  DraftPartial at[kDraftWarps][kMarkovRequests];
};

// One range of the vocabulary for 16 requests -> one partial result per request.
template <class W, bool kTensorCores>
__global__ void __launch_bounds__(kMarkovThreads) draft_scan_kernel(DraftSample p) {
  LONGSPARK_SHARED(DraftShared, shared);
  int first_request = blockIdx.x * kMarkovRequests;
  float temperature[2];
  uint32_t begun[2];
  DraftPartial best[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int b = first_request + lane_id() / 4 + 8 * half;
    bool exists = b < p.markov.batch;
    temperature[half] = exists ? load(p.temperature + b) : 0.0f;
    begun[half] = exists ? hash_begin(load(p.seed + b), load(p.position + b)) : 0;
    best[half] = draft_partial_of_nothing();
  }
  for (int i = warp_id(); i < kRangeTokens / kMarkovTokens; i += kDraftWarps) {
    int first_token = blockIdx.y * kRangeTokens + i * kMarkovTokens;
    float z[2][8];
    markov_tile<W, kTensorCores>(p.markov, first_request, first_token, z);
    int first = first_token + 8 * (lane_id() % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      best[half] = draft_merge(best[half], draft_of_eight(z[half], first, p.vocab_limit,
                                                          temperature[half], begun[half]));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      best[half] = draft_merge(best[half], draft_from_lane_xor(best[half], lanes));
    }
    if (lane_id() % 4 == 0) store(&shared.at[warp_id()][lane_id() / 4 + 8 * half], best[half]);
  }
  __syncthreads();
  int b = first_request + threadIdx.x;
  if (threadIdx.x < kMarkovRequests && b < p.markov.batch) {
    DraftPartial all = load(&shared.at[0][threadIdx.x]);
    for (int i = 1; i < kDraftWarps; ++i) all = draft_merge(all, load(&shared.at[i][threadIdx.x]));
    store(p.partials + static_cast<int64_t>(b) * gridDim.y + blockIdx.y, all);
  }
}

constexpr int kDraftFinishThreads = 128;

// One block per request: the partial results of all ranges -> token and log probability.
__global__ void __launch_bounds__(kDraftFinishThreads)
    draft_finish_kernel(DraftSample p, int ranges) {
  LONGSPARK_SHARED(PerWarp<DraftPartial>, shared);
  int b = blockIdx.x;
  DraftPartial all = draft_partial_of_nothing();
  for (int i = threadIdx.x; i < ranges; i += kDraftFinishThreads) {
    all = draft_merge(all, load(p.partials + static_cast<int64_t>(b) * ranges + i));
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    all = draft_merge(all, draft_from_lane_xor(all, lanes));
  }
  if (lane_id() == 0) store(&shared.at[warp_id()], all);
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < kDraftFinishThreads / 32; ++i) all = draft_merge(all, load(&shared.at[i]));
  bool greedy = !(load(p.temperature + b) > 0.0f);
  // No token at all is left only where every logit is NaN; any id keeps the next lookup in bounds.
  store(p.token + b, static_cast<int64_t>(all.token == INT32_MAX ? 0 : all.token));
  store(p.logq + b, greedy ? 0.0f : all.scaled - all.top - logf(all.total));
}

}  // namespace longspark
