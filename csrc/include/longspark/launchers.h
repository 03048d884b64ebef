// What each operator's kernels take and the function that launches them: raw pointers, no torch, so
// that the bindings and the kernels are compiled apart. Strides are in elements. Pointers name
// memory of the GPU (of the host under emulation). Shapes are in brackets; logarithms are natural.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace longspark {

using Stream = CUstream_st*;

enum class Dtype { kFloat32, kBfloat16, kFloat16 };

// Tapped layers that one launch can name: their pointers travel as kernel parameters, so that a
// captured graph needs no table in device memory.
constexpr int kMaxLayers = 64;

// How a pool lies in memory. Row t of head m begins at
// (t / page_size) * page_stride + (t % page_size) * row_stride + m * head_stride.
// A flat pool [N, Hkv, d] has page_size 1; NHD and HND pages differ in their strides only.
struct PoolLayout {
  int page_size;
  int64_t page_stride, row_stride, head_stride;
};

// The pools of all tapped layers: one layout, a pair of pointers each.
struct LayerPools {
  const void* keys[kMaxLayers];
  const void* values[kMaxLayers];
  PoolLayout layout;
};

// ---- The window ---------------------------------------------------------------------------------

struct WindowIndex {
  const int32_t* req_to_token;  // [requests, width], rows table_stride apart
  int64_t table_stride;
  const int64_t* req_rows;  // [batch]
  const int64_t* seq_lens;  // [batch]
  int batch, window;
  int32_t* rows;  // [batch, window], the unused tail 0
  int32_t* lens;  // [batch]
};
void window_index(const WindowIndex& p, Stream stream);

struct WindowIndexPaged {
  const int32_t* kv_indptr;         // [batch + 1]
  const int32_t* kv_indices;        // page ids
  const int32_t* kv_last_page_len;  // [batch], ignored for a request without pages
  int batch, window, page_size;
  int32_t* rows;  // [batch, window], the unused tail 0
  int32_t* lens;  // [batch]
};
void window_index_paged(const WindowIndexPaged& p, Stream stream);

// Dtypes don't matter to a copy: everything here is counted in units of unit_bytes (2, 4, 8 or 16).
struct WindowGather {
  LayerPools pools;
  const int32_t* rows;  // [batch, window], rows rows_stride apart
  int64_t rows_stride;
  const int32_t* lens;      // [batch], 0..window
  const int64_t* seq_lens;  // [batch]
  int layers, batch, window, kv_heads;
  int units_per_head;  // d elements
  void* out_key;       // [layers, batch, window, kv_heads, d], contiguous
  void* out_value;
  int unit_bytes;
};
void window_gather(const WindowGather& p, Stream stream);

// ---- The summary
// ---------------------------------------------------------------------------------

// The learned queries and the state they accumulate. R is `slots`, the summary slots of a head.
struct Summary {
  Dtype dtype;          // of queries and pools
  const void* queries;  // [layers, heads, slots, dim], contiguous
  LayerPools pools;
  int layers, heads, kv_heads, slots, dim;
  float scale;
  float* state_value;  // [states, layers, heads, slots, dim]; slots and dim contiguous
  float* state_lse;    // [states, layers, heads, slots]; slots contiguous
  int64_t value_state_stride, value_layer_stride, value_head_stride;
  int64_t lse_state_stride, lse_layer_stride, lse_head_stride;
  const int64_t* state_rows;  // [batch]
  int batch;
  bool vector_rows;  // rows of pools and queries are aligned to 4 elements, dim is a multiple of 4
};

struct SummaryMerge {
  Summary summary;
  const int32_t* rows;  // [batch, columns], rows rows_stride apart
  int64_t rows_stride;
  int columns;
  const int32_t* counts;  // [batch], 0..columns
};
void summary_merge(const SummaryMerge& p, Stream stream);

// The rows of all requests, one request after the other, are cut into chunks of chunk_rows. A
// segment is the part of a chunk that belongs to one request; the segment of chunk c and request b
// is number c + b, which is different for different segments, so the host can count on
// ceil(total_rows / chunk_rows) + batch of them without knowing where requests begin.
struct SummaryMergeBulk {
  Summary summary;
  const int32_t* rows;         // [total_rows]
  const int32_t* indptr;       // [batch + 1], or null:
  const int64_t* indptr_wide;  // the same in 64 bits
  int chunk_rows, segments;
  float* partial_value;  // [segments, layers, heads, slots, dim], scratch
  float* partial_lse;    // [segments, layers, heads, slots], scratch
  bool tensor_cores;     // 16-bit elements, dim 64, 128 or 256, rows aligned to 8 elements
};
void summary_merge_bulk(const SummaryMergeBulk& p, Stream stream);

// ---- The block's attention
// -----------------------------------------------------------------------

