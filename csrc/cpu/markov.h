// The Markov correction of one call, shared by the operators that need it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "isa.h"
#include "parallel.h"
#include "tensors.h"

namespace longspark::cpu {

// Vocabulary ids per unit: enough that a unit outweighs its start, few enough to share out evenly.
constexpr int64_t kUnitIds = 1024;

// Holds everything that a `Markov` points to.
class MarkovCall {
 public:
  // Row b of the logits starts at base[b]; `prev` [batch] is the token before.
  MarkovCall(const char* op, std::vector<const void*> base, at::ScalarType logit_type,
             std::vector<int64_t> prev, const at::Tensor& w1, const at::Tensor& w2)
      : base_(std::move(base)), prev_(std::move(prev)) {
    check_range(prev_.data(), static_cast<int64_t>(prev_.size()), w1.size(0), op, "prev");
    markov_.logit_type = type_of(logit_type);
    markov_.weight_type = type_of(w1.scalar_type());
    markov_.base = base_.data();
    markov_.prev = prev_.data();
    markov_.w1 = w1.const_data_ptr();
    markov_.w1_stride = w1.stride(0);
    markov_.w2 = w2.const_data_ptr();
    markov_.w2_stride = w2.stride(0);
    markov_.batch = static_cast<int64_t>(base_.size());
    markov_.rank = w1.size(1);
    markov_.vocab = w2.size(0);
    packed_.resize(kernels().markov_packed_words(markov_));
    kernels().markov_pack(markov_, packed_.data());
  }
  // All rows of [B, V] logits.
  MarkovCall(const char* op, const at::Tensor& logits, const at::Tensor& prev, const at::Tensor& w1,
             const at::Tensor& w2)
      : MarkovCall(op, rows_of_logits(logits), logits.scalar_type(), listed(prev), w1, w2) {}

  // f(markov, packed, unit, first id, end, scratch) over the ids [0, ids).
  template <class F>
  void for_units(int64_t ids, const F& f) const {
    parallel_units(units(ids), kernels().markov_scratch(markov_), [&](int64_t unit, void* scratch) {
      int64_t first = unit * kUnitIds;
      f(markov_, packed_.data(), unit, first, std::min(first + kUnitIds, ids), scratch);
    });
  }
  static int64_t units(int64_t ids) { return (ids + kUnitIds - 1) / kUnitIds; }

 private:
  static std::vector<const void*> rows_of_logits(const at::Tensor& logits) {
    std::vector<const void*> rows;
    const char* data = static_cast<const char*>(logits.const_data_ptr());
    for (int64_t b = 0; b < logits.size(0); ++b) {
      rows.push_back(data + b * logits.stride(0) * logits.element_size());
    }
    return rows;
  }
  static std::vector<int64_t> listed(const at::Tensor& tensor) {
    at::Tensor here = tensor.contiguous();
    const int64_t* data = here.const_data_ptr<int64_t>();
    return {data, data + here.numel()};
  }

  std::vector<const void*> base_;
  std::vector<int64_t> prev_;
  std::vector<uint32_t> packed_;
  Markov markov_{};
};

}  // namespace longspark::cpu
