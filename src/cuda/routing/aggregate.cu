// out[t] = sum over t's slots, in slot order, of score * rows[row of slot], + another such sum of
// dlogits[t, e] * router_w[e], + addend[t]; fp32, one rounding. It runs at the speed of memory: a
// thread owns 8 columns of a token and has the 16-byte loads of several rows in flight.
#include <algorithm>

#include "core/backends.h"
#include "cuda/routing/routing.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 256;  // of a block, at most
// Of kThreads that shall fit on a multiprocessor; the second, with the router's part. There two
// rows of its weights in flight beside the others leave 64 registers enough.
constexpr int kBlocks = 3;
constexpr int kRoutedBlocks = 4;
constexpr int kWeightRows = 2;
constexpr std::size_t kSlotBytes = 48 << 10;  // of shared memory, at most, for a block's slots

template <class T>
__device__ __forceinline__ void add(const Eight<T>& values, float (&sum)[8]) {
#pragma unroll
  for (int c = 0; c < 8; ++c) sum[c] = math::add(sum[c], to_float(values.value[c]));
}
template <class T>
__device__ __forceinline__ void add_times(float factor, const Eight<T>& values, float (&sum)[8]) {
#pragma unroll
  for (int c = 0; c < 8; ++c) sum[c] = math::fma(factor, to_float(values.value[c]), sum[c]);
}
template <class T>
__device__ __forceinline__ void store_rounded(const float (&sum)[8], T* to) {
  Eight<T> result;
#pragma unroll
  for (int c = 0; c < 8; ++c) result.value[c] = from_float<T>(sum[c]);
  *reinterpret_cast<Eight<T>*>(to) = result;
}

/// The slots of a token, in order.
struct Slots {
  const std::int32_t* slot_rows;
  const std::int32_t* token_offsets;  // lists only
  const std::int32_t* token_slots;    // lists only
  std::int32_t top_k;                 // 0: lists
};

/// Up to kCount of a token's slots.
template <int kCount>
struct Group {
  std::int32_t row[kCount];  ///< -1: none
  float score[kCount];
};

template <bool kWeighted, bool kLists, int kCount>
__device__ __forceinline__ Group<kCount> look_up(const Slots& slots, const float* slot_scores,
                                                 std::int32_t begin, std::int32_t count) {
  Group<kCount> group;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    group.row[i] = -1;
    if (i < count) {
      const std::int32_t slot = kLists ? slots.token_slots[begin + i] : begin + i;
      group.row[i] = slots.slot_rows[slot];
      if constexpr (kWeighted) group.score[i] = slot_scores[slot];
    }
  }
  return group;
}

/// kInFlight rows are loaded before the first is added.
template <class T, bool kWeighted, bool kLists, int kInFlight>
__global__ void __launch_bounds__(kThreads, kBlocks)
    aggregate(const T* rows, Slots slots, const float* slot_scores, const T* addend, T* out,
              std::uint32_t tokens, std::uint32_t hidden) {
  const std::uint32_t t = blockIdx.x * blockDim.y + threadIdx.y;
  wait_for_previous();
  if (t >= tokens) return;
  // Slots, rows and t * K are int32 by validation.
  const std::int32_t begin =
      kLists ? slots.token_offsets[t] : static_cast<std::int32_t>(t) * slots.top_k;
  const std::int32_t count = kLists ? slots.token_offsets[t + 1] - begin : slots.top_k;
  const auto look = [&](std::int32_t first) {
    return look_up<kWeighted, kLists, kInFlight>(slots, slot_scores, begin + first, count - first);
  };
  Group<kInFlight> group = look(0);
  for (std::uint32_t j = threadIdx.x * 8; j < hidden; j += blockDim.x * 8) {
    const Eight<T> extra = load_once(addend + std::uint64_t{t} * hidden + j, addend != nullptr);
    float sum[8] = {};
    for (std::int32_t first = 0; first < count; first += kInFlight) {
      if (count > kInFlight) group = look(first);
      Eight<T> part[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        part[i] =
            load_once(rows + std::int64_t{group.row[i]} * static_cast<std::int32_t>(hidden) + j,
                      group.row[i] >= 0);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (group.row[i] < 0) continue;
        if constexpr (kWeighted) {
          add_times(group.score[i], part[i], sum);
        } else {
          add(part[i], sum);
        }
      }
    }
    if (addend != nullptr) add(extra, sum);
    store_rounded(sum, out + std::uint64_t{t} * hidden + j);
  }
}

