// The tensor cores' multiply-add, and which lane holds which element.
//
// A warp multiplies a 16 x 16 matrix a by a 16 x 8 matrix b and adds to a 16 x 8 matrix c. With
// g = lane / 4 and t = lane % 4, a lane holds (two neighbouring elements share a register):
//   a[0] row g,     columns 2t, 2t+1      b[0] rows 2t, 2t+1,   column g    c[0], c[1] row g,
//   a[1] row g + 8, columns 2t, 2t+1      b[1] rows 2t+8, 2t+9, column g      columns 2t, 2t+1
//   a[2] row g,     columns 2t+8, 2t+9                                      c[2], c[3] row g + 8
//   a[3] row g + 8, columns 2t+8, 2t+9
#pragma once

#include "longspark/types.cuh"

namespace longspark {

#if defined(__CUDACC__)

__device__ __forceinline__ void multiply_add(bf16, float (&c)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply_add(fp16, float (&c)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#else

// The same instruction, its products summed in the order of k in fp32 (the hardware's order and
// inner precision are its own).
template <class T>
inline void multiply_add(T, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  struct Registers {
    uint32_t a[4], b[2];
  };
  Registers mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const Registers* all = static_cast<const Registers*>(emulation::warp_exchange(
      0xffffffffu, &mine, sizeof(mine), false, "multiply_add", {file, line}));
  auto half = [](uint32_t word, int which) {
    return to_float(T{static_cast<uint16_t>(which ? word >> 16 : word)});
  };
  int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    int row = i / 2, column = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      int inner = k % 8 / 2;
      c[i] += half(all[4 * g + inner].a[row + k / 8 * 2], k % 2) *
              half(all[4 * column + inner].b[k / 8], k % 2);
    }
  }
}

#endif

}  // namespace longspark
