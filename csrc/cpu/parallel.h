// Spreads the units of an operator over torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdlib>

namespace longspark::cpu {

// This thread's scratch memory, at least `bytes` of it, aligned to a cache line; kept between
// calls.
inline void* thread_scratch(int64_t bytes) {
  struct Buffer {
    void* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffer;
  if (buffer.size < bytes) {
    std::free(buffer.data);
    int64_t size = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(4096, size);
    TORCH_CHECK(buffer.data != nullptr, "longspark: can't allocate ", size, " bytes of scratch");
    buffer.size = size;
  }
  return buffer.data;
}

// Calls f(unit, scratch) for every unit. Units are handed out one by one, first come first served,
// because their costs differ (causal prefill, ragged batches).
template <class F>
void parallel_units(int64_t units, int64_t scratch_bytes, const F& f) {
  int64_t threads = std::min<int64_t>(at::get_num_threads(), units);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    void* scratch = thread_scratch(scratch_bytes);
    for (int64_t unit = next++; unit < units; unit = next++) f(unit, scratch);
  });
}

}  // namespace longspark::cpu
