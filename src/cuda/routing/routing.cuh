#pragma once

#include <cstdint>

#include "cuda/device/ptx.cuh"
#include "cuda/launch_early.cuh"
#include "cuda/runtime.h"
#include "cuda/storage.cuh"
#include "math/softmax.h"
#include "sonicmoe/ops.h"

/// What the routing kernels share: storage types, rows of logits, and refusing bad ones.
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

/// Blocks of `per_block` items each.
inline unsigned blocks_for(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }

/// Sum over a warp at distance 16, 8, 4, 2, 1, as in math::lane_sum32; every lane gets it.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) {
    x = math::add(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

/// put(i, value(0) + ... + value(i-1)) for i below n, by one block of kThreads; the whole sum to
/// all.
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
    __syncthreads();
    std::int32_t all = 0;
#pragma unroll
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w < static_cast<int>(threadIdx.x) / kWarp) sum += of_warp[w];
      all += of_warp[w];
    }
    if (i < n) put(i, carry + sum - own);
    carry += all;
    __syncthreads();
  }
  return carry;
}

/// 32 bits that ascend with a number; -0 is +0. A NaN lies past the infinity of its sign.
__device__ __forceinline__ std::uint32_t order_bits(float x) {
  const std::uint32_t u = math::bits(math::add(x, 0.0f));
  return u ^ (static_cast<std::uint32_t>(static_cast<std::int32_t>(u) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float from_order_bits(std::uint32_t ordered) {
  return math::from_bits(ordered >> 31 ? ordered ^ 0x80000000u : ~ordered);
}

/// Maximum and sum of e^(x - max) of a row of logits, by one warp: the bits of src/cpu's softmax.
struct RowSoftmax {
  float max;
  float sum;
  __device__ float term(float x) const { return math::softmax_term(x, max); }
  __device__ float probability(float x) const { return math::div(term(x), sum); }
};
template <class T>
__device__ RowSoftmax row_softmax(const T* logits, std::int64_t experts) {
  std::uint32_t largest = 0;
  for (std::int64_t e = lane_id(); e < experts; e += kWarp) {
    largest = max(largest, order_bits(to_float(logits[e])));
  }
  const float row_max = from_order_bits(__reduce_max_sync(kAllLanes, largest));
  float sum = 0.0f;
  for (std::int64_t e = lane_id(); e < experts; e += kWarp) {
    sum = math::add(sum, math::softmax_term(to_float(logits[e]), row_max));
  }
  return {row_max, warp_sum(sum)};
}

// 16 bytes if `wanted`; else zeros. One instruction under a predicate: a branch would wait for one
// load before the next. Volatile, and not through the read-only path: what an earlier kernel
// writes must not be read before wait_for_previous().

/// What is read once goes past L1, and through L2 by a policy. Without one it would leave L2 first:
/// that is what no_allocate does.
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
/// What other threads read, too.
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

/// Or-ed into the error word, if there is one.
__device__ __forceinline__ void report(std::int32_t* error_word, std::int32_t bit) {
  if (error_word != nullptr) atomicOr(error_word, bit);
}

/// Why a row of logits is refused, in the order of the texts below.
enum class BadRow : std::uint32_t { nan, positive_infinity, only_negative_infinity };

/// 4 t + BadRow of the first row t that is refused, where `first` held more.
template <class T>
__global__ void find_bad_logits(const T* logits, std::int64_t tokens, std::int64_t experts,
                                unsigned long long* first) {
  const std::int64_t t =
      std::int64_t{blockIdx.x} * (blockDim.x / kWarp) + static_cast<int>(threadIdx.x) / kWarp;
  if (t >= tokens) return;
  bool nan = false;
  bool finite = false;
  bool infinite = false;
  for (std::int64_t e = lane_id(); e < experts; e += kWarp) {
    const float x = to_float(logits[t * experts + e]);
    nan |= x != x;
    infinite |= x == INFINITY;
    finite |= x > -INFINITY && x < INFINITY;
  }
  nan = __any_sync(kAllLanes, nan);
  infinite = __any_sync(kAllLanes, infinite);
  finite = __any_sync(kAllLanes, finite);
  if (!nan && !infinite && finite) return;
  const BadRow why = nan        ? BadRow::nan
                     : infinite ? BadRow::positive_infinity
                                : BadRow::only_negative_infinity;
  if (lane_id() == 0) {
    atomicMin(first, static_cast<unsigned long long>(t) * 4 + static_cast<unsigned>(why));
  }
}

inline constexpr std::size_t kCheckBytes = 8;  ///< scratch of a check

/// Runs `launch(first)`, which lowers *first to the first bad position, and waits for it. Checked
/// mode only: this synchronises.
template <class Launch>
Status first_bad(void* scratch, cudaStream_t stream, const char* what, std::uint64_t* position,
                 Launch&& launch) {
  auto* first = static_cast<unsigned long long*>(scratch);
  cudaError_t error = cudaMemsetAsync(first, 0xff, sizeof *first, stream);
  if (error == cudaSuccess) {
    launch(first);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(position, first, sizeof *first, cudaMemcpyDeviceToHost, stream);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  return to_status(error, what);
}

/// Refuses a NaN and rows without a finite maximum. `scratch` is kCheckBytes on the device.
template <class T>
Status check_logits(const T* logits, std::int64_t tokens, std::int64_t experts, void* scratch,
                    cudaStream_t stream) {
  if (tokens == 0) return {};
  std::uint64_t position = 0;
  const auto launch = [&](unsigned long long* first) {
    find_bad_logits<<<blocks_for(tokens, 8), 8 * kWarp, 0, stream>>>(logits, tokens, experts,
                                                                     first);
  };
  if (Status s = first_bad(scratch, stream, "logits: check", &position, launch); !s.ok()) return s;
  if (position == ~std::uint64_t{0}) return {};
  static constexpr const char* kGot[] = {"a NaN", "+inf", "only -inf"};
  return Status::error(StatusCode::invalid_data,
                       "logits: got %s in the row of token %lld, allowed: numbers below +inf, "
                       "at least one of them finite",
                       kGot[position % 4], static_cast<long long>(position / 4));
}

}  // namespace sonicmoe::cuda
