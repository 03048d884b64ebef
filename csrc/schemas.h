// The operators' schemas: one list for the real namespace and for the host emulation's.
// "(a!)" marks what an operator writes. Shapes and meanings are in python/longspark_sglang/ops.
#pragma once

#include <torch/library.h>

namespace longspark {

inline void define_operators(torch::Library& m) {
  m.def(
      "window_index(Tensor req_to_token, Tensor req_rows, Tensor seq_lens, int window)"
      " -> (Tensor, Tensor)");
  m.def(
      "window_index_paged(Tensor kv_indptr, Tensor kv_indices, Tensor kv_last_page_len,"
      " int page_size, int window) -> (Tensor, Tensor)");
  m.def(
      "window_gather(Tensor[] key_pools, Tensor[] value_pools, Tensor rows, Tensor lens,"
      " Tensor seq_lens, Tensor(a!) out_key, Tensor(b!) out_value) -> ()");
  m.def(
      "summary_merge(Tensor queries, Tensor[] key_pools, Tensor[] value_pools, Tensor rows,"
      " Tensor counts, Tensor(a!) state_value, Tensor(b!) state_lse, Tensor slots, float scale)"
      " -> ()");
  m.def(
      "summary_merge_bulk(Tensor queries, Tensor[] key_pools, Tensor[] value_pools, Tensor rows,"
      " Tensor indptr, Tensor(a!) state_value, Tensor(b!) state_lse, Tensor slots, float scale)"
      " -> ()");
  m.def(
      "block_attention(Tensor query, Tensor summary_key, Tensor summary_value, Tensor slots,"
      " Tensor key_pool, Tensor value_pool, Tensor rows, Tensor lens, Tensor block_key,"
      " Tensor block_value, float scale) -> Tensor");
  m.def(
      "markov_step(Tensor base_logits, Tensor prev, Tensor markov_w1, Tensor markov_w2) -> Tensor");
  m.def(
      "draft_sample(Tensor base_logits, Tensor prev, Tensor markov_w1, Tensor markov_w2,"
      " Tensor temperature, Tensor seed, Tensor position, int vocab_limit) -> (Tensor, Tensor)");
  m.def(
      "accept_chain(Tensor target_probs, Tensor draft_tokens, Tensor draft_logq,"
      " Tensor base_logits, Tensor anchors, Tensor markov_w1, Tensor markov_w2,"
      " Tensor temperature, Tensor point_mass, Tensor uniforms, Tensor uniform_final,"
      " Tensor limit, int vocab_limit) -> (Tensor, Tensor)");
  m.def(
      "accept_greedy(Tensor target_tokens, Tensor draft_tokens, Tensor limit)"
      " -> (Tensor, Tensor)");
}

}  // namespace longspark
