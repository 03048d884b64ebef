// Chooses the kernels for the CPU this runs on.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace longspark::cpu {

// The kernels in use: the best this CPU can run, or the set that LONGSPARK_CPU_ISA names.
const Kernels& kernels();

// Names this CPU can run, plainest first.
std::vector<std::string> supported_isas();

// Use this set from now on; "" is the best. Throws c10::Error for a name that isn't supported.
void choose_isa(const std::string& name);

}  // namespace longspark::cpu
