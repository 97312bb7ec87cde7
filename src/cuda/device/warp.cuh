#pragma once

#include <cstdint>

#include "cuda/device/ptx.cuh"
#include "cuda/launch_early.cuh"
#include "cuda/runtime.h"
#include "cuda/storage.cuh"
#include "math/ieee.h"

/// Helpers of the row kernels and the routing kernels: conversions, sums over a warp and a block,
/// loads of 16 bytes.
namespace sonicmoe::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kWarp = 32;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

/// Eight 16-bit values, moved as one 16-byte access.
template <class T>
struct alignas(16) Eight {
  T value[8];
};

/// The number of thread blocks that take `items`, `per_block` each.
inline unsigned blocks_for(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }

/// Sum over a warp, in every lane. Lanes are added pairwise in the order of math::lane_sum32, so
/// the bits are the CPU's.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) {
    x = math::add(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

/// Calls put(i, value(0) + ... + value(i-1)) for every i below n. All kThreads threads of one block
/// call it, and each gets the whole sum.
template <int kThreads, class Value, class Put>
__device__ std::int32_t exclusive_sums(int n, Value value, Put put) {
  __shared__ std::int32_t of_warp[kThreads / kWarp];
  std::int32_t carry = 0;
  for (int first = 0; first < n; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const std::int32_t own = i < n ? value(i) : 0;
    std::int32_t sum = own;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const std::int32_t before = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane_id() >= distance) sum += before;
    }
    if (lane_id() == kWarp - 1) of_warp[threadIdx.x / kWarp] = sum;
    __syncthreads();  // all warps have written of_warp
    std::int32_t all = 0;
#pragma unroll
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w < static_cast<int>(threadIdx.x) / kWarp) sum += of_warp[w];
      all += of_warp[w];
    }
    if (i < n) put(i, carry + sum - own);
    carry += all;
    __syncthreads();  // all warps have read of_warp
  }
  return carry;
}

// load_once() and load_kept() load 16 bytes if `wanted`; else they return zeros. Each is one
// instruction under a predicate: with a branch, each load would wait for the load before it. Both
// are volatile and avoid the read-only path: no load may move before wait_for_previous(), for an
// earlier kernel may write what it reads.

/// For bytes that are read once: L1 does not keep them, and L2 follows `policy`. Without a policy
/// `L1::no_allocate` makes lines leave L2 first, too (docs/findings/sums.md).
__device__ __forceinline__ uint4 load_once(const void* from, bool wanted, std::uint64_t policy) {
  uint4 bits = {};
  asm volatile(
      "{ .reg .pred wanted;\n"
      "  setp.ne.s32 wanted, %5, 0;\n"
      "  @wanted ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6; }"
      : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w)
      : "l"(from), "r"(static_cast<int>(wanted)), "l"(policy));
  return bits;
}
/// For bytes that other threads read, too: L1 keeps them.
__device__ __forceinline__ uint4 load_kept(const void* from, bool wanted) {
  uint4 bits = {};
  asm volatile(
      "{ .reg .pred wanted;\n"
      "  setp.ne.s32 wanted, %5, 0;\n"
      "  @wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w)
      : "l"(from), "r"(static_cast<int>(wanted)));
  return bits;
}

/// Does an expert own this row? Expert e owns rows begins[e] .. ends[e]-1; segments ascend.
__device__ __forceinline__ bool is_owned(const std::int32_t* begins, const std::int32_t* ends,
                                         int experts, std::int64_t row) {
  int low = 0, high = experts;  // the first segment that ends behind the row lies in [low, high]
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low < experts && begins[low] <= row;
}

/// Sets `bit` in the error word, if there is one.
__device__ __forceinline__ void report(std::int32_t* error_word, std::int32_t bit) {
  if (error_word != nullptr) atomicOr(error_word, bit);
}

}  // namespace sonicmoe::cuda