/// What the sum with the router's part reads beside the rows.
template <class T>
struct Routed {
  const std::int32_t* slot_rows;
  const std::int32_t* slot_experts;
  const T* dlogits;
  const T* router_w;
  std::int32_t experts;
  std::int32_t top_k;
};

/// A slot in shared memory. A row or an expert that is not there adds zeros, which change no bit: a
/// sum of rows that began at +0 is never -0, and added to it, the router's may be either zero.
struct alignas(16) RoutedSlot {
  std::int32_t row;     ///< -1: none
  std::int32_t expert;  ///< -1: none
  float gradient;       ///< of the expert's logit; 0: none
};

/// The slots of the block's tokens, (tokens, K): looked up once for all columns, and out of the way
/// of the loads, which need the registers.
template <class T>
__device__ __forceinline__ void look_up_slots(const Routed<T>& routed, std::uint32_t first_token,
                                              std::uint32_t tokens, RoutedSlot* slots) {
  const int count = static_cast<int>(min(blockDim.y, tokens - first_token)) * routed.top_k;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < count; i += blockDim.x * blockDim.y) {
    const std::uint64_t t = first_token + static_cast<unsigned>(i / routed.top_k);
    const std::uint64_t slot = std::uint64_t{first_token} * routed.top_k + i;
    const std::int32_t e = routed.slot_experts[slot];
    const bool real = e >= 0 && e < routed.experts;
    slots[i] = {routed.slot_rows[slot], real ? e : -1,
                real ? to_float(routed.dlogits[t * routed.experts + e]) : 0.0f};
  }
  __syncthreads();
}

/// With the router's part: its terms, whose weights all tokens share and the caches keep, are added
/// up while kInFlight rows are on their way from memory. So they need a sum of their own.
template <class T, int kInFlight>
__global__ void __launch_bounds__(kThreads, kRoutedBlocks)
    aggregate_routed(const T* rows, Routed<T> routed, const T* addend, T* out, std::uint32_t tokens,
                     std::uint32_t hidden) {
  extern __shared__ RoutedSlot slots[];
  const std::uint32_t first_token = blockIdx.x * blockDim.y;
  wait_for_previous();
  look_up_slots(routed, first_token, tokens, slots);
  const std::uint32_t t = first_token + threadIdx.y;
  if (t >= tokens) return;
  const RoutedSlot* const mine = slots + threadIdx.y * static_cast<unsigned>(routed.top_k);
  const auto slot = [&](std::int32_t i) {
    return i < routed.top_k ? mine[i] : RoutedSlot{-1, -1, 0.0f};
  };
  const auto width = static_cast<std::int32_t>(hidden);
  for (std::uint32_t j = threadIdx.x * 8; j < hidden; j += blockDim.x * 8) {
    float sum[8] = {};
    float routers[8] = {};
    for (std::int32_t first = 0; first < routed.top_k; first += kInFlight) {
      Eight<T> part[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const std::int32_t row = slot(first + i).row;
        part[i] = load_once(rows + std::int64_t{row} * width + j, row >= 0);
      }
#pragma unroll
      for (int group = 0; group < kInFlight; group += kWeightRows) {
        Eight<T> weights[kWeightRows];
        float gradient[kWeightRows];
#pragma unroll
        for (int i = 0; i < kWeightRows; ++i) {
          const RoutedSlot term = slot(first + group + i);
          weights[i] =
              load_kept(routed.router_w + std::int64_t{term.expert} * width + j, term.expert >= 0);
          gradient[i] = term.gradient;
        }
#pragma unroll
        for (int i = 0; i < kWeightRows; ++i) add_times(gradient[i], weights[i], routers);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) add(part[i], sum);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) sum[c] = math::add(sum[c], routers[c]);
    const std::uint64_t at = std::uint64_t{t} * hidden + j;
    if (addend != nullptr) add(load_once(addend + at, true), sum);
    store_rounded(sum, out + at);
  }
}

