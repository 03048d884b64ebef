// The kernels for CPUs with the features named below.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,bmi,bmi2")
#define LONGSPARK_ISA_LEVEL 3
#define LONGSPARK_ISA isa_avx512_bf16
#define LONGSPARK_ISA_NAME "avx512_bf16"
#include "kernels_of_isa.h"
#endif
