// draft_sample on the CPU. The computation is in vocabulary.h.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "markov.h"

namespace longspark::cpu {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> draft_sample(const Tensor& base_logits, const Tensor& prev,
                                        const Tensor& markov_w1, const Tensor& markov_w2,
                                        const Tensor& temperature, const Tensor& seed,
                                        const Tensor& position, int64_t vocab_limit) {
  TORCH_CHECK(1 <= vocab_limit && vocab_limit <= base_logits.size(1),
              "longspark.draft_sample: vocab_limit must be in 1..", base_logits.size(1), ", not ",
              vocab_limit);
  int64_t batch = base_logits.size(0);
  Tensor tokens = at::empty({batch}, prev.options());
  Tensor logq = at::empty({batch}, temperature.options());
  if (batch == 0) return {tokens, logq};
  Tensor temperatures = temperature.contiguous(), seeds = seed.contiguous(),
         positions = position.contiguous();
  Sampling sampling{temperatures.const_data_ptr<float>(), seeds.const_data_ptr<int64_t>(),
                    positions.const_data_ptr<int64_t>()};
  MarkovCall call("draft_sample", base_logits, prev, markov_w1, markov_w2);
  std::vector<Draw> draws(MarkovCall::units(vocab_limit) * batch);
  call.for_units(vocab_limit, [&](const Markov& m, const uint32_t* packed, int64_t unit,
                                  int64_t first, int64_t end, void* scratch) {
    kernels().draft_sample(m, sampling, packed, first, end, &draws[unit * batch], scratch);
  });

  int64_t* token = tokens.mutable_data_ptr<int64_t>();
  float* log_probability = logq.mutable_data_ptr<float>();
  for (int64_t b = 0; b < batch; ++b) {
    Draw best;
    float top = best.top;
    for (size_t i = b; i < draws.size(); i += batch) {
      if (draws[i].score > best.score) best = draws[i];  // strictly: a tie keeps the lower id
      top = std::max(top, draws[i].top);
    }
    token[b] = best.token;
    log_probability[b] = 0;
    if (sampling.temperature[b] <= 0) continue;
    double total = 0;
    for (size_t i = b; i < draws.size(); i += batch) {
      total += draws[i].total * std::exp(static_cast<double>(draws[i].top) - top);
    }
    log_probability[b] = static_cast<float>(best.scaled - top - std::log(total));
  }
  return {tokens, logq};
}

}  // namespace

TORCH_LIBRARY_IMPL(longspark, CPU, m) { m.impl("draft_sample", draft_sample); }

}  // namespace longspark::cpu
