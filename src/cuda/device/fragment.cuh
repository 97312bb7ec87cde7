#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

/// Between accumulator fragments and rows in global memory.
///
/// In an accumulator, the four lanes of a quad (lane % 4 = q) hold columns 8j + 2q + {0, 1} of a
/// row, for every j. Four neighbouring 8-column blocks are 4 words (two 16-bit values each) a lane.
/// Transposing these 4x4 words inside the quad gives lane q the whole block q: 8 columns, 16 bytes,
/// one vector access. So a row goes to memory in 64-byte pieces without shared memory, any multiple
/// of 8 columns needs no more than a predicate, and nothing is ever written past the last row of an
/// expert.
namespace sonicmoe::cuda {

template <class T>
struct Pair;  // the packed type of two T

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
  static __device__ __forceinline__ float2 unpack(std::uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
  static __device__ __forceinline__ float2 unpack(std::uint32_t word) {
    float2 out;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(out.x), "=f"(out.y)
        : "r"(word));
    return out;
  }
};

/// Four words of this lane: words of one row for four blocks, or the four words of one block.
struct Words {
  std::uint32_t w[4];
};

/// Lane q of a quad gives word j and gets word q of lane j. Its own inverse.
__device__ __forceinline__ Words quad_transpose(Words x) {
  const unsigned lane = threadIdx.x;
  const bool odd = lane & 1;
  const bool upper = lane & 2;
  // Swap with the neighbour across one bit of the lane at a time: a lane keeps the words whose
  // index has its own bit and exchanges the others.
  const std::uint32_t s0 = __shfl_xor_sync(~0u, odd ? x.w[0] : x.w[1], 1);
  const std::uint32_t s1 = __shfl_xor_sync(~0u, odd ? x.w[2] : x.w[3], 1);
  x = {{odd ? s0 : x.w[0], odd ? x.w[1] : s0, odd ? s1 : x.w[2], odd ? x.w[3] : s1}};
  const std::uint32_t s2 = __shfl_xor_sync(~0u, upper ? x.w[0] : x.w[2], 2);
  const std::uint32_t s3 = __shfl_xor_sync(~0u, upper ? x.w[1] : x.w[3], 2);
  x = {{upper ? s2 : x.w[0], upper ? s3 : x.w[1], upper ? x.w[2] : s2, upper ? x.w[3] : s3}};
  return x;
}

__device__ __forceinline__ void store_words(void* to, Words x) {
  *static_cast<uint4*>(to) = make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
}

__device__ __forceinline__ Words load_words(const void* from) {
  const uint4 v = *static_cast<const uint4*>(from);
  return {{v.x, v.y, v.z, v.w}};
}

/// Sum over the four lanes of a quad, the same in each, in one order.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  x += __shfl_xor_sync(~0u, x, 2);
  return x;
}

}  // namespace sonicmoe::cuda
