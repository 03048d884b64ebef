// Exact acceptance: which draft tokens stand, and the token after them.
//
// Four launches: decide (how many tokens stand), logits (corrected logits of the rejected slot,
// only for requests that need the draft distribution there), weigh (masses of the residual, tile by
// tile), draw (inverse of the cumulative sum). Requests differ in what they need; what a launch has
// no use for is skipped on the device, so that the host never has to know.
#pragma once

#include "longspark/markov.cuh"

namespace longspark {

constexpr float kResidualFloor = 1e-8f;
constexpr float kBelowOne = 0.99999994f;  // the largest float below 1
constexpr int kTileThreads = 256;
constexpr int kTokensPerThread = kTileTokens / kTileThreads;

__device__ __forceinline__ bool is_point_mass(const AcceptChain& p, int b) {
  return load(p.point_mass + b) || !(load(p.temperature + b) > 0.0f);
}

// One warp per request.
__global__ void __launch_bounds__(32) accept_decide_kernel(AcceptChain p) {
  int b = blockIdx.x;
  bool point = is_point_mass(p, b);
  int limit = load(p.limit + b);
  const int64_t* tokens = p.draft_tokens + static_cast<int64_t>(b) * p.block;
  int accepted = limit;
  for (int first = 0; first < limit; first += 32) {
    int j = first + lane_id();
    bool rejects = false;
    if (j < limit) {
      int64_t row = static_cast<int64_t>(b) * (p.block + 1) + j;
      float target = load(p.target_probs + row * p.markov.vocab + load(tokens + j));
      int64_t slot = static_cast<int64_t>(b) * p.block + j;
      float q = point ? 1.0f : expf(load(p.draft_logq + slot));
      rejects = !(load(p.uniforms + slot) * q < target);
    }
    unsigned rejecting = __ballot_sync(kAllLanes, rejects);
    if (rejecting) {
      accepted = first + __ffs(rejecting) - 1;
      break;
    }
  }
  if (lane_id() > 0) return;
  store(p.accepted + b, accepted);
  store(p.slots + b, accepted < limit && !point ? accepted : -1);
  store(p.prev + b, accepted == 0 ? load(p.anchors + b) : load(tokens + accepted - 1));
}

struct LseShared {
  Lse at[kMarkovThreads / 32][kMarkovRequests];
};

// Corrected logits of the rejected slots, and the logsumexp of logits / T, range by range.
template <class W, bool kTensorCores>
__global__ void __launch_bounds__(kMarkovThreads) accept_logits_kernel(AcceptChain p) {
  LONGSPARK_SHARED(LseShared, shared);
  int first_request = blockIdx.x * kMarkovRequests;
  int asked = first_request + lane_id() % kMarkovRequests;
  bool needed = asked < p.markov.batch && load(p.slots + asked) >= 0;
  if (__ballot_sync(kAllLanes, needed) == 0) return;  // the same in every warp of the block

  float inverse[2];
  Lse sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int b = first_request + lane_id() / 4 + 8 * half;
    inverse[half] = b < p.markov.batch ? 1.0f / load(p.temperature + b) : 0.0f;
    sum[half] = lse_of_nothing();
  }
  for (int i = warp_id(); i < kRangeTokens / kMarkovTokens; i += kMarkovThreads / 32) {
    int first_token = blockIdx.y * kRangeTokens + i * kMarkovTokens;
    float z[2][8];
    markov_tile<W, kTensorCores>(p.markov, first_request, first_token, z);
    int first = first_token + 8 * (lane_id() % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int b = first_request + lane_id() / 4 + 8 * half;
      if (b >= p.markov.batch || load(p.slots + b) < 0) continue;
      int64_t out = static_cast<int64_t>(b) * p.markov.vocab + first;
      Lse part = lse_of_nothing();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first + i < p.markov.vocab) {
          store_float(p.markov.logits_dtype, p.logits, out + i, z[half][i]);
        }
        if (first + i < p.vocab_limit) part.top = fmaxf(part.top, z[half][i] * inverse[half]);
      }
      if (part.top == minus_infinity()) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first + i < p.vocab_limit) part.total += expf(z[half][i] * inverse[half] - part.top);
      }
      sum[half] = lse_merge(sum[half], part);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      sum[half] = lse_merge(sum[half], lse_from_lane_xor(sum[half], lanes));
    }
    if (lane_id() % 4 == 0) store(&shared.at[warp_id()][lane_id() / 4 + 8 * half], sum[half]);
  }
  __syncthreads();
  int b = first_request + threadIdx.x;
  if (threadIdx.x < kMarkovRequests && b < p.markov.batch) {
    Lse all = load(&shared.at[0][threadIdx.x]);
    for (int i = 1; i < kMarkovThreads / 32; ++i) {
      all = lse_merge(all, load(&shared.at[i][threadIdx.x]));
    }
    store(p.partials + static_cast<int64_t>(b) * gridDim.y + blockIdx.y, all);
  }
}

