// SGLang's seeded Gumbel noise, in fp32.
//
// The hash is the same bit for bit (python/longspark_sglang/ops/gumbel.py). The two logarithms are
// taken in fp32, each where fp32 resolves it: near 1 the uniform is represented by its distance
// from 1. The noise is within 2e-6 of the float64 one, so a draw differs from SGLang's only where
// two tokens are that close.
#pragma once

#include "longspark/types.cuh"

namespace longspark {

__device__ __forceinline__ uint32_t rotate_left(uint32_t x, int bits) {
  return (x << bits) | (x >> (32 - bits));
}
__device__ __forceinline__ uint32_t hash_scramble(uint32_t word) {
  return rotate_left(word * 0xCC9E2D51u, 15) * 0x1B873593u;
}
__device__ __forceinline__ uint32_t hash_absorb(uint32_t h, uint32_t scrambled) {
  return rotate_left(h ^ scrambled, 13) * 5 + 0xE6546B64u;
}

// The part of the hash that all tokens of one draw share.
__device__ __forceinline__ uint32_t hash_begin(int64_t seed, int64_t position) {
  uint32_t h = hash_absorb(0, hash_scramble(static_cast<uint32_t>(seed)));
  h = hash_absorb(h, hash_scramble(static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)));
  return hash_absorb(h, hash_scramble(static_cast<uint32_t>(position)));
}

__device__ __forceinline__ uint32_t hash_end(uint32_t begun, int token) {
  uint32_t h = hash_absorb(begun, hash_scramble(static_cast<uint32_t>(token))) ^ 16;
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

__device__ __forceinline__ float gumbel_noise(uint32_t hash) {
  if (hash == 0) return -709.7827f;  // -ln of the largest double, where SGLang clamps
  constexpr float kUnit = 2.3283064370807974e-10f;  // 1 / (2^32 - 1)
  float minus_log = hash < 0x80000000u ? -logf(static_cast<float>(hash) * kUnit)
                                       : -log1pf(-static_cast<float>(~hash) * kUnit);
  return -logf(fmaxf(minus_log, kUnit));
}

}  // namespace longspark
