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

}  // namespace longspark
