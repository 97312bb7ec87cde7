// out[t] = sum over t's slots, in slot order, of score * rows[row of slot], + addend[t]; fp32, one
// rounding. It runs at the speed of memory: a thread owns 8 columns of a token and has the 16-byte
// loads of several rows in flight.
#include <algorithm>

#include "core/backends.h"
#include "cuda/routing/routing.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 256;  // of a block, at most
constexpr int kBlocks = 3;     // of kThreads that shall fit on a multiprocessor

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
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float x = to_float(part[i].value[c]);
          sum[c] = kWeighted ? math::fma(group.score[i], x, sum[c]) : math::add(sum[c], x);
        }
      }
    }
    if (addend != nullptr) {
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = math::add(sum[c], to_float(extra.value[c]));
    }
    Eight<T> result;
#pragma unroll
    for (int c = 0; c < 8; ++c) result.value[c] = from_float<T>(sum[c]);
    *reinterpret_cast<Eight<T>*>(out + std::uint64_t{t} * hidden + j) = result;
  }
}

/// Threads along a row and tokens of a block. A wide row is cut into equal parts.
dim3 block_of(std::int64_t hidden) {
  const std::int64_t chunks = hidden / 8;
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
Status run_typed(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  const dim3 block = block_of(d.hidden);
  const bool weighted = a.slot_scores != nullptr;
  const auto lists = weighted ? aggregate<T, true, true, 8> : aggregate<T, false, true, 8>;
  const auto few = weighted ? aggregate<T, true, false, 4> : aggregate<T, false, false, 4>;
  const auto many = weighted ? aggregate<T, true, false, 8> : aggregate<T, false, false, 8>;
  launch_early(
      d.top_k == 0   ? lists
      : d.top_k <= 4 ? few
                     : many,
      blocks_for(d.tokens, block.y), block, 0, stream_of(exec), static_cast<const T*>(a.rows),
      Slots{a.slot_rows, a.token_offsets, a.token_slots, static_cast<std::int32_t>(d.top_k)},
      a.slot_scores, static_cast<const T*>(a.addend), static_cast<T*>(a.out),
      static_cast<std::uint32_t>(d.tokens), static_cast<std::uint32_t>(d.hidden));
  return launched("aggregate: launch");
}

Status run(const AggregateDesc& d, const AggregateArgs& a, void*, const Exec& exec) noexcept {
  if (d.tokens == 0) return {};
  return visit_storage(d.dtype, [&](auto type) { return run_typed<decltype(type)>(d, a, exec); });
}

}  // namespace

const Kernel<AggregateDesc> kAggregate = {"aggregate",
                                          "cuda.aggregate",
                                          DeviceType::cuda,
                                          takes_16_bit<AggregateDesc>,
                                          no_workspace<AggregateDesc>,
                                          run};

}  // namespace sonicmoe::cuda
