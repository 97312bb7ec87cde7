// out[t] = sum over t's slots, in slot order, of score * rows[row of slot], then of dlogits[t, e] *
// router_w[e], + addend[t]; fp32, one rounding. It runs at the speed of memory: a thread owns 8
// columns of a token and has the 16-byte loads of several rows in flight.
#include <algorithm>

#include "core/backends.h"
#include "cuda/routing/routing.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 256;  // of a block, at most
constexpr int kBlocks = 3;     // of kThreads that shall fit on a multiprocessor
// Columns of a block that also adds rows of the router's weights, where those are many: all blocks
// at work then share the same few columns of all experts, which L1 keeps.
constexpr int kRoutedColumns = 256;
constexpr std::size_t kTermBytes = 48 << 10;  // of shared memory, at most, for the router's terms

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

/// What the router adds to dX.
template <class T>
struct Routed {
  const std::int32_t* slot_experts;
  const T* dlogits;
  const T* router_w;
  std::int32_t experts;
};

/// Row `expert` of the router's weights, times `gradient`.
struct RoutedTerm {
  std::int32_t expert;  ///< -1: none
  float gradient;
};

/// The terms of a block's tokens into shared memory, (tokens, K).
template <class T>
__device__ __forceinline__ void look_up_routed(const Routed<T>& routed, std::int32_t top_k,
                                               std::uint32_t tokens, RoutedTerm* terms) {
  const std::uint32_t first = blockIdx.x * blockDim.y;
  const int count = static_cast<int>(min(blockDim.y, tokens - first)) * top_k;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < count; i += blockDim.x * blockDim.y) {
    const std::uint64_t t = first + static_cast<unsigned>(i / top_k);
    const std::int32_t e = routed.slot_experts[std::uint64_t{first} * top_k + i];
    const bool real = e >= 0 && e < routed.experts;
    terms[i] = {real ? e : -1, real ? to_float(routed.dlogits[t * routed.experts + e]) : 0.0f};
  }
  __syncthreads();
}

/// Blocks along y take `columns` columns each. kInFlight rows are loaded before the first is added.
template <class T, bool kWeighted, bool kLists, bool kRouted, int kInFlight>
__global__ void __launch_bounds__(kThreads, kBlocks)
    aggregate(const T* rows, Slots slots, const float* slot_scores, const T* addend,
              Routed<T> routed, T* out, std::uint32_t tokens, std::uint32_t hidden,
              std::uint32_t columns) {
  extern __shared__ RoutedTerm terms[];
  const std::uint32_t t = blockIdx.x * blockDim.y + threadIdx.y;
  wait_for_previous();
  const bool real = t < tokens;
  if (!kRouted && !real) return;  // routed: after the block's barrier
  // Slots, rows and t * K are int32 by validation.
  std::int32_t begin = 0;
  std::int32_t count = 0;
  if (real) {
    begin = kLists ? slots.token_offsets[t] : static_cast<std::int32_t>(t) * slots.top_k;
    count = kLists ? slots.token_offsets[t + 1] - begin : slots.top_k;
  }
  const auto look = [&](std::int32_t first) {
    return look_up<kWeighted, kLists, kInFlight>(slots, slot_scores, begin + first, count - first);
  };
  Group<kInFlight> group = look(0);
  if constexpr (kRouted) {
    look_up_routed(routed, slots.top_k, tokens, terms);
    if (!real) return;
  }
  const std::uint32_t begin_column = blockIdx.y * columns;
  const std::uint32_t end_column = min(begin_column + columns, hidden);
  for (std::uint32_t j = begin_column + threadIdx.x * 8; j < end_column; j += blockDim.x * 8) {
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
    if constexpr (kRouted) {
      const RoutedTerm* const mine = terms + threadIdx.y * static_cast<unsigned>(count);
      for (std::int32_t first = 0; first < count; first += 4) {
        RoutedTerm term[4];
        Eight<T> part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          term[i] = first + i < count ? mine[first + i] : RoutedTerm{-1, 0.0f};
          part[i] =
              load_kept(routed.router_w +
                            std::int64_t{term[i].expert} * static_cast<std::int32_t>(hidden) + j,
                        term[i].expert >= 0);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (term[i].expert < 0) continue;
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            sum[c] = math::fma(term[i].gradient, to_float(part[i].value[c]), sum[c]);
          }
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
Status run_typed(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  const bool weighted = a.slot_scores != nullptr;
  const bool routed = a.router_w != nullptr;
  const std::int64_t columns =
      routed && d.top_k > 4 ? std::min<std::int64_t>(d.hidden, kRoutedColumns) : d.hidden;
  dim3 block = block_of(columns);
  std::size_t terms = 0;
  if (routed) {
    const std::size_t of_token = static_cast<std::size_t>(d.top_k) * sizeof(RoutedTerm);
    block.y = std::min(block.y, static_cast<unsigned>(kTermBytes / of_token));
    terms = block.y * of_token;
  }
  dim3 grid = blocks_for(d.tokens, block.y);
  grid.y = static_cast<unsigned>((d.hidden + columns - 1) / columns);
  const auto top_k = [&](auto in_flight) {
    constexpr int kMany = in_flight.value;
    if (routed) return aggregate<T, false, false, true, kMany>;
    return weighted ? aggregate<T, true, false, false, kMany>
                    : aggregate<T, false, false, false, kMany>;
  };
  const auto lists =
      weighted ? aggregate<T, true, true, false, 8> : aggregate<T, false, true, false, 8>;
  launch_early(
      d.top_k == 0   ? lists
      : d.top_k <= 4 ? top_k(std::integral_constant<int, 4>{})
                     : top_k(std::integral_constant<int, 8>{}),
      grid, block, terms, stream_of(exec), static_cast<const T*>(a.rows),
      Slots{a.slot_rows, a.token_offsets, a.token_slots, static_cast<std::int32_t>(d.top_k)},
      a.slot_scores, static_cast<const T*>(a.addend),
      Routed<T>{a.slot_experts, static_cast<const T*>(a.dlogits), static_cast<const T*>(a.router_w),
                static_cast<std::int32_t>(d.experts)},
      static_cast<T*>(a.out), static_cast<std::uint32_t>(d.tokens),
      static_cast<std::uint32_t>(d.hidden), static_cast<std::uint32_t>(columns));
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
