// The kernels for CPUs with the features named below.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#define LONGSPARK_ISA_LEVEL 1
#define LONGSPARK_ISA isa_avx2
#define LONGSPARK_ISA_NAME "avx2"
#include "kernels_of_isa.h"
#endif
