#pragma once

#include <cstring>
#include <limits>
#include <type_traits>

#include "cuda/device/fragment.cuh"
#include "cuda/device/warp.cuh"

/// Limits of an activation, for two values at a time while they are in 16 bits. That takes half the
/// instructions of fp32, which the epilogue of down_proj_dgrad waits for.
namespace sonicmoe::cuda {

/// CUDA's own type of two T in a word, for its functions.
template <class T>
using TwoOf = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <class T>
__device__ __forceinline__ TwoOf<T> two_of(std::uint32_t word) {
  TwoOf<T> two;
  memcpy(&two, &word, sizeof word);
  return two;
}

template <class Two>
__device__ __forceinline__ std::uint32_t word_of(const Two& two) {
  std::uint32_t word;
  memcpy(&word, &two, sizeof word);
  return word;
}

/// copysign(min(|x|, limit), x) of both halves, or a NaN of a NaN.
template <class T>
__device__ __forceinline__ TwoOf<T> clamp_magnitude(TwoOf<T> x, TwoOf<T> limit) {
  std::uint32_t made;
  if constexpr (std::is_same_v<T, __half>) {
    asm("min.NaN.xorsign.abs.f16x2 %0, %1, %2;"
        : "=r"(made)
        : "r"(word_of(x)), "r"(word_of(limit)));
  } else {
    asm("min.NaN.xorsign.abs.bf16x2 %0, %1, %2;"
        : "=r"(made)
        : "r"(word_of(x)), "r"(word_of(limit)));
  }
  return two_of<T>(made);
}

template <class T>
__device__ __forceinline__ T round_down(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rd(x);
  } else {
    return __float2bfloat16_rd(x);
  }
}

/// Two values within their limits.
struct Limited {
  std::uint32_t inside;
  std::uint32_t beyond;  ///< all bits of a half whose value has the slope 0

  /// The gradient of the values before, where `d` is that of `inside`.
  __device__ __forceinline__ std::uint32_t slope(std::uint32_t d) const { return d & ~beyond; }
};

/// Is Fn an activation with limits? The functions that it hands to visit_inside() are none.
template <class Fn>
constexpr bool kHasLimits = requires {
  Fn::kClampsGate;
};

/// The limits of an activation Fn. A NaN is within every limit and stays a NaN.
template <class T, class Fn>
class Limits {
 public:
  explicit __device__ __forceinline__ Limits(const Fn& fn)
      : high_(two(fn.limit, fn.limit)),
        pair_low_(two(-kInf, -fn.limit)),
        pair_high_(two(Fn::kClampsGate ? fn.limit : kInf, fn.limit)) {
    if constexpr (!Fn::kClampsGate) {
      // No value of T lies between last_gate and this.
      const T last = round_down<T>(fn.last_gate);
      last_gates_ = {last, last};
      last_of_pair_ = {last, from_float<T>(kInf)};
    }
  }

  __device__ __forceinline__ Limited gates(std::uint32_t g) const {
    const TwoOf<T> gates = two_of<T>(g);
    if constexpr (Fn::kClampsGate) {
      return clamped(gates, __hmin2_nan(gates, high_));
    } else {
      return {g, __hgt2_mask(gates, last_gates_)};
    }
  }
  __device__ __forceinline__ Limited ups(std::uint32_t u) const {
    const TwoOf<T> ups = two_of<T>(u);
    return clamped(ups, clamp_magnitude<T>(ups, high_));
  }
  /// A gate in the low half, its up in the high one.
  __device__ __forceinline__ Limited pair(std::uint32_t h) const {
    const TwoOf<T> pair = two_of<T>(h);
    Limited made = clamped(pair, __hmax2_nan(__hmin2_nan(pair, pair_high_), pair_low_));
    if constexpr (!Fn::kClampsGate) made.beyond |= __hgt2_mask(pair, last_of_pair_);
    return made;
  }

 private:
  static constexpr float kInf = std::numeric_limits<float>::infinity();
  TwoOf<T> high_, pair_low_, pair_high_;
  TwoOf<T> last_gates_, last_of_pair_;

  static __device__ __forceinline__ TwoOf<T> two(float low, float high) {
    return two_of<T>(Pair<T>::pack(low, high));
  }
  static __device__ __forceinline__ Limited clamped(TwoOf<T> before, TwoOf<T> inside) {
    return {word_of(inside), __hne2_mask(before, inside)};
  }
};

/// The same for a function that takes every value.
struct NoLimits {
  struct Same {
    std::uint32_t inside;
    __device__ __forceinline__ std::uint32_t slope(std::uint32_t d) const { return d; }
  };
  __device__ __forceinline__ Same gates(std::uint32_t g) const { return {g}; }
  __device__ __forceinline__ Same ups(std::uint32_t u) const { return {u}; }
  __device__ __forceinline__ Same pair(std::uint32_t h) const { return {h}; }
};

/// Calls f(fn, limits) with a function of limited values and their limits. A limit that T cannot
/// hold stays in the function.
template <class T, class Fn, class F>
__device__ __forceinline__ void visit_limits(const Fn& fn, F&& f) {
  if constexpr (kHasLimits<Fn>) {
    if (Pair<T>::unpack(Pair<T>::pack(fn.limit, fn.limit)).x == fn.limit) {
      return fn.visit_inside([&](const auto& inside) { f(inside, Limits<T, Fn>(fn)); });
    }
  }
  f(fn, NoLimits{});
}

}  // namespace sonicmoe::cuda
