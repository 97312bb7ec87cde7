// The sums over a token's rows, in fp32 with one rounding at the end.
//   out[t] = sum of score * rows[row] + sum of dlogits[t, e] * router_w[e] + addend[t].
// Each sum runs over t's slots in slot order; row, score and expert e are the slot's. Memory
// bandwidth bounds the kernel.
#include <algorithm>

#include "core/backends.h"
#include "cuda/device/fragment.cuh"
#include "cuda/device/warp.cuh"

namespace sonicmoe::cuda {
namespace {

/// sum[c] = f(sum[c], value c)
template <class T, class F>
__device__ __forceinline__ void for_each(const uint4& values, float (&sum)[8], F f) {
  const std::uint32_t word[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float2 two = Pair<T>::unpack(word[c]);
    sum[2 * c] = f(sum[2 * c], two.x);
    sum[2 * c + 1] = f(sum[2 * c + 1], two.y);
  }
}
template <class T>
__device__ __forceinline__ void add(const uint4& values, float (&sum)[8]) {
  for_each<T>(values, sum, [](float x, float y) { return math::add(x, y); });
}
template <class T>
__device__ __forceinline__ void add_times(float factor, const uint4& values, float (&sum)[8]) {
  for_each<T>(values, sum, [&](float x, float y) { return math::fma(factor, y, x); });
}
template <class T>
__device__ __forceinline__ void store_rounded(const float (&sum)[8], T* to) {
  *reinterpret_cast<uint4*>(to) = {Pair<T>::pack(sum[0], sum[1]), Pair<T>::pack(sum[2], sum[3]),
                                   Pair<T>::pack(sum[4], sum[5]), Pair<T>::pack(sum[6], sum[7])};
}

/// The slots of token t are t K, t K + 1, ...
struct Slots {
  const std::int32_t* rows;     ///< -1: the slot has no row
  const std::int32_t* experts;  ///< with the router's part
  const float* scores;          ///< of a weighted sum
  std::int32_t top_k;
};

// The kernel without the router's part. A thread owns a piece: 8 columns of a token. A block owns
// kThreads consecutive pieces of `out`, wherever a token begins: blocks are full for every d.

constexpr int kThreads = 256;

/// Lists: token t's slots are token_slots[i], i from token_offsets[t] to token_offsets[t + 1] - 1.
struct Lists {
  const std::int32_t* token_offsets;
  const std::int32_t* token_slots;
};

/// The most slots of a group, where a token may have any number of slots. All groups of a token
/// have the same size, but the last may be smaller.
constexpr int kInFlight = 5;

/// Blocks that a multiprocessor holds. A thread loads all rows of a group before it adds the first,
/// so fewer slots take fewer registers a thread.
template <int kSlots>
constexpr int kBlocksThatFit = kSlots == 0   ? 4
                               : kSlots <= 2 ? 8
                               : kSlots <= 4 ? 5
                               : kSlots <= 8 ? 4
                                             : 3;

/// A token has at most kSlots slots, or any number if kSlots is 0.
///
/// A slot without a row adds a zero that changes no bit of the sum. An unweighted sum begins at
/// positive zero and never becomes negative zero, so it adds positive zero. A weighted sum may
/// underflow to negative zero, so it adds negative zero: a score of -0 times +0.
template <class T, int kSlots, bool kWeighted, bool kLists>
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
  // Validation keeps slots and t * K within int32.
  const std::int32_t begin =
      kLists ? lists.token_offsets[t] : static_cast<std::int32_t>(t) * slots.top_k;
  const std::uint32_t count = kLists ? max(lists.token_offsets[t + 1] - begin, 0) : slots.top_k;

