// The sums over a token's rows, in fp32 with one rounding at the end.
//   out[t] = sum of score * rows[row] + sum of dlogits[t, e] * router_w[e] + addend[t].
// Each sum runs over t's slots in slot order; row, score and expert e are the slot's. Memory
// bandwidth bounds the kernel.
#include <algorithm>

#include "core/backends.h"
#include "cuda/device/warp.cuh"
#include "cuda/rows/aggregate_ring.cuh"

namespace sonicmoe::cuda {
namespace {

// The kernel without the router's part. A thread owns a piece: 8 columns of a token. A block owns
// kThreads consecutive pieces of `out`, wherever a token begins: blocks are full for every d.

constexpr int kThreads = 256;

/// What token t's slots are.
enum class SlotsOf {
  top_k,   ///< t * K and the next
  lists,   ///< token_slots[i], i from token_offsets[t] to token_offsets[t + 1] - 1
  packed,  ///< i itself, for the same i
};
struct Lists {
  const std::int32_t* token_offsets;
  const std::int32_t* token_slots;
};

/// Slots of a token, where it may have any number: negative, and it sums groups of at most so many.
/// All groups of a token have the same size, but the last may be smaller.
constexpr int kAny = -5;
constexpr int kAnyFew = -3;  ///< where most tokens have no more

/// Blocks that a multiprocessor holds. A thread loads all rows of a group before it adds the first,
/// so fewer slots take fewer registers a thread.
template <int kSlots>
constexpr int kBlocksThatFit = kSlots == kAny      ? (kArch > 90 ? 3 : 4)  // four would spill
                               : kSlots == kAnyFew ? 5
                               : kSlots <= 2       ? 8
                               : kSlots <= 4       ? 5
                               : kSlots <= 8       ? 4
                               : kArch > 90        ? 2  // three would spill
                                                   : 3;

/// A token has at most kSlots slots, or any number with kAny and kAnyFew.
///
/// A slot without a row adds a zero that changes no bit of the sum. An unweighted sum begins at
/// positive zero and never becomes negative zero, so it adds positive zero. A weighted sum may
/// underflow to negative zero, so it adds negative zero: a score of -0 times +0.
template <class T, int kSlots, bool kWeighted, SlotsOf kOf>
__global__ void __launch_bounds__(kThreads, kBlocksThatFit<kSlots>)
    aggregate(const T* rows, Slots slots, Lists lists, const T* addend, T* out,
              std::uint32_t tokens, std::uint32_t pieces, bool leave_first) {
  const std::uint64_t policy = l2_policy(leave_first);
  const std::uint64_t first_piece = std::uint64_t{blockIdx.x} * kThreads;
  const std::uint32_t piece = static_cast<std::uint32_t>(first_piece % pieces) + threadIdx.x;
  const std::uint32_t t = static_cast<std::uint32_t>(first_piece / pieces) + piece / pieces;
  const std::uint32_t j = piece % pieces * 8, hidden = pieces * 8;
  wait_for_previous();
  if (t >= tokens) return;
  constexpr bool kLists = kOf != SlotsOf::top_k;
  // Validation keeps slots and t * K within int32.
  const std::int32_t begin =
      kLists ? lists.token_offsets[t] : static_cast<std::int32_t>(t) * slots.top_k;
  const std::uint32_t count = kLists ? max(lists.token_offsets[t + 1] - begin, 0) : slots.top_k;

  constexpr bool kGroups = kSlots < 0;
  constexpr std::uint32_t kRows = kGroups ? -kSlots : kSlots;  // most rows of a group
  const std::uint32_t groups = max((count + kRows - 1) / kRows, 1u);
  const std::uint32_t group = kGroups ? (count + groups - 1) / groups : kRows;
  struct LookedUp {
    std::int32_t row[kRows];
    float score[kRows];
  };
  const auto look_up = [&](std::uint32_t first) {
    LookedUp found;
#pragma unroll
    for (std::uint32_t i = 0; i < kRows; ++i) {
      found.row[i] = -1;
      if (i < group && first + i < count) {
        const std::int32_t at = begin + static_cast<std::int32_t>(first + i);
        const std::int32_t slot = kOf == SlotsOf::lists ? lists.token_slots[at] : at;
        found.row[i] = slots.rows[slot];
        if constexpr (kWeighted) found.score[i] = slots.scores[slot];
      }
      if (kWeighted && found.row[i] < 0) found.score[i] = -0.0f;
    }
    return found;
  };
  LookedUp found = look_up(0);
  const uint4 extra = load_once(addend + std::uint64_t{t} * hidden + j, addend != nullptr, policy);
  float sum[8] = {};
  const auto add_group = [&](std::uint32_t first) {
    uint4 part[kRows];
#pragma unroll
    for (std::uint32_t i = 0; i < kRows; ++i) {
      part[i] =
          load_once(rows + std::int64_t{found.row[i]} * hidden + j, found.row[i] >= 0, policy);
    }
    const LookedUp now = found;
    if constexpr (kGroups) found = look_up(first + group);  // while these rows load
#pragma unroll
    for (std::uint32_t i = 0; i < kRows; ++i) {
      if constexpr (kWeighted) {
        add_times<T>(now.score[i], part[i], sum);
      } else {
        add<T>(part[i], sum);
      }
    }
  };
  if constexpr (kGroups) {
    for (std::uint32_t first = 0; first < count; first += group) add_group(first);
  } else {
    add_group(0);
  }
  if (addend != nullptr) add<T>(extra, sum);
  store_rounded(sum, out + std::uint64_t{t} * hidden + j);
}

Slots slots_of(const AggregateDesc& d, const AggregateArgs& a) {
  return {a.slot_rows, a.slot_experts, a.slot_scores, static_cast<std::int32_t>(d.top_k)};
}

/// Whether the sum reads with evict_first. The product before it leaves its last rows in L2. They
/// are a good part of a small sum, and evict_first keeps them there until the sum reads them: that
/// saves 2 to 20 % of its time. In a large sum evict_first takes 1 to 7 % more
/// (docs/findings/sums.md).
bool leave_first(const AggregateDesc& d, const Exec& exec) {
  return (d.rows + d.tokens) * d.hidden * std::int64_t{2} < 3 * exec.traits.l2_bytes;
}

template <class T, int kSlots, SlotsOf kOf = SlotsOf::top_k>
void start(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  const std::int64_t pieces = d.hidden / 8;
  launch_early(
      a.slot_scores != nullptr ? aggregate<T, kSlots, true, kOf> : aggregate<T, kSlots, false, kOf>,
      blocks_for(d.tokens * pieces, kThreads), kThreads, 0, exec, static_cast<const T*>(a.rows),
      slots_of(d, a), Lists{a.token_offsets, a.token_slots}, static_cast<const T*>(a.addend),
      static_cast<T*>(a.out), static_cast<std::uint32_t>(d.tokens),
      static_cast<std::uint32_t>(pieces), leave_first(d, exec));
}

/// The parts of a section, whose router weights a block keeps: the most that fit into kMost bytes,
/// leave kLeastRings to the rings and divide the parts of a row. 0 if blocks keep no weights, for
/// one of these reasons, whose limits are measured (docs/findings/sums.md):
///
/// - L1 does well with the weights of all columns, at most kLeast bytes.
/// - One part of all experts' weights does not fit.
/// - A section would have fewer than eight blocks. Some blocks could then have more than an eighth
///   more work than others.
/// - A block would use the weights that it keeps less than four times.
unsigned kept_parts(const AggregateDesc& d, const DeviceTraits& device) {
  constexpr std::int64_t kMost = 128 << 10, kLeast = 128 << 10, kLeastRings = 99 << 10;
  static_assert(kMost <= kLeast, "a block could keep the weights of more columns than there are");
  const std::int64_t column_bytes = d.experts * (d.f32_router_w ? 4 : 2);
  if (d.hidden * column_bytes <= kLeast) return 0;
  const unsigned all = blocks_for(d.hidden, kColumns);
  const std::int64_t room =
      std::clamp(device.block_shared_bytes - kLeastRings, std::int64_t{0}, kMost);
  unsigned parts = static_cast<unsigned>(room / (kColumns * column_bytes));
  while (parts > 0 && all % parts != 0) --parts;
  if (parts == 0 || all / parts * 8 > static_cast<unsigned>(device.multiprocessors)) return 0;
  const bool used =
      d.rows * d.hidden * 2 >= 4 * device.multiprocessors * parts * kColumns * column_bytes;
  return used ? parts : 0;
}

template <class T, class R, class Routed>
void start_ring(const AggregateDesc& d, const AggregateArgs& a, const Routed& router,
                const Exec& exec, unsigned parts) {
  const unsigned sections = blocks_for(d.hidden, kColumns) / parts;
  const int part_bytes = router.experts * (Routed::kPieces * kRowBytes);
  const int kept = R::kKeeps ? static_cast<int>(parts) * part_bytes : 0;
  const int warps =
      std::min(R::kMostWarps, (exec.traits.block_shared_bytes - kept) / R::kWarpBytes);
  const unsigned needed = blocks_for(d.tokens * parts, warps) * sections;
  // A multiprocessor keeps 1 KiB of shared memory for itself with each block.
  const int bytes = warps * R::kWarpBytes + kept;
  const int held = std::clamp(exec.traits.shared_bytes / (bytes + 1024), 1, R::kBlocks);
  const unsigned fit = static_cast<unsigned>(exec.traits.multiprocessors * held);
  launch_early(
      aggregate_ring<T, R, Routed>, std::min(needed, fit), static_cast<unsigned>(warps * kWarp),
      static_cast<std::size_t>(bytes), exec, static_cast<const T*>(a.rows), slots_of(d, a), router,
      static_cast<const T*>(a.addend), static_cast<T*>(a.out), static_cast<std::uint32_t>(d.tokens),
      static_cast<std::uint32_t>(d.hidden), sections, parts, leave_first(d, exec));
}

template <class D, class W>
Router<D, W> router_of(const AggregateDesc& d, const AggregateArgs& a) {
  return {static_cast<const D*>(a.dlogits), static_cast<const W*>(a.router_w),
          static_cast<std::int32_t>(d.experts)};
}
/// Calls f(router, ring that reads weights, ring of a block that keeps them). Reading fp32 weights
/// takes more registers: fewer warps have deeper rings, for as many bytes under way.
template <class T, class F>
auto visit_rings(const AggregateDesc& d, const AggregateArgs& a, F&& f) {
  const auto visit = [&](auto router) {
    constexpr int kMore = decltype(router)::kPieces - 1;
    if (d.top_k <= 2) return f(router, Ring<2, 4 + kMore, false>{}, Ring<2, 4, true>{});
    return d.top_k <= 4 ? f(router, Ring<4, 2 + kMore, false>{}, Ring<4, 2, true>{})
                        : f(router, Ring<8, 2, false>{}, Ring<8, 2, true>{});
  };
  if (d.f32_router_w) return visit(router_of<float, float>(d, a));
  return d.f32_dlogits ? visit(router_of<float, T>(d, a)) : visit(router_of<T, T>(d, a));
}

template <class T>
void start_any(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  if (d.top_k == 0 && a.token_slots != nullptr) return start<T, kAny, SlotsOf::lists>(d, a, exec);
  if (d.top_k == 0) {
    return d.rows < 4 * d.tokens ? start<T, kAnyFew, SlotsOf::packed>(d, a, exec)
                                 : start<T, kAny, SlotsOf::packed>(d, a, exec);
  }
  if (a.router_w == nullptr) {
    if (d.top_k <= 2) return start<T, 2>(d, a, exec);
    if (d.top_k <= 4) return start<T, 4>(d, a, exec);
    if (d.top_k <= 8) return start<T, 8>(d, a, exec);
    return d.top_k > 12 && d.top_k <= 16 ? start<T, 16>(d, a, exec) : start<T, kAny>(d, a, exec);
  }
  visit_rings<T>(d, a, [&](auto router, auto reads, auto keeps) {
    if (const unsigned parts = kept_parts(d, exec.traits); parts > 0) {
      start_ring<T, decltype(keeps)>(d, a, router, exec, parts);
    } else {
      start_ring<T, decltype(reads)>(d, a, router, exec, blocks_for(d.hidden, kColumns));
    }
  });
}

template <class T>
Status prepare_rings(const AggregateDesc& d, const Exec& exec) {
  return visit_rings<T>(d, {}, [&](auto router, auto reads, auto keeps) {
    using Routed = decltype(router);
    using Reads = decltype(reads);
    constexpr int kBytes = kWarps * Reads::kWarpBytes;
    static_assert(kBytes <= 99 << 10, "some devices give a block no more");
    const Status status = allow_shared_memory(aggregate_ring<T, Reads, Routed>, kBytes);
    if (!status.ok()) return status;
    return allow_shared_memory(aggregate_ring<T, decltype(keeps), Routed>,
                               exec.traits.block_shared_bytes);
  });
}
Status prepare(const AggregateDesc& d, const Exec& exec) {
  if (d.experts == 0) return {};
  return visit_storage(d.dtype, [&](auto type) { return prepare_rings<decltype(type)>(d, exec); });
}

Status run(const AggregateDesc& d, const AggregateArgs& a, void*, const Exec& exec) noexcept {
  if (d.tokens == 0) return {};
  return visit_storage(d.dtype, [&](auto type) {
    start_any<decltype(type)>(d, a, exec);
    return launched("aggregate: launch");
  });
}

}  // namespace

const Kernel<AggregateDesc> kAggregate = {
    .op = "aggregate",
    .name = "cuda.aggregate",
    .arch = 80,
    .and_later = true,
    .dtypes = kStorageTypes,
    .prepare = prepare,
    .run = run,
};

}  // namespace sonicmoe::cuda
