// What the CPU kernels take and the table through which they are called: raw pointers, no torch.
//
// Every kernel does one *unit* of an operator, independent of the others; the operator's .cpp file
// decides how many there are and spreads them over threads. All strides are in elements.
#pragma once

#include <cstdint>

namespace longspark::cpu {

enum class Type { kFloat, kBf16, kHalf };

// Rows of one head of a K or V pool: the row with id t lies at
// data + (t / page_size) * page_stride + (t % page_size) * row_stride + head * head_stride.
struct Pool {
  const void* data;
  int64_t page_size, page_stride, row_stride, head_stride;
};

struct PagedAttention {
  Type type;          // of query, pools and out
  const void* query;  // [T, Hq, head_dim]
  int64_t query_stride, query_head_stride;
  void* out;  // [T, Hq, value_dim], contiguous
  Pool keys, values;
  const int32_t* req_to_token;
  int64_t table_stride;
  int64_t heads, kv_heads, head_dim, value_dim;
  float scale, softcap;  // softcap 0: none
  bool causal;
  int64_t window;  // rows with query position - key position > window aren't seen; -1: all
};

// Query rows [first_row, first_row + rows) of one request, all heads of KV heads
// [first_head, first_head + heads), against the keys of chunks [first_chunk, last_chunk).
struct PagedAttentionUnit {
  int64_t request_row;  // row of req_to_token
  int64_t query_row;    // of first_row, in the flat query
  int64_t position;     // of first_row, in the request
  int64_t rows;
  int64_t kv_len;
  int64_t first_head, heads;
  int64_t first_chunk, last_chunk;
  float* partial;  // null: write to out; else leave [heads][lanes * (value_dim + 2)] here
};

// The drafter's block over [summary | window | block], one request and KV head per unit.
struct BlockAttention {
  Type type;          // of query, keys, values, out
  const void* query;  // [B, K, Hq, d]
  int64_t query_strides[3];
  const void* summary_key;  // [Hq, R, d]
  int64_t summary_key_strides[2];
  const float* summary_value;  // [S, Hq, R, d]
  int64_t summary_value_strides[3];
  const int64_t* slots;  // [B]
  Pool keys, values;
  const int32_t* rows;  // [B, W]
  int64_t rows_stride;
  const int32_t* lens;    // [B]
  const void* block_key;  // [B, K, Hkv, d]
  int64_t block_key_strides[3];
  const void* block_value;  // [B, K, Hkv, d]
  int64_t block_value_strides[3];
  void* out;  // [B, K, Hq, d], contiguous
  int64_t block, heads, kv_heads, head_dim, summary, window;
  float scale;
};

struct SummaryMerge {
  Type type;            // of queries and pools
  const void* queries;  // [L, Hq, R, d]
  int64_t query_strides[3];
  const Pool* keys;    // [L]
  const Pool* values;  // [L]
  float* state_value;  // [S, L, Hq, R, d]
  int64_t value_strides[4];
  float* state_lse;  // [S, L, Hq, R], natural log
  int64_t lse_strides[4];
  int64_t heads, kv_heads, slots_per_head, head_dim;
  float scale;
};

struct SummaryMergeUnit {
  int64_t layer, kv_head, state_row;
  const int32_t* ids;  // rows to merge
  int64_t count;       // at least 1
};

// Corrected logits of one slot: z[b] = base[b] + W2 W1[prev[b]].
struct Markov {
  Type logit_type, weight_type;
  const void* const* base;  // [batch] rows of V
  const int64_t* prev;      // [batch]
  const void* w1;           // [V, rank]
  int64_t w1_stride;
  const void* w2;  // [V, rank]
  int64_t w2_stride;
  int64_t batch, rank, vocab;
};

struct Sampling {
  const float* temperature;  // [batch], 0: greedy
  const int64_t* seed;       // [batch]
  const int64_t* position;   // [batch]
};

// The best candidate among the ids seen so far, and the normaliser of softmax(z / temperature).
struct Draw {
  double score = -__builtin_inf();
  int64_t token = 0;
  float scaled = 0;               // z / temperature of token
  float top = -__builtin_inff();  // largest z / temperature
  float total = 0;                // sum of exp(z / temperature - top)
};

struct Kernels {
  const char* name;

  int64_t attention_chunk_rows;  // positions per chunk of paged attention
  int64_t (*paged_attention_scratch)(const PagedAttention&, int64_t rows, int64_t heads);
  void (*paged_attention)(const PagedAttention&, const PagedAttentionUnit&, void* scratch);
  // Merges the partial results of all chunks of a unit's rows and heads, in chunk order.
  void (*paged_attention_merge)(const PagedAttention&, const PagedAttentionUnit&,
                                const float* const* partials, int64_t count, void* scratch);

  int64_t (*block_attention_scratch)(const BlockAttention&);
  void (*block_attention)(const BlockAttention&, int64_t unit, void* scratch);

  int64_t (*summary_merge_scratch)(const SummaryMerge&);
  void (*summary_merge)(const SummaryMerge&, const SummaryMergeUnit&, void* scratch);

  // The three below do ids [first, end) for all requests; `packed` is made once per call.
  int64_t (*markov_packed_words)(const Markov&);
  void (*markov_pack)(const Markov&, uint32_t* packed);
  int64_t (*markov_scratch)(const Markov&);
  void (*markov_step)(const Markov&, const uint32_t* packed, int64_t first, int64_t end, float* out,
                      int64_t out_stride, void* scratch);
  void (*draft_sample)(const Markov&, const Sampling&, const uint32_t* packed, int64_t first,
                       int64_t end, Draw* draws, void* scratch);
  void (*residual_logits)(const Markov&, const float* temperature, const uint32_t* packed,
                          int64_t first, int64_t end, float* scaled, int64_t stride, Draw* draws,
                          void* scratch);
  void (*residual_weights)(const float* p, const float* scaled, float top, float total,
                           int64_t first, int64_t end, float* weight);
};

}  // namespace longspark::cpu