  constexpr std::uint32_t kRows = kSlots == 0 ? kInFlight : kSlots;  // most rows of a group
  const std::uint32_t groups = max((count + kRows - 1) / kRows, 1u);
  const std::uint32_t group = kSlots == 0 ? (count + groups - 1) / groups : kRows;
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
        const std::int32_t slot = kLists ? lists.token_slots[at] : at;
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
    if constexpr (kSlots == 0) found = look_up(first + group);  // while these rows load
#pragma unroll
    for (std::uint32_t i = 0; i < kRows; ++i) {
      if constexpr (kWeighted) {
        add_times<T>(now.score[i], part[i], sum);
      } else {
        add<T>(part[i], sum);
      }
    }
  };
  if constexpr (kSlots == 0) {
    for (std::uint32_t first = 0; first < count; first += group) add_group(first);
  } else {
    add_group(0);
  }
  if (addend != nullptr) add<T>(extra, sum);
  store_rounded(sum, out + std::uint64_t{t} * hidden + j);
}

// The kernel with the router's part. A warp sums 256 columns of a token at a time.

constexpr int kWarps = 8;              // of a block that keeps no weights
constexpr int kRings = 128 << 10;      // bytes of rows in all rings of a multiprocessor
constexpr int kColumns = 8 * kWarp;    // of a part of a row: 16 bytes a lane
constexpr int kRowBytes = 16 * kWarp;  // of a part of a row

/// The operands of the router's part.
template <class T>
struct Router {
  const T* dlogits;  ///< (T, E)
  const T* weights;  ///< (E, d)
  std::int32_t experts;
};

/// A warp's ring of rows in shared memory. It holds kDepth groups of kGroup slots: the warp adds
/// one group while the others load.
///
/// With kKeeps a block sums a section of the columns, which is one or more parts. It keeps the
/// section's router weights of all experts in shared memory, beside the rings. Without kKeeps a
/// block sums all columns and loads weights when it needs them. L1 holds them as far as the rings
/// leave it room; L2, which also brings the rows, holds the rest. At the clock that the power cap
/// leaves, L2 is not fast enough for both (docs/findings/sums.md).
template <int kGroup_, int kDepth_, bool kKeeps_>
struct Ring {
  static constexpr int kGroup = kGroup_;
  static constexpr int kDepth = kDepth_;
  static constexpr bool kKeeps = kKeeps_;
  static constexpr int kFit = kRings / (kGroup * kDepth * kRowBytes);  // warps that fill kRings
  static constexpr int kMostWarps = kKeeps ? kFit : kWarps;            // of a block
  static constexpr int kBlocks = kFit / kMostWarps;                    // of a multiprocessor
  static constexpr int kTermBytes = 8;
  static constexpr int kWarpBytes = kDepth * kGroup * (kRowBytes + kTermBytes);

  std::uint32_t base;
  /// The address of this lane's 16 bytes of a slot's row.
  __device__ __forceinline__ std::uint32_t row(int stage, int slot) const {
    return base + (stage * kGroup + slot) * kRowBytes + lane_id() * 16;
  }
  /// The address of a slot's Term, which all lanes read.
  __device__ __forceinline__ std::uint32_t term(int stage, int slot) const {
    return base + kDepth * kGroup * kRowBytes + (stage * kGroup + slot) * kTermBytes;
  }
};

/// One step of a warp: a group of a token's slots, in one part of the columns.
struct Piece {
  std::uint32_t token, part, group;
};

/// The pieces of a warp, in order. The warps of a section take (token, part) pairs round robin; a
/// warp takes all groups of a pair one after another.
class Pieces {
 public:
  __device__ __forceinline__ Pieces(std::uint32_t warp, std::uint32_t warps, std::uint32_t parts,
                                    std::uint32_t groups)
      : piece_{warp / parts, warp % parts, 0},
        tokens_(warps / parts),
        rest_(warps % parts),
        parts_(parts),
        groups_(groups) {}
  __device__ __forceinline__ const Piece& piece() const { return piece_; }
  __device__ __forceinline__ bool last_group() const { return piece_.group + 1 == groups_; }
  __device__ __forceinline__ void next() {
    if (++piece_.group < groups_) return;
    piece_ = {piece_.token + tokens_, piece_.part + rest_, 0};
    if (piece_.part < parts_) return;
    piece_.part -= parts_;
    ++piece_.token;
  }

 private:
  Piece piece_;
  std::uint32_t tokens_, rest_, parts_, groups_;
};