struct BlockAttention {
  Dtype dtype;
  const void* query;  // [batch, block, heads, dim]
  int64_t query_batch_stride, query_slot_stride, query_head_stride;
  const void* summary_key;  // [heads, slots, dim]; slots and dim contiguous
  int64_t summary_key_head_stride;
  const float* summary_value;  // [states, heads, slots, dim]; slots and dim contiguous
  int64_t summary_value_state_stride, summary_value_head_stride;
  const int64_t* state_rows;  // [batch]
  const void* key_pool;
  const void* value_pool;
  PoolLayout layout;
  const int32_t* rows;  // [batch, window], rows rows_stride apart
  int64_t rows_stride;
  const int32_t* lens;    // [batch], 0..window
  const void* block_key;  // [batch, block, kv_heads, dim]
  const void* block_value;
  int64_t key_batch_stride, key_slot_stride, key_head_stride;        // of block_key
  int64_t value_batch_stride, value_slot_stride, value_head_stride;  // of block_value
  int batch, block, heads, kv_heads, slots, dim;
  float scale;
  void* out;          // [batch, block, heads, dim], contiguous
  bool tensor_cores;  // 16-bit elements, dim 64, 128 or 256, block at most 16, aligned rows
};
void block_attention(const BlockAttention& p, Stream stream);

// ---- Markov correction, draft sampling, acceptance
// -----------------------------------------------

// Tokens per range: each range of the vocabulary is reduced by one block to one partial result.
constexpr int kRangeTokens = 512;
// Tokens per tile of the final draw.
constexpr int kTileTokens = 1024;

constexpr int num_ranges(int vocab) { return (vocab + kRangeTokens - 1) / kRangeTokens; }
constexpr int num_tiles(int vocab) { return (vocab + kTileTokens - 1) / kTileTokens; }

// Corrected logits of one slot per request: base + W2 . W1[prev].
struct Markov {
  Dtype logits_dtype, weights_dtype;
  const void* logits;  // row b begins at b * logits_stride + slots[b] * slot_stride
  int64_t logits_stride, slot_stride;
  const int32_t* slots;  // [batch], or null: 0 for all; below 0: nobody needs this request's row
  const int64_t* prev;   // [batch]
  const void* w1;        // [vocab, rank], rows w1_stride apart
  const void* w2;        // [vocab, rank], rows w2_stride apart
  int64_t w1_stride, w2_stride;
  int batch, vocab, rank;
  bool tensor_cores;   // 16-bit weights in aligned rows of a multiple of 32 elements
  bool vector_logits;  // rows of logits are aligned to 8 elements
};

struct MarkovStep {
  Markov markov;
  float* out;  // [batch, vocab]
};
void markov_step(const MarkovStep& p, Stream stream);

// The best token of a part of the vocabulary, and the part's logsumexp of z / T as top + ln(total).
struct DraftPartial {
  float score, scaled, top, total;
  int32_t token;
};

struct DraftSample {
  Markov markov;
  const float* temperature;  // [batch], 0 is greedy
  const int64_t* seed;       // [batch]
  const int64_t* position;   // [batch]
  int vocab_limit;
  DraftPartial* partials;  // [batch, num_ranges(vocab)], scratch
  int64_t* token;          // [batch]
  float* logq;             // [batch]
};
void draft_sample(const DraftSample& p, Stream stream);

// top + ln(total) is a logsumexp.
struct Lse {
  float top, total;
};
// Masses of a tile of the vocabulary.
struct TileMass {
  float residual, target;
};

struct AcceptChain {
  Markov markov;                // logits, slots and prev are set by the launcher
  const float* target_probs;    // [batch, block + 1, vocab], contiguous
  const int64_t* draft_tokens;  // [batch, block], contiguous
  const float* draft_logq;      // [batch, block], contiguous
  const int64_t* anchors;       // [batch]
  const float* temperature;     // [batch]
  const bool* point_mass;       // [batch]
  const float* uniforms;        // [batch, block], contiguous
  const float* uniform_final;   // [batch]
  const int32_t* limit;         // [batch], 0..block
  int block, vocab_limit;
  int32_t* slots;  // [batch], scratch: the rejected slot whose draft distribution is needed, or -1
  int64_t* prev;   // [batch], scratch: token before that slot
  void* logits;    // [batch, vocab] of markov.logits_dtype, scratch: corrected logits of that slot
  Lse* partials;   // [batch, num_ranges(vocab)], scratch
  float* lse;      // [batch], scratch: logsumexp of logits / T below vocab_limit
  TileMass* masses;     // [batch, num_tiles(vocab)], scratch
  int32_t* accepted;    // [batch]
  int64_t* next_token;  // [batch]
};
void accept_chain(const AcceptChain& p, Stream stream);

struct AcceptGreedy {
  const int64_t* target_tokens;  // [batch, block + 1], contiguous
  const int64_t* draft_tokens;   // [batch, block], contiguous
  const int32_t* limit;          // [batch]
  int batch, block;
  int32_t* accepted;    // [batch]
  int64_t* next_token;  // [batch]
};
void accept_greedy(const AcceptGreedy& p, Stream stream);

}  // namespace longspark
