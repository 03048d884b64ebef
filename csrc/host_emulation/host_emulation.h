// Runs CUDA kernels on the CPU from their own source, for tests.
//
// Each CUDA thread is a fiber; one block runs at a time, its fibers in a chosen or seeded random
// order, and a fiber runs on until it waits at a barrier or a collective. What is checked, each
// with an exception that names kernel source line, block and thread:
//   - barriers and collectives that not all threads of the block or warp reach, or reach elsewhere;
//   - global accesses outside the tensors of the call, stores to inputs, misaligned accesses;
//   - races, in shared memory and in whatever the call may store to: two threads touch the same
//     bytes, one of them storing, with neither a barrier nor the launch's end between;
//   - accesses outside the shared memory, and loads of shared memory that was never stored to.
// Shared memory is refilled with 0xFF (NaN) before each block. Not modelled: the memory model
// inside one barrier interval, timing, occupancy, the exact rounding of fast math and tensor cores.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

#include "longspark/launchers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace longspark {

namespace emulation {

// Where in the kernel's source something happens.
struct Site {
  const char* file;
  int line;
};

enum class Order { kForward, kReversed, kRandom };

// How fibers and blocks are ordered from now on, in this thread.
void configure(uint64_t seed, Order order);

// The memory that kernels may touch until the scope ends; launch() outside a scope allows nothing.
class MemoryScope {
 public:
  MemoryScope();
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;
};
void allow(const void* begin, size_t bytes, bool writable, const char* name);

struct Identity {
  dim3 thread, block, block_size, grid_size;
};
// Bytes that a lane can hand over in one collective.
constexpr size_t kMostExchanged = 32;

const Identity& self();

void* shared(Site site, size_t bytes, size_t alignment);
void* dynamic_shared();
void access(const void* address, size_t bytes, size_t alignment, bool is_store, Site site);
void block_barrier(Site site);
// Waits for all 32 lanes of the warp, then returns their values, 32 times `bytes` in lane order,
// valid until this lane's next collective. `orders_memory` makes it a memory barrier.
const void* warp_exchange(unsigned mask, const void* value, size_t bytes, bool orders_memory,
                          const char* what, Site site);
void run(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const std::function<void()>& kernel);

template <class T>
T from_lane(unsigned mask, T value, int lane, const char* what, Site site) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kMostExchanged);
  const void* all = warp_exchange(mask, &value, sizeof(T), false, what, site);
  T result;
  std::memcpy(&result, static_cast<const char*>(all) + lane * sizeof(T), sizeof(T));
  return result;
}

inline int lane() { return static_cast<int>(self().thread.x % 32); }

}  // namespace emulation

template <class T>
T load(const T* from, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::access(from, sizeof(T), alignof(T), false, {file, line});
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
template <class T>
void store(T* to, std::type_identity_t<T> value, const char* file = __builtin_FILE(),
           int line = __builtin_LINE()) {
  emulation::access(to, sizeof(T), alignof(T), true, {file, line});
  std::memcpy(to, &value, sizeof(T));
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_shared, Stream,
            const Arguments&... arguments) {
  emulation::run(grid, block, dynamic_shared, [&] { kernel(arguments...); });
}

}  // namespace longspark

#define LONGSPARK_SHARED(Type, name) \
  Type& name = *static_cast<Type*>(  \
      ::longspark::emulation::shared({__FILE__, __LINE__}, sizeof(Type), alignof(Type)))
#define LONGSPARK_DYNAMIC_SHARED(name) \
  unsigned char* name = static_cast<unsigned char*>(::longspark::emulation::dynamic_shared())

#define threadIdx (::longspark::emulation::self().thread)
#define blockIdx (::longspark::emulation::self().block)
#define blockDim (::longspark::emulation::self().block_size)
#define gridDim (::longspark::emulation::self().grid_size)

#define __syncthreads() ::longspark::emulation::block_barrier({__FILE__, __LINE__})

inline void __syncwarp(unsigned mask = 0xffffffffu, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  longspark::emulation::warp_exchange(mask, nullptr, 0, true, "__syncwarp", {file, line});
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, const char* file = __builtin_FILE(),
              int line = __builtin_LINE()) {
  return longspark::emulation::from_lane(mask, value, lane & 31, "__shfl_sync", {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  int lane = longspark::emulation::lane() ^ lanes;
  return longspark::emulation::from_lane(mask, value, lane & 31, "__shfl_xor_sync", {file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int delta, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) {
  int lane = longspark::emulation::lane() - delta;
  if (lane < 0) lane += delta;  // a lane without a source keeps its own value
  return longspark::emulation::from_lane(mask, value, lane, "__shfl_up_sync", {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
  int mine = predicate != 0;
  const int* all = static_cast<const int*>(longspark::emulation::warp_exchange(
      mask, &mine, sizeof(mine), false, "__ballot_sync", {file, line}));
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all[lane]) << lane;
  return bits;
}

inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t bytes = (static_cast<uint64_t>(y) << 32) | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned which = (selector >> (4 * i)) & 7;
    result |= static_cast<unsigned>((bytes >> (8 * which)) & 0xff) << (8 * i);
  }
  return result;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