/// A slot's term of the router's sum: factor * router_w[expert]. The factor is dlogits[t, expert].
struct Term {
  std::int32_t expert;  ///< -1: no term
  float factor;
};

/// A missing row or term adds a zero that changes no bit of `out`. The sum of rows begins at
/// positive zero and never becomes negative zero, so adding either zero keeps its bits. The
/// router's sum may end as either zero, for it is added to the sum of rows.
template <class T, class R>
__global__ void __launch_bounds__(R::kMostWarps* kWarp, R::kBlocks)
    aggregate_ring(const T* rows, Slots slots, Router<T> router, const T* addend, T* out,
                   std::uint32_t tokens, std::uint32_t hidden, std::uint32_t sections,
                   std::uint32_t parts, bool leave_first) {
  extern __shared__ uint4 memory[];
  const std::uint64_t policy = l2_policy(leave_first);
  const std::uint32_t warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const R ring{shared_address(memory) + warp * R::kWarpBytes};
  const std::uint32_t kept = shared_address(memory) + warps * R::kWarpBytes;
  // The blocks of each section take all tokens, from the first on. So all sections read their parts
  // of a row at about the same time.
  const std::uint32_t section = blockIdx.x % sections;
  const std::uint32_t blocks = (gridDim.x - section + sections - 1) / sections;
  const std::uint32_t first_column = section * parts * kColumns;
  const auto groups = static_cast<std::uint32_t>((slots.top_k + R::kGroup - 1) / R::kGroup);
  Pieces now(blockIdx.x / sections * warps + warp, blocks * warps, parts, groups);
  Pieces ahead = now;
  const auto column = [=](const Piece& piece) {
    return first_column + piece.part * kColumns + lane_id() * 8;
  };

  // Lane k looks up slot k of the group.
  struct LookedUp {
    Piece piece;
    std::int32_t row, expert;
  };
  const auto look_up = [&] {
    LookedUp found = {ahead.piece(), -1, -1};
    const int k = static_cast<int>(found.piece.group) * R::kGroup + lane_id();
    if (found.piece.token < tokens && lane_id() < R::kGroup && k < slots.top_k) {
      const std::int64_t slot = std::int64_t{found.piece.token} * slots.top_k + k;
      found.row = slots.rows[slot];
      found.expert = slots.experts[slot];
    }
    ahead.next();
    return found;
  };
  const auto fetch = [&](const LookedUp& found, int stage) -> Term {
    const std::uint32_t j = column(found.piece);
#pragma unroll
    for (int k = 0; k < R::kGroup; ++k) {
      const std::int32_t row = __shfl_sync(kAllLanes, found.row, k);
      const bool there = row >= 0 && j < hidden;
      copy_async_16(ring.row(stage, k), rows + (there ? std::int64_t{row} * hidden + j : 0), there,
                    policy);
    }
    copy_async_commit();
    if (found.expert < 0 || found.expert >= router.experts) return {-1, 0.0f};
    const std::int64_t at = std::int64_t{found.piece.token} * router.experts + found.expert;
    return {found.expert, to_float(router.dlogits[at])};
  };
  const auto put = [&](const Term& term, int stage) {
    if (lane_id() >= R::kGroup) return;
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(ring.term(stage, lane_id())),
                 "r"(term.expert), "f"(term.factor)
                 : "memory");
  };
  const auto get = [&](int stage, int slot) {
    Term term;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(term.expert), "=f"(term.factor)
                 : "r"(ring.term(stage, slot))
                 : "memory");
    return term;
  };

  wait_for_previous();
  if constexpr (R::kKeeps) {
    const std::uint32_t line = parts * kWarp;  // 16-byte pieces of an expert's section
    for (std::uint32_t i = threadIdx.x; i < router.experts * line; i += blockDim.x) {
      const std::uint32_t e = i / line, j = first_column + i % line * 8;
      const bool there = j < hidden;
      copy_async_16(kept + i * 16, router.weights + (there ? std::int64_t{e} * hidden + j : 0),
                    there);
    }
    copy_async_commit();
  }
  LookedUp found[R::kDepth];
  Term terms[R::kDepth];
#pragma unroll
  for (LookedUp& piece : found) piece = look_up();
