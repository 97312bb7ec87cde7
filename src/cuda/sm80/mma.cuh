#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

/// mma.sync of 16 x 8 x 16 with fp32 sums.
namespace sonicmoe::cuda::sm80 {

template <class T>
__device__ __forceinline__ void multiply(float (&sums)[4], const std::uint32_t (&a)[4],
                                         const std::uint32_t* b);
template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float (&d)[4], const std::uint32_t (&a)[4],
                                                        const std::uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void multiply<__half>(float (&d)[4], const std::uint32_t (&a)[4],
                                                 const std::uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace sonicmoe::cuda::sm80
