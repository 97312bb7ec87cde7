#pragma once

#include "core/block_counts.h"
#include "cuda/device/warp.cuh"

/// Shared by the kernels in which several tokens share a warp: a token's few largest keys, and
/// counts of what was chosen.
namespace sonicmoe::cuda {

// A row of block_counts covers this many tokens. A block of these kernels takes as many, so it
// counts its own row.
constexpr int kCounted = static_cast<int>(BlockCounts::kTokens);

/// These kernels keep the kFew largest keys: first of a lane, then of more and more lanes.
constexpr int kFew = 8;
constexpr int kFewExperts = 512;

__device__ __forceinline__ std::uint32_t larger(std::uint32_t a, std::uint32_t b) {
  return max(a, b);
}
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ std::uint32_t smaller(std::uint32_t a, std::uint32_t b) {
  return min(a, b);
}
__device__ __forceinline__ float smaller(float a, float b) { return fminf(a, b); }

/// Puts the larger key into a.
template <class Key>
__device__ __forceinline__ void order(Key& a, Key& b) {
  const Key first = larger(a, b);
  b = smaller(a, b);
  a = first;
}
/// Sorts a bitonic sequence (it rises and then falls, or falls and then rises), largest first.
template <class Key>
__device__ __forceinline__ void order_bitonic(Key (&key)[kFew]) {
#pragma unroll
  for (int distance = kFew / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      if ((i & distance) == 0) order(key[i], key[i + distance]);
    }
  }
}
/// Sorts any keys, largest first, by Batcher's network of 19 exchanges.
template <class Key>
__device__ __forceinline__ void order_all(Key (&key)[kFew]) {
  constexpr int kPairs[19][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {0, 2}, {1, 3}, {4, 6},
                                 {5, 7}, {1, 2}, {5, 6}, {0, 4}, {1, 5}, {2, 6}, {3, 7},
                                 {2, 4}, {3, 5}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
  for (int i = 0; i < 19; ++i) order(key[kPairs[i][0]], key[kPairs[i][1]]);
}

/// The kFew largest keys of the kLanes lanes of a token, in each of them. They are in descending
/// order if they are to be `ordered`. key_of(i) is the lane's key i. A NaN may stand only among
/// -inf and other NaNs, in its eight keys from a multiple of 8 on.
template <int kLanes, int kPerLane, class KeyOf, class Key>
__device__ __forceinline__ void few_largest(KeyOf key_of, Key (&best)[kFew], bool ordered = true) {
#pragma unroll
  for (int first = 0; first < kPerLane; first += kFew) {
    Key key[kFew];
#pragma unroll
    for (int i = 0; i < kFew; ++i) key[i] = key_of(first + i);
    order_all(key);
    // Two descending lists of kFew: entry i of one and entry kFew - 1 - i of the other. The larger
    // of each such pair are the kFew largest of both, as a bitonic sequence.
#pragma unroll
    for (int i = 0; i < kFew; ++i)
      best[i] = first == 0 ? key[i] : larger(best[i], key[kFew - 1 - i]);
    if (first > 0) order_bitonic(best);
  }
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    Key theirs[kFew];
#pragma unroll
    for (int i = 0; i < kFew; ++i) theirs[i] = __shfl_xor_sync(kAllLanes, best[i], distance);
#pragma unroll
    for (int i = 0; i < kFew; ++i) best[i] = larger(best[i], theirs[kFew - 1 - i]);
    if (ordered || 2 * distance < kLanes) order_bitonic(best);
  }
}

/// A block of kThreads writes its row of block_counts, `stride` bytes.
template <int kThreads>
__device__ __forceinline__ void store_counts(const std::int32_t* count, std::uint8_t* block_counts,
                                             std::int32_t stride) {
  std::uint8_t* const row = block_counts + std::int64_t{blockIdx.x} * stride;
  for (int e = threadIdx.x; e < stride; e += kThreads) {
    row[e] = static_cast<std::uint8_t>(count[e]);
  }
}

}  // namespace sonicmoe::cuda