#pragma unroll
  for (int i = 0; i < R::kDepth - 1; ++i) terms[i] = fetch(found[i], i);
#pragma unroll
  for (int i = 0; i < R::kDepth - 1; ++i) put(terms[i], i);
  if constexpr (R::kKeeps) {
    copy_async_wait<R::kDepth - 1>();  // this thread's weights are its oldest group
    __syncthreads();                   // the block sees all weights, each warp its terms
  } else {
    __syncwarp();  // all lanes see the warp's terms
  }
  LookedUp next = found[R::kDepth - 1];
  float sum[8] = {};
  float routers[8] = {};  // the router's sum, kept apart until the end as on every backend
  for (int stage = 0; now.piece().token < tokens; now.next()) {
    const int free = stage == 0 ? R::kDepth - 1 : stage - 1;
    const Term coming = fetch(next, free);
    next = look_up();

    const std::uint32_t j = column(now.piece());
    const bool inside = j < hidden;
    const auto add_term = [&](int k, const uint4& weights) {
      add_times<T>(get(stage, k).factor, weights, routers);
    };
    uint4 weights[R::kKeeps ? 1 : R::kGroup];  // not kept: all of a group load at once
    if constexpr (R::kKeeps) {
#pragma unroll
      for (int k = 0; k < R::kGroup; ++k) {
        const std::int32_t e = get(stage, k).expert;
        const std::uint32_t at = (e * parts + now.piece().part) * kRowBytes + lane_id() * 16;
        add_term(k, e < 0 ? uint4{} : load_shared(kept + at));
      }
    } else {
#pragma unroll
      for (int k = 0; k < R::kGroup; ++k) {
        const std::int32_t e = get(stage, k).expert;
        weights[k] = load_kept(router.weights + std::int64_t{e} * hidden + j, inside && e >= 0);
      }
    }
    copy_async_wait<R::kDepth - 1>();
#pragma unroll
    for (int k = 0; k < R::kGroup; ++k) add<T>(load_shared(ring.row(stage, k)), sum);
    if constexpr (!R::kKeeps) {
#pragma unroll
      for (int k = 0; k < R::kGroup; ++k) add_term(k, weights[k]);
    }
    if (now.last_group()) {
      const std::int64_t at = std::int64_t{now.piece().token} * hidden + j;
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = math::add(sum[c], routers[c]);
      if (addend != nullptr) add<T>(load_once(addend + at, inside, policy), sum);
      if (inside) store_rounded(sum, out + at);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = routers[c] = 0.0f;
    }
    put(coming, free);
    __syncwarp();  // all lanes see these terms, and have read those of `stage`
    stage = stage + 1 == R::kDepth ? 0 : stage + 1;
  }
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

template <class T, int kSlots, bool kLists>
void start(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  const std::int64_t pieces = d.hidden / 8;
  launch_early(a.slot_scores != nullptr ? aggregate<T, kSlots, true, kLists>
                                        : aggregate<T, kSlots, false, kLists>,
               blocks_for(d.tokens * pieces, kThreads), kThreads, 0, stream_of(exec),
               static_cast<const T*>(a.rows), slots_of(d, a), Lists{a.token_offsets, a.token_slots},
               static_cast<const T*>(a.addend), static_cast<T*>(a.out),
               static_cast<std::uint32_t>(d.tokens), static_cast<std::uint32_t>(pieces),
               leave_first(d, exec));
}

/// The parts of a section, whose router weights a block keeps: the most that fit into kMost bytes
/// and divide the parts of a row. 0 if blocks keep no weights, for one of these reasons, whose
/// limits are measured (docs/findings/sums.md):
///
/// - L1 does well with the weights of all columns, at most kLeast bytes.
/// - One part of all experts' weights does not fit.
/// - A section would have fewer than eight blocks. Some blocks could then have more than an eighth
///   more work than others.
/// - A block would use the weights that it keeps less than four times.
unsigned kept_parts(const AggregateDesc& d, const DeviceTraits& device) {
  constexpr std::int64_t kMost = 128 << 10, kLeast = 128 << 10;
  static_assert(kMost <= kLeast, "a block could keep the weights of more columns than there are");
  if (d.experts * d.hidden * 2 <= kLeast) return 0;
  const unsigned all = blocks_for(d.hidden, kColumns);
  unsigned parts = static_cast<unsigned>(kMost / (d.experts * kRowBytes));
  while (parts > 0 && all % parts != 0) --parts;
  if (parts == 0 || all / parts * 8 > static_cast<unsigned>(device.multiprocessors)) return 0;
  const bool used =
      d.rows * d.hidden * 2 >= 4 * device.multiprocessors * parts * d.experts * kRowBytes;
  return used ? parts : 0;
}

