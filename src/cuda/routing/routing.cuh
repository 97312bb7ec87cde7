#pragma once

#include <cstdint>

#include "cuda/device/warp.cuh"
#include "math/softmax.h"
#include "sonicmoe/ops.h"

/// Shared by the routing kernels: the softmax of a row of logits, and the check that refuses bad
/// rows.
namespace sonicmoe::cuda {

/// An unsigned integer that ascends with x. Both zeros have the same one; a NaN lies past the
/// infinity of its sign.
__device__ __forceinline__ std::uint32_t order_bits(float x) {
  const std::uint32_t u = math::bits(math::add(x, 0.0f));
  return u ^ (static_cast<std::uint32_t>(static_cast<std::int32_t>(u) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float from_order_bits(std::uint32_t ordered) {
  return math::from_bits(ordered >> 31 ? ordered ^ 0x80000000u : ~ordered);
}

/// Maximum of a row of logits, and the sum of e^(x - max) over the row.
struct RowSoftmax {
  float max;
  float sum;
  __device__ float term(float x) const { return math::softmax_term(x, max); }
  __device__ float probability(float x) const { return math::div(term(x), sum); }
};
/// One warp computes this for one row; every lane gets the result. It has the bits of src/cpu's
/// softmax.
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

/// Why a row of logits is refused. check_logits has a text for each, in the same order.
enum class BadRow : std::uint32_t {
  nan,
  positive_infinity,
  only_negative_infinity,
  only_negative_infinity_at_ids,
};

/// Ids of the caller (T, K) that a softmax runs over, or null.
struct GivenIds {
  const std::int32_t* ids = nullptr;
  int top_k = 0;
};
/// The largest order_bits() of a row at a token's given ids; 0 if all are sentinels. One warp calls
/// it; every lane gets the result.
template <class T>
__device__ std::uint32_t largest_at(const T* row, std::int64_t experts, const std::int32_t* ids,
                                    int top_k) {
  std::uint32_t largest = 0;
  for (int k = lane_id(); k < top_k; k += kWarp) {
    const std::int32_t e = ids[k];
    if (e >= 0 && e < experts) largest = max(largest, order_bits(to_float(row[e])));
  }
  return __reduce_max_sync(kAllLanes, largest);
}
/// Is the result of largest_at() that of ids that only have logits of -inf?
__device__ __forceinline__ bool only_negative_infinity(std::uint32_t largest) {
  return largest == order_bits(-INFINITY);
}

/// Lowers *first to 4 t + BadRow, where t is the first row that is refused. A warp checks one row.
template <class T>
__global__ void find_bad_logits(const T* logits, std::int64_t tokens, std::int64_t experts,
                                GivenIds given, bool softmax, unsigned long long* first) {
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
  finite = __any_sync(kAllLanes, finite) || !softmax;
  bool at_ids = false;
  if (given.ids != nullptr) {
    at_ids = only_negative_infinity(
        largest_at(logits + t * experts, experts, given.ids + t * given.top_k, given.top_k));
  }
  if (!nan && !infinite && finite && !at_ids) return;
  const BadRow why = nan        ? BadRow::nan
                     : infinite ? BadRow::positive_infinity
                     : !finite  ? BadRow::only_negative_infinity
                                : BadRow::only_negative_infinity_at_ids;
  if (lane_id() == 0) {
    atomicMin(first, static_cast<unsigned long long>(t) * 4 + static_cast<unsigned>(why));
  }
}

inline constexpr std::size_t kCheckBytes = 8;  ///< scratch of a check, on the device

/// Sets *position to the first bad position, or to all ones if every position is good.
/// `launch(first)` launches a kernel that lowers *first to that position; `first` is `scratch`,
/// kCheckBytes on the device. The call waits for the stream, so only checked mode makes it. `what`
/// names the operation in an error.
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

/// Returns invalid_data if a row has a NaN or +inf, or with `softmax` no finite logit, or none at
/// the given ids.
/// `scratch` is kCheckBytes on the device. Waits for the stream.
template <class T>
Status check_logits(const T* logits, std::int64_t tokens, std::int64_t experts, void* scratch,
                    cudaStream_t stream, GivenIds given = {}, bool softmax = true) {
  if (tokens == 0) return {};
  std::uint64_t position = 0;
  const auto launch = [&](unsigned long long* first) {
    find_bad_logits<<<blocks_for(tokens, 8), 8 * kWarp, 0, stream>>>(logits, tokens, experts, given,
                                                                     softmax, first);
  };
  if (Status s = first_bad(scratch, stream, "logits: check", &position, launch); !s.ok()) return s;
  if (position == ~std::uint64_t{0}) return {};
  static constexpr const char* kGot[] = {"a NaN in the row", "+inf in the row",
                                         "only -inf in the row", "only -inf at the ids"};
  return Status::error(StatusCode::invalid_data,
                       "logits: got %s of token %lld, allowed: numbers below +inf%s",
                       kGot[position % 4], static_cast<long long>(position / 4),
                       softmax ? ", at least one of them finite" : "");
}

}  // namespace sonicmoe::cuda