// What the final draw of one request is made from.
struct DrawSource {
  int64_t row;       // of target_probs
  bool is_rejected;  // else the target distribution itself is drawn from
  bool is_point;
  int64_t token;  // the rejected draft token
  float inverse_temperature, lse;
};

__device__ __forceinline__ DrawSource draw_source(const AcceptChain& p, int b) {
  int accepted = load(p.accepted + b);
  DrawSource source;
  source.row = static_cast<int64_t>(b) * (p.block + 1) + accepted;
  source.is_rejected = accepted < load(p.limit + b);
  source.is_point = is_point_mass(p, b);
  source.token =
      source.is_rejected ? load(p.draft_tokens + static_cast<int64_t>(b) * p.block + accepted) : -1;
  source.inverse_temperature = 1.0f / load(p.temperature + b);
  source.lse = 0.0f;
  return source;
}

// Target probability of a token, and max(p - q, 0).
__device__ __forceinline__ TileMass token_mass(const AcceptChain& p, const DrawSource& source,
                                               int b, int token) {
  if (token >= p.markov.vocab) return {0.0f, 0.0f};
  float target = load(p.target_probs + source.row * p.markov.vocab + token);
  if (!source.is_rejected) return {0.0f, target};
  float q = 0.0f;
  if (source.is_point) {
    q = token == source.token ? 1.0f : 0.0f;
  } else if (token < p.vocab_limit) {
    int64_t at = static_cast<int64_t>(b) * p.markov.vocab + token;
    float z = load_float(p.markov.logits_dtype, p.logits, at);
    q = expf(z * source.inverse_temperature - source.lse);
  }
  return {fmaxf(target - q, 0.0f), target};
}

struct WeighShared {
  PerWarp<Lse> lse;
  PerWarp<TileMass> mass;
};

// One tile of the vocabulary of one request.
__global__ void __launch_bounds__(kTileThreads) accept_weigh_kernel(AcceptChain p, int ranges) {
  LONGSPARK_SHARED(WeighShared, shared);
  int tile = blockIdx.x, b = blockIdx.y;
  DrawSource source = draw_source(p, b);
  if (source.is_rejected && !source.is_point) {
    Lse all = lse_of_nothing();
    for (int i = threadIdx.x; i < ranges; i += kTileThreads) {
      all = lse_merge(all, load(p.partials + static_cast<int64_t>(b) * ranges + i));
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) all = lse_merge(all, lse_from_lane_xor(all, lanes));
    if (lane_id() == 0) store(&shared.lse.at[warp_id()], all);
    __syncthreads();
    all = load(&shared.lse.at[0]);
    for (int i = 1; i < kTileThreads / 32; ++i) all = lse_merge(all, load(&shared.lse.at[i]));
    source.lse = all.top + logf(all.total);
    if (tile == 0 && threadIdx.x == 0) store(p.lse + b, source.lse);
  }
  TileMass mass = {0.0f, 0.0f};
  int first = tile * kTileTokens + threadIdx.x * kTokensPerThread;
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    TileMass one = token_mass(p, source, b, first + i);
    mass.residual += one.residual;
    mass.target += one.target;
  }
  mass.residual = warp_sum(mass.residual);
  mass.target = warp_sum(mass.target);
  if (lane_id() == 0) store(&shared.mass.at[warp_id()], mass);
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < kTileThreads / 32; ++i) {
    TileMass other = load(&shared.mass.at[i]);
    mass.residual += other.residual;
    mass.target += other.target;
  }
  store(p.masses + static_cast<int64_t>(b) * gridDim.x + tile, mass);
}

struct DrawShared {
  int tile;
  bool from_residual;
  float aim;
  PerWarp<float> before;
  PerWarp<int> chosen, last;
};