template <class T, class R>
void start_ring(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec, unsigned parts) {
  const unsigned sections = blocks_for(d.hidden, kColumns) / parts;
  const int kept = R::kKeeps ? static_cast<int>(parts * d.experts * kRowBytes) : 0;
  const int warps =
      std::min(R::kMostWarps, (exec.traits.block_shared_bytes - kept) / R::kWarpBytes);
  const unsigned needed = blocks_for(d.tokens * parts, warps) * sections;
  const unsigned fit = static_cast<unsigned>(exec.traits.multiprocessors * R::kBlocks);
  launch_early(aggregate_ring<T, R>, std::min(needed, fit), static_cast<unsigned>(warps * kWarp),
               static_cast<std::size_t>(warps * R::kWarpBytes + kept), stream_of(exec),
               static_cast<const T*>(a.rows), slots_of(d, a),
               Router<T>{static_cast<const T*>(a.dlogits), static_cast<const T*>(a.router_w),
                         static_cast<std::int32_t>(d.experts)},
               static_cast<const T*>(a.addend), static_cast<T*>(a.out),
               static_cast<std::uint32_t>(d.tokens), static_cast<std::uint32_t>(d.hidden), sections,
               parts, leave_first(d, exec));
}

template <int kGroup, int kDepth>
struct Rings {
  using Reads = Ring<kGroup, kDepth, false>;
  using Keeps = Ring<kGroup, kDepth, true>;
};
template <class F>
auto visit_rings(const AggregateDesc& d, F&& f) {
  if (d.top_k <= 2) return f(Rings<2, 4>{});
  return d.top_k <= 4 ? f(Rings<4, 2>{}) : f(Rings<8, 2>{});
}

template <class T>
void start_any(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  if (d.top_k == 0) return start<T, 0, true>(d, a, exec);
  if (a.router_w == nullptr) {
    if (d.top_k <= 2) return start<T, 2, false>(d, a, exec);
    if (d.top_k <= 4) return start<T, 4, false>(d, a, exec);
    if (d.top_k <= 8) return start<T, 8, false>(d, a, exec);
    return d.top_k > 12 && d.top_k <= 16 ? start<T, 16, false>(d, a, exec)
                                         : start<T, 0, false>(d, a, exec);
  }
  visit_rings(d, [&](auto rings) {
    if (const unsigned parts = kept_parts(d, exec.traits); parts > 0) {
      start_ring<T, typename decltype(rings)::Keeps>(d, a, exec, parts);
    } else {
      start_ring<T, typename decltype(rings)::Reads>(d, a, exec, blocks_for(d.hidden, kColumns));
    }
  });
}

Status prepare(const AggregateDesc& d, const Exec& exec) {
  if (d.experts == 0) return {};
  return visit_storage(d.dtype, [&](auto type) {
    return visit_rings(d, [&](auto rings) {
      using Reads = typename decltype(rings)::Reads;
      const Status status =
          allow_shared_memory(aggregate_ring<decltype(type), Reads>, kWarps * Reads::kWarpBytes);
      if (!status.ok()) return status;
      return allow_shared_memory(aggregate_ring<decltype(type), typename decltype(rings)::Keeps>,
                                 exec.traits.block_shared_bytes);
    });
  });
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
    .name = "sm90.aggregate",
    .arch = 90,
    .dtypes = kStorageTypes,
    .prepare = prepare,
    .run = run,
};

}  // namespace sonicmoe::cuda
