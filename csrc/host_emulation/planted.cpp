// Kernels with a fault each, for the tests that show that the emulation catches it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <map>
#include <string>

#include "longspark/types.cuh"

namespace longspark {
namespace {

constexpr int kThreads = 64;

struct Scratch {
  float values[kThreads];
};

// The block's own part of the output.
float* own(float* out) { return out + blockIdx.x * kThreads; }

// Sound: every thread hands its value to its neighbour through shared memory.
__global__ void sound(const float* in, float* out, int) {
  LONGSPARK_SHARED(Scratch, scratch);
  int i = threadIdx.x;
  store(&scratch.values[i], load(in + i));
  __syncthreads();
  store(own(out) + i, load(&scratch.values[(i + 1) % kThreads]));
}

__global__ void missing_syncthreads(const float* in, float* out, int) {
  LONGSPARK_SHARED(Scratch, scratch);
  int i = threadIdx.x;
  store(&scratch.values[i], load(in + i));
  store(own(out) + i, load(&scratch.values[(i + 1) % kThreads]));
}

// The neighbour is in the same warp; without a warp barrier this is as wrong.
__global__ void missing_syncwarp(const float* in, float* out, int) {
  LONGSPARK_SHARED(Scratch, scratch);
  int i = threadIdx.x;
  store(&scratch.values[i], load(in + i));
  store(own(out) + i, load(&scratch.values[i ^ 1]));
}

// A second round reuses the buffer while slower threads still read the first one's values.
__global__ void missing_second_barrier(const float* in, float* out, int) {
  LONGSPARK_SHARED(Scratch, scratch);
  int i = threadIdx.x;
  for (int round = 0; round < 2; ++round) {
    store(&scratch.values[i], load(in + i) + round);
    __syncthreads();
    store(own(out) + i, load(&scratch.values[(i + 33) % kThreads]));
  }
}

__global__ void divergent_barrier(const float* in, float* out, int) {
  int i = threadIdx.x;
  if (i < 32) __syncthreads();
  store(own(out) + i, load(in + i));
}

__global__ void two_barriers_as_one(const float* in, float* out, int) {
  int i = threadIdx.x;
  if (i < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  store(own(out) + i, load(in + i));
}

__global__ void divergent_shuffle(const float* in, float* out, int) {
  int i = threadIdx.x;
  float value = load(in + i);
  if (i % 32 < 31) value = __shfl_xor_sync(0xffffffffu, value, 1);
  store(own(out) + i, value);
}

__global__ void partial_mask(const float* in, float* out, int) {
  int i = threadIdx.x;
  store(own(out) + i, __shfl_xor_sync(0x0000ffffu, load(in + i), 1));
}

__global__ void load_past_the_end(const float* in, float* out, int count) {
  int i = threadIdx.x;
  store(own(out) + i, load(in + (i == kThreads - 1 ? count : i)));
}

__global__ void store_past_the_end(const float* in, float* out, int count) {
  int i = threadIdx.x;
  store(own(out) + (i == 5 ? 2 * count : i), load(in + i));
}

__global__ void store_to_an_input(const float* in, float*, int) {
  store(const_cast<float*>(in) + threadIdx.x, 0.0f);
}

__global__ void misaligned_vector(const float* in, float* out, int) {
  int i = threadIdx.x;
  auto four = load(reinterpret_cast<const Vec<float, 4>*>(in + (i == 3 ? 1 : 0)));
  store(own(out) + i, four.at[0]);
}

__global__ void unwritten_shared(const float* in, float* out, int) {
  LONGSPARK_SHARED(Scratch, scratch);
  int i = threadIdx.x;
  if (i != 7) store(&scratch.values[i], load(in + i));
  __syncthreads();
  store(own(out) + i, load(&scratch.values[i]));
}

__global__ void past_the_shared_memory(const float* in, float* out, int) {
  LONGSPARK_SHARED(Scratch, scratch);
  int i = threadIdx.x;
  store(&scratch.values[i] + (i == kThreads - 1 ? 1 : 0), load(in + i));
  store(own(out) + i, 0.0f);
}

// What is in shared memory before a thread stores to it: NaN, also in the second block, which the
// hardware would give the first block's values. (Reads it as no kernel may: not through load().)
__global__ void poison(const float* in, float* out, int) {
  LONGSPARK_SHARED(Scratch, scratch);
  int i = threadIdx.x;
  float before = scratch.values[i];
  store(&scratch.values[i], load(in + i));
  store(own(out) + i, before);
}

// Both blocks store the same element.
__global__ void two_blocks_store_one_element(const float* in, float* out, int) {
  store(out + threadIdx.x, load(in + threadIdx.x));
}

// One block reads what the other one stores, if it happens to run later.
__global__ void one_block_reads_from_another(const float* in, float* out, int) {
  int i = threadIdx.x;
  if (blockIdx.x == 0) {
    store(out + i, load(in + i));
  } else {
    store(out + kThreads + i, load(out + i));
  }
}

// In place: a thread replaces what its neighbour has yet to read.
__global__ void in_place_without_a_barrier(const float* in, float* out, int) {
  int i = threadIdx.x;
  store(own(out) + i, load(in + i));
  __syncthreads();
  store(own(out) + i, load(own(out) + (i + 1) % kThreads));
}

// A thread's own array is no business of the emulation; AddressSanitizer sees this.
__global__ void past_a_local_array(const float* in, float* out, int count) {
  float mine[4] = {};
  mine[load(in) < 1e9f ? count / 16 : 0] = 1.0f;
  store(own(out) + threadIdx.x, mine[threadIdx.x % 4]);
}

using Kernel = void (*)(const float*, float*, int);

at::Tensor planted(c10::string_view name, const at::Tensor& in) {
  static const std::map<std::string, Kernel> kernels = {
      {"sound", sound},
      {"missing_syncthreads", missing_syncthreads},
      {"missing_syncwarp", missing_syncwarp},
      {"missing_second_barrier", missing_second_barrier},
      {"divergent_barrier", divergent_barrier},
      {"two_barriers_as_one", two_barriers_as_one},
      {"divergent_shuffle", divergent_shuffle},
      {"partial_mask", partial_mask},
      {"load_past_the_end", load_past_the_end},
      {"store_past_the_end", store_past_the_end},
      {"store_to_an_input", store_to_an_input},
      {"misaligned_vector", misaligned_vector},
      {"unwritten_shared", unwritten_shared},
      {"past_the_shared_memory", past_the_shared_memory},
      {"poison", poison},
      {"past_a_local_array", past_a_local_array},
      {"two_blocks_store_one_element", two_blocks_store_one_element},
      {"one_block_reads_from_another", one_block_reads_from_another},
      {"in_place_without_a_barrier", in_place_without_a_barrier},
  };
  TORCH_CHECK(in.is_contiguous() && in.scalar_type() == at::kFloat && in.numel() == kThreads);
  at::Tensor out = at::zeros({2 * kThreads}, in.options());
  emulation::MemoryScope scope;
  emulation::allow(in.const_data_ptr(), in.nbytes(), false, "in");
  emulation::allow(out.mutable_data_ptr(), out.nbytes(), true, "out");
  auto* destination = out.mutable_data_ptr<float>();
  launch(kernels.at(std::string(name)), dim3(2), dim3(kThreads), 0, nullptr,
         in.const_data_ptr<float>(), destination, kThreads);
  return out;
}

}  // namespace
}  // namespace longspark

TORCH_LIBRARY_FRAGMENT(longspark_emu, m) {
  m.def("planted(str name, Tensor input) -> Tensor", longspark::planted);
}
