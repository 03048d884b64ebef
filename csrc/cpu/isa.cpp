#include "isa.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>

namespace longspark::cpu {

namespace isa_default {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const Kernels kKernels;
}
namespace isa_avx512 {
extern const Kernels kKernels;
}
namespace isa_avx512_bf16 {
extern const Kernels kKernels;
}
#endif

namespace {

// Plainest first. __builtin_cpu_supports also asks whether the system saves the registers.
std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> found = {&isa_default::kKernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return found;
  found.push_back(&isa_avx2::kKernels);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return found;
  }
  found.push_back(&isa_avx512::kKernels);
  if (__builtin_cpu_supports("avx512bf16")) found.push_back(&isa_avx512_bf16::kKernels);
#endif
  return found;
}

const Kernels* find(const std::string& name) {
  std::vector<const Kernels*> found = supported();
  if (name.empty()) return found.back();
  for (const Kernels* kernels : found) {
    if (name == kernels->name) return kernels;
  }
  std::string names;
  for (const Kernels* kernels : found)
    names += std::string(names.empty() ? "" : ", ") + kernels->name;
  TORCH_CHECK(false, "LONGSPARK_CPU_ISA: this CPU can't run '", name, "'; use one of ", names);
}

std::atomic<const Kernels*> chosen{nullptr};

std::string use_isa(const std::optional<std::string>& name) {
  if (name) choose_isa(*name);
  return kernels().name;
}

}  // namespace

const Kernels& kernels() {
  const Kernels* in_use = chosen.load(std::memory_order_relaxed);
  if (in_use == nullptr) {
    const char* wanted = std::getenv("LONGSPARK_CPU_ISA");
    in_use = find(wanted ? wanted : "");
    chosen = in_use;
  }
  return *in_use;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : supported()) names.push_back(kernels->name);
  return names;
}

void choose_isa(const std::string& name) { chosen = find(name); }

// For the start-up line and for tests, which run every set of kernels in one process.
TORCH_LIBRARY_FRAGMENT(longspark, m) {
  m.def("cpu_isas() -> str[]", supported_isas);
  m.def("cpu_isa(str? use=None) -> str", use_isa);
}

}  // namespace longspark::cpu
