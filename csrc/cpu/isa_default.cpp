// The kernels for any CPU: what the compiler's default target offers (SSE2 on x86-64, NEON on
// arm64).
#define LONGSPARK_ISA_LEVEL 0
#define LONGSPARK_ISA isa_default
#define LONGSPARK_ISA_NAME "default"
#include "kernels_of_isa.h"
