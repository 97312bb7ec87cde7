#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <utility>

/// Accumulators in registers and their rounding to 16 bits.
namespace sonicmoe::cuda {

/// Calls f(index) with decltype(index)::value = 0, 1, ... Accumulators must never be indexed at run
/// time, and the compiler knows these indices whatever the body.
template <int kCount, class F>
__device__ __forceinline__ void static_for(F&& f) {
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
    (f(std::integral_constant<int, kIndices>{}), ...);
  }
  (std::make_integer_sequence<int, kCount>{});
}

/// Two T in a word.
template <class T>
struct Pair;

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

/// 16 x 16 values as a warp holds them in accumulators. Lane l has in [0] row l/4, columns
/// 2 (l%4) + {0, 1}; in [1] eight rows below; in [2], [3] eight columns to the right of those.
struct Fragment {
  std::uint32_t w[4];
};

/// Puts eight columns that four lanes hold in the order of a Fragment. Lane q of the four has
/// column q in `first` and column q + 4 in `second`, with the upper row in the low half and the row
/// eight below in the high half. It gets columns 2q and 2q + 1: of the upper row in `upper`, of the
/// lower row in `lower`.
__device__ __forceinline__ void to_columns(std::uint32_t first, std::uint32_t second,
                                           std::uint32_t* upper, std::uint32_t* lower) {
  const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
    const bool above = (lane & distance) != 0;
    const std::uint32_t other = __shfl_xor_sync(0xffffffffu, above ? first : second, distance);
    first = above ? other : first;
    second = above ? second : other;
  }
  *upper = __byte_perm(first, second, 0x5410);
  *lower = __byte_perm(first, second, 0x7632);
}

/// `value`, as if it were new: the compiler computes what follows from it here, instead of keeping
/// it in registers through the main loop.
__device__ __forceinline__ int here(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// Sixteen columns of accumulators, from acc[0] on, rounded to T.
template <class T>
__device__ __forceinline__ Fragment rounded(const float* acc) {
  Fragment fragment;
#pragma unroll
  for (int j = 0; j < 4; ++j) fragment.w[j] = Pair<T>::pack(acc[2 * j], acc[2 * j + 1]);
  return fragment;
}

/// The rounded accumulators of a chunk of 64 columns into a WarpTile or WarpgroupTile.
template <class T, class StagedTile>
__device__ __forceinline__ void put_rounded(const StagedTile& tile, const float* acc) {
#pragma unroll
  for (int i = 0; i < 4; ++i) tile.put(i, rounded<T>(acc + 8 * i));
}

}  // namespace sonicmoe::cuda
