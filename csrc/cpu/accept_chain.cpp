// accept_chain and accept_greedy on the CPU. See ops/accept_chain.py for what they compute.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "markov.h"

namespace longspark::cpu {
namespace {

using at::Tensor;

constexpr double kResidualFloor = 1e-8;  // RESIDUAL_FLOOR of ops/accept_chain.py

// The weights that a request's next token is drawn from, given out in pieces of kUnitIds.
struct Weights {
  const float* p;                 // the target's row
  const float* scaled = nullptr;  // with a residual: z / temperature
  float top = 0, total = 0;       // and its normaliser
  int64_t without = -1;           // point mass: this id has weight max(p - 1, 0)

  void fill(int64_t first, int64_t end, float* weight) const {
    if (scaled != nullptr) {
      kernels().residual_weights(p, scaled, top, total, first, end, weight);
      return;
    }
    std::copy(p + first, p + end, weight + first);
    if (first <= without && without < end) weight[without] = std::max(p[without] - 1.0f, 0.0f);
  }
};

double sum(const float* weight, int64_t first, int64_t end) {
  double total = 0;
  for (int64_t i = first; i < end; ++i) total += weight[i];
  return total;
}

// The first id whose running sum exceeds uniform * total. `masses` holds each piece's sum and
// `weight` the weights themselves.
int64_t draw(const float* weight, const std::vector<double>& masses, int64_t vocab,
             double uniform) {
  double total = 0;
  for (double mass : masses) total += mass;
  double aim = std::min(uniform, 1.0 - 0x1p-24) * total, before = 0;
  int64_t last = vocab - 1;  // of all ids with a weight, if rounding carries the aim past the end
  for (size_t unit = 0; unit < masses.size(); ++unit) {
    if (masses[unit] <= 0) continue;
    int64_t first = static_cast<int64_t>(unit) * kUnitIds, end = std::min(first + kUnitIds, vocab);
    bool here = before + masses[unit] > aim;
    double running = before;
    for (int64_t i = first; i < end; ++i) {
      if (weight[i] <= 0) continue;
      last = i;
      running += weight[i];
      if (here && running > aim) return i;
    }
    before += masses[unit];
  }
  return last;
}

std::tuple<Tensor, Tensor> accept_chain(const Tensor& target_probs, const Tensor& draft_tokens,
                                        const Tensor& draft_logq, const Tensor& base_logits,
                                        const Tensor& anchors, const Tensor& markov_w1,
                                        const Tensor& markov_w2, const Tensor& temperature,
                                        const Tensor& point_mass, const Tensor& uniforms,
                                        const Tensor& uniform_final, const Tensor& limit,
                                        int64_t vocab_limit) {
  int64_t batch = draft_tokens.size(0), block = draft_tokens.size(1), vocab = target_probs.size(2);
  TORCH_CHECK(1 <= vocab_limit && vocab_limit <= vocab,
              "longspark.accept_chain: vocab_limit must be in 1..", vocab, ", not ", vocab_limit);
  Tensor accepted = at::empty({batch}, limit.options());
  Tensor next = at::empty({batch}, anchors.options());
  if (batch == 0) return {accepted, next};
  Tensor drafts_here = draft_tokens.contiguous(), logq_here = draft_logq.contiguous(),
         anchors_here = anchors.contiguous(), temperature_here = temperature.contiguous(),
         point_here = point_mass.contiguous(), uniforms_here = uniforms.contiguous(),
         final_here = uniform_final.contiguous(), limit_here = limit.contiguous();
  const int64_t* draft = drafts_here.const_data_ptr<int64_t>();
  const float* logq = logq_here.const_data_ptr<float>();
  const float* uniform = uniforms_here.const_data_ptr<float>();
  const int32_t* most = limit_here.const_data_ptr<int32_t>();
  const char* base = static_cast<const char*>(base_logits.const_data_ptr());
  check_range(draft, batch * block, vocab, "accept_chain", "draft_tokens");
  check_range(most, batch, block + 1, "accept_chain", "limit");

  // How many are accepted, and what each next token is drawn from.
  std::vector<Weights> weights(batch);
  std::vector<int64_t> residual, before;  // requests with a residual; the token before that slot
  std::vector<const void*> logits;
  std::vector<float> temperatures;
  int32_t* count = accepted.mutable_data_ptr<int32_t>();
  for (int64_t b = 0; b < batch; ++b) {
    const float* p = target_probs.const_data_ptr<float>() + b * target_probs.stride(0);
    float t = temperature_here.const_data_ptr<float>()[b];
    bool point = point_here.const_data_ptr<bool>()[b] || t <= 0;
    int64_t n = 0;
    for (; n < most[b]; ++n) {
      float q = point ? 1.0f : std::exp(logq[b * block + n]);
      float target = p[n * target_probs.stride(1) + draft[b * block + n]];
      if (!(uniform[b * block + n] * q < target)) break;
    }
    count[b] = static_cast<int32_t>(n);
    weights[b].p = p + n * target_probs.stride(1);
    if (n == most[b]) continue;
    if (point) {
      weights[b].without = draft[b * block + n];
      continue;
    }
    residual.push_back(b);
    before.push_back(n == 0 ? anchors_here.const_data_ptr<int64_t>()[b] : draft[b * block + n - 1]);
    logits.push_back(base + (b * base_logits.stride(0) + n * base_logits.stride(1)) *
                                base_logits.element_size());
    temperatures.push_back(t);
  }

  // q of the rejected slots, all requests in one pass over W2.
  int64_t rows = static_cast<int64_t>(residual.size());
  Tensor scaled = at::empty({rows, vocab}, target_probs.options());
  if (rows > 0) {
    float* x = scaled.mutable_data_ptr<float>();
    std::vector<Draw> draws(MarkovCall::units(vocab_limit) * rows);
    MarkovCall call("accept_chain", logits, base_logits.scalar_type(), before, markov_w1,
                    markov_w2);
    call.for_units(vocab_limit, [&](const Markov& m, const uint32_t* packed, int64_t unit,
                                    int64_t first, int64_t end, void* scratch) {
      kernels().residual_logits(m, temperatures.data(), packed, first, end, x, vocab,
                                &draws[unit * rows], scratch);
    });
    for (int64_t i = 0; i < rows; ++i) {
      std::fill(x + i * vocab + vocab_limit, x + (i + 1) * vocab, -INFINITY);
      Weights& w = weights[residual[i]];
      w.scaled = x + i * vocab;
      w.top = -INFINITY;
      for (size_t d = i; d < draws.size(); d += rows) w.top = std::max(w.top, draws[d].top);
      double total = 0;
      for (size_t d = i; d < draws.size(); d += rows) {
        total += draws[d].total * std::exp(static_cast<double>(draws[d].top) - w.top);
      }
      w.total = static_cast<float>(total);
    }
  }

  Tensor weight = at::empty({batch, vocab}, target_probs.options());
  float* row = weight.mutable_data_ptr<float>();
  int64_t pieces = MarkovCall::units(vocab);
  std::vector<std::vector<double>> masses(batch, std::vector<double>(pieces));
  parallel_units(batch * pieces, 1, [&](int64_t i, void*) {
    int64_t b = i / pieces, first = i % pieces * kUnitIds, end = std::min(first + kUnitIds, vocab);
    weights[b].fill(first, end, row + b * vocab);
    masses[b][i % pieces] = sum(row + b * vocab, first, end);
  });
  for (int64_t b = 0; b < batch; ++b) {
    double total = 0;
    for (double mass : masses[b]) total += mass;
    bool from_residual = weights[b].scaled != nullptr || weights[b].without >= 0;
    if (from_residual && total <= kResidualFloor) {  // p and q are equal up to rounding
      Weights{weights[b].p}.fill(0, vocab, row + b * vocab);
      for (int64_t piece = 0; piece < pieces; ++piece) {
        int64_t first = piece * kUnitIds, end = std::min(first + kUnitIds, vocab);
        masses[b][piece] = sum(row + b * vocab, first, end);
      }
    }
    next.mutable_data_ptr<int64_t>()[b] =
        draw(row + b * vocab, masses[b], vocab, final_here.const_data_ptr<float>()[b]);
  }
  return {accepted, next};
}

std::tuple<Tensor, Tensor> accept_greedy(const Tensor& target_tokens, const Tensor& draft_tokens,
                                         const Tensor& limit) {
  int64_t batch = draft_tokens.size(0), block = draft_tokens.size(1);
  Tensor target_here = target_tokens.contiguous(), drafts_here = draft_tokens.contiguous(),
         limit_here = limit.contiguous();
  const int64_t* target = target_here.const_data_ptr<int64_t>();
  const int64_t* draft = drafts_here.const_data_ptr<int64_t>();
  const int32_t* most = limit_here.const_data_ptr<int32_t>();
  check_range(most, batch, block + 1, "accept_greedy", "limit");
  Tensor accepted = at::empty({batch}, limit.options());
  Tensor next = at::empty({batch}, target_tokens.options());
  for (int64_t b = 0; b < batch; ++b) {
    int32_t n = 0;
    while (n < most[b] && target[b * (block + 1) + n] == draft[b * block + n]) ++n;
    accepted.mutable_data_ptr<int32_t>()[b] = n;
    next.mutable_data_ptr<int64_t>()[b] = target[b * (block + 1) + n];
  }
  return {accepted, next};
}

}  // namespace

TORCH_LIBRARY_IMPL(longspark, CPU, m) {
  m.impl("accept_chain", accept_chain);
  m.impl("accept_greedy", accept_greedy);
}

}  // namespace longspark::cpu
