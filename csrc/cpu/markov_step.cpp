// markov_step on the CPU. The computation is in vocabulary.h.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "markov.h"

namespace longspark::cpu {
namespace {

using at::Tensor;

Tensor markov_step(const Tensor& base_logits, const Tensor& prev, const Tensor& markov_w1,
                   const Tensor& markov_w2) {
  Tensor out = at::empty(base_logits.sizes(), base_logits.options().dtype(at::kFloat));
  if (out.numel() == 0) return out;
  float* z = out.mutable_data_ptr<float>();
  int64_t vocab = base_logits.size(1);
  MarkovCall call("markov_step", base_logits, prev, markov_w1, markov_w2);
  call.for_units(vocab, [&](const Markov& m, const uint32_t* packed, int64_t, int64_t first,
                            int64_t end, void* scratch) {
    kernels().markov_step(m, packed, first, end, z, vocab, scratch);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(longspark, CPU, m) { m.impl("markov_step", markov_step); }

}  // namespace longspark::cpu