/// Threads along the columns and tokens of a block. Many columns are cut into equal turns.
dim3 block_of(std::int64_t columns) {
  const std::int64_t chunks = columns / 8;
  const std::int64_t turns = (chunks + kThreads - 1) / kThreads;
  const std::int64_t each = (chunks + turns - 1) / turns;
  unsigned wide = kWarp;
  if (each > kWarp) {
    wide = static_cast<unsigned>((each + kWarp - 1) / kWarp * kWarp);
  } else {
    while (wide / 2 >= each) wide /= 2;
  }
  return dim3(wide, kThreads / wide);
}

template <class T>
Status run_plain(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  const bool weighted = a.slot_scores != nullptr;
  const dim3 block = block_of(d.hidden);
  const auto top_k = [&](auto in_flight) {
    constexpr int kMany = in_flight.value;
    return weighted ? aggregate<T, true, false, kMany> : aggregate<T, false, false, kMany>;
  };
  const auto lists = weighted ? aggregate<T, true, true, 8> : aggregate<T, false, true, 8>;
  launch_early(
      d.top_k == 0   ? lists
      : d.top_k <= 4 ? top_k(std::integral_constant<int, 4>{})
                     : top_k(std::integral_constant<int, 8>{}),
      blocks_for(d.tokens, block.y), block, 0, stream_of(exec), static_cast<const T*>(a.rows),
      Slots{a.slot_rows, a.token_offsets, a.token_slots, static_cast<std::int32_t>(d.top_k)},
      a.slot_scores, static_cast<const T*>(a.addend), static_cast<T*>(a.out),
      static_cast<std::uint32_t>(d.tokens), static_cast<std::uint32_t>(d.hidden));
  return launched("aggregate: launch");
}

template <class T>
Status run_routed(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  dim3 block = block_of(d.hidden);
  const std::size_t of_token = static_cast<std::size_t>(d.top_k) * sizeof(RoutedSlot);
  block.y = std::min(block.y, static_cast<unsigned>(kSlotBytes / of_token));
  launch_early(d.top_k <= 4 ? aggregate_routed<T, 4> : aggregate_routed<T, 8>,
               blocks_for(d.tokens, block.y), block, block.y * of_token, stream_of(exec),
               static_cast<const T*>(a.rows),
               Routed<T>{a.slot_rows, a.slot_experts, static_cast<const T*>(a.dlogits),
                         static_cast<const T*>(a.router_w), static_cast<std::int32_t>(d.experts),
                         static_cast<std::int32_t>(d.top_k)},
               static_cast<const T*>(a.addend), static_cast<T*>(a.out),
               static_cast<std::uint32_t>(d.tokens), static_cast<std::uint32_t>(d.hidden));
  return launched("aggregate: launch");
}

Status run(const AggregateDesc& d, const AggregateArgs& a, void*, const Exec& exec) noexcept {
  if (d.tokens == 0) return {};
  return visit_storage(d.dtype, [&](auto type) {
    using T = decltype(type);
    return a.router_w != nullptr ? run_routed<T>(d, a, exec) : run_plain<T>(d, a, exec);
  });
}

}  // namespace

const Kernel<AggregateDesc> kAggregate = {"aggregate",
                                          "cuda.aggregate",
                                          DeviceType::cuda,
                                          takes_16_bit<AggregateDesc>,
                                          no_workspace<AggregateDesc>,
                                          run};

}  // namespace sonicmoe::cuda