// One block per request. A token is drawn in two steps: the tile in which the cumulative sum passes
// the aim, then the token within it. Wherever rounding leaves no token behind the aim, the last one
// with any weight is taken, so a token of weight 0 is never drawn.
__global__ void __launch_bounds__(kTileThreads) accept_draw_kernel(AcceptChain p, int tiles) {
  LONGSPARK_SHARED(DrawShared, shared);
  int b = blockIdx.x;
  DrawSource source = draw_source(p, b);
  if (source.is_rejected && !source.is_point) source.lse = load(p.lse + b);

  if (warp_id() == 0) {
    const TileMass* masses = p.masses + static_cast<int64_t>(b) * tiles;
    int run = ceil_div(tiles, 32), begin = lane_id() * run;
    int end = begin + run < tiles ? begin + run : tiles;
    double residual = 0.0, target = 0.0;
    for (int i = begin; i < end; ++i) {
      residual += load(&masses[i].residual);
      target += load(&masses[i].target);
    }
    bool from_residual = source.is_rejected && warp_sum(residual) > kResidualFloor;
    double mine = from_residual ? residual : target;
    double through = warp_running_sum(mine);
    double total = __shfl_sync(kAllLanes, through, 31);
    double aim = fminf(load(p.uniform_final + b), kBelowOne) * total;

    double running = through - mine, before = running;
    int chosen = -1, last = -1;
    for (int i = begin; i < end; ++i) {
      float mass = from_residual ? load(&masses[i].residual) : load(&masses[i].target);
      if (mass > 0.0f) {
        last = i;
        if (chosen < 0) {
          before = running;
          if (running + mass > aim) chosen = i;
        }
      }
      running += mass;
    }
    unsigned found = __ballot_sync(kAllLanes, chosen >= 0);
    unsigned weighty = __ballot_sync(kAllLanes, last >= 0);
    // The first lane that passes the aim, else the last that has any weight, else (no weight at
    // all) the first.
    int from = found ? __ffs(found) - 1 : 0;
    if (!found) {
      for (int lane = 0; lane < 32; ++lane) from = (weighty >> lane) & 1 ? lane : from;
    }
    if (lane_id() == from) {
      int tile = found ? chosen : last;
      store(&shared.tile, tile < 0 ? 0 : tile);
      store(&shared.from_residual, from_residual);
      store(&shared.aim, static_cast<float>(aim - before));
    }
  }
  __syncthreads();

  bool from_residual = load(&shared.from_residual);
  float aim = load(&shared.aim);
  int first = load(&shared.tile) * kTileTokens + threadIdx.x * kTokensPerThread;
  float weight[kTokensPerThread], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    TileMass mass = token_mass(p, source, b, first + i);
    weight[i] = from_residual ? mass.residual : mass.target;
    sum += weight[i];
  }
  float through = warp_running_sum(sum);
  if (lane_id() == 31) store(&shared.before.at[warp_id()], through);
  __syncthreads();
  float running = through - sum;
  for (int i = 0; i < warp_id(); ++i) running += load(&shared.before.at[i]);

  int chosen = INT32_MAX, last = -1;
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    running += weight[i];
    if (weight[i] <= 0.0f) continue;
    last = first + i;
    if (chosen == INT32_MAX && running > aim) chosen = first + i;
  }
  chosen = -warp_max(-chosen);
  last = warp_max(last);
  if (lane_id() == 0) {
    store(&shared.chosen.at[warp_id()], chosen);
    store(&shared.last.at[warp_id()], last);
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < kTileThreads / 32; ++i) {
    int other = load(&shared.chosen.at[i]);
    chosen = other < chosen ? other : chosen;
    other = load(&shared.last.at[i]);
    last = other > last ? other : last;
  }
  if (chosen == INT32_MAX) chosen = last < 0 ? 0 : last;
  store(p.next_token + b, static_cast<int64_t>(chosen));
}

constexpr int kGreedyThreads = 128;

// One thread per request.
__global__ void __launch_bounds__(kGreedyThreads) accept_greedy_kernel(AcceptGreedy p) {
  int b = blockIdx.x * kGreedyThreads + threadIdx.x;
  if (b >= p.batch) return;
  const int64_t* target = p.target_tokens + static_cast<int64_t>(b) * (p.block + 1);
  const int64_t* draft = p.draft_tokens + static_cast<int64_t>(b) * p.block;
  int limit = load(p.limit + b), accepted = 0;
  while (accepted < limit && load(draft + accepted) == load(target + accepted)) ++accepted;
  store(p.accepted + b, accepted);
  store(p.next_token + b, load(target + accepted));
}

}  // namespace longspark
