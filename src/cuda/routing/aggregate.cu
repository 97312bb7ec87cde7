// out[t] = sum over t's slots, in slot order, of score * rows[row of slot], + another such sum of
// dlogits[t, e] * router_w[e], + addend[t]; fp32, one rounding. It runs at the speed of memory.
#include <algorithm>

#include "core/backends.h"
#include "cuda/device/warp_tile.cuh"
#include "cuda/routing/routing.cuh"

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

constexpr std::int64_t kFew = 4;         // slots of a token, at most, that are few
constexpr std::int64_t kLongRow = 4096;  // columns of a row, at least, that is long

// A warp takes a token after the other: one or two slots, a few of rows that are not long, or the
// router's part.

constexpr int kWarps = 8;              // of a block
constexpr int kRings = 128 << 10;      // bytes of a multiprocessor; the rest is L1's
constexpr int kColumns = 8 * kWarp;    // of a row that a warp takes: 16 bytes a lane
constexpr int kRowBytes = 16 * kWarp;  // of those

/// What is added up.
enum class Sum {
  rows,
  weighted,  ///< rows times scores
  routed,    ///< rows, and apart from them the router's weights times gradients
};

/// The slots of token t are t K, t K + 1, ...
struct Slots {
  const std::int32_t* rows;     ///< -1: none
  const std::int32_t* experts;  ///< routed
  const float* scores;          ///< weighted
  std::int32_t top_k;
};

/// What a routed sum reads beside the rows.
template <class T>
struct Router {
  const T* dlogits;  ///< (T, E)
  const T* weights;  ///< (E, d)
  std::int32_t experts;
};

/// kGroup slots are added together. A warp has kDepth such groups in its ring: one that is added,
/// the others on their way.
template <Sum kSum_, int kGroup_, int kDepth_>
struct Ring {
  static constexpr Sum kSum = kSum_;
  static constexpr int kGroup = kGroup_;
  static constexpr int kDepth = kDepth_;
  static constexpr int kBlocks = kRings / (kWarps * kGroup * kDepth * kRowBytes);  // that fit
  static constexpr int kTermBytes = 8;
  static constexpr int kWarpBytes = kDepth * kGroup * (kRowBytes + kTermBytes);
  static constexpr int kBytes = kWarps * kWarpBytes;

  std::uint32_t base;
  /// Of a lane: 16 bytes of the row of a slot.
  __device__ __forceinline__ std::uint32_t row(int stage, int slot) const {
    return base + (stage * kGroup + slot) * kRowBytes + lane_id() * 16;
  }
  __device__ __forceinline__ std::uint32_t term(int stage, int slot) const {
    return base + kDepth * kGroup * kRowBytes + (stage * kGroup + slot) * kTermBytes;
  }
};

/// A group of a token's slots, 256 columns of it.
struct Piece {
  std::uint32_t token, part, group;
};

/// The pieces of a warp. All warps take parts of tokens in turn, and the groups of one in order.
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

/// What a slot's row, or the weights of its expert, are multiplied with.
struct Term {
  std::int32_t expert;  ///< -1: none
  float factor;
};

/// What is not there adds zeros that change no bit. To a sum of rows, which began at +0 and so is
/// never -0, a row adds +0; to the router's, which is added to that and may be either zero, so does
/// an expert; to a weighted sum, which may become -0, a row adds -0, whatever its score.
template <class T, class R>
__global__ void __launch_bounds__(kWarps* kWarp, R::kBlocks)
    aggregate_ring(const T* rows, Slots slots, Router<T> router, const T* addend, T* out,
                   std::uint32_t tokens, std::uint32_t hidden, bool leave_first) {
  extern __shared__ uint4 memory[];
  const std::uint64_t policy = l2_policy(leave_first);
  const std::uint32_t warp = threadIdx.x / kWarp;
  const R ring{shared_address(memory) + warp * R::kWarpBytes};
  const auto groups = static_cast<std::uint32_t>((slots.top_k + R::kGroup - 1) / R::kGroup);
  Pieces now(blockIdx.x * kWarps + warp, gridDim.x * kWarps, (hidden + kColumns - 1) / kColumns,
             groups);
  Pieces ahead = now;
  const auto column = [](const Piece& piece) { return piece.part * kColumns + lane_id() * 8; };

  // Lane k looks up slot k of the group.
  struct LookedUp {
    Piece piece;
    std::int32_t row, expert;
    float score;
  };
  const auto look_up = [&] {
    LookedUp found = {ahead.piece(), -1, -1, 0.0f};
    const int k = static_cast<int>(found.piece.group) * R::kGroup + lane_id();
    if (found.piece.token < tokens && lane_id() < R::kGroup && k < slots.top_k) {
      const std::int64_t slot = std::int64_t{found.piece.token} * slots.top_k + k;
      found.row = slots.rows[slot];
      if constexpr (R::kSum == Sum::routed) found.expert = slots.experts[slot];
      if constexpr (R::kSum == Sum::weighted) found.score = slots.scores[slot];
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
    if constexpr (R::kSum == Sum::routed) {
      if (found.expert < 0 || found.expert >= router.experts) return {-1, 0.0f};
      const std::int64_t at = std::int64_t{found.piece.token} * router.experts + found.expert;
      return {found.expert, to_float(router.dlogits[at])};
    }
    return {-1, found.row < 0 ? -0.0f : found.score};  // times the zeros of no row: -0
  };
  const auto put = [&](const Term& term, int stage) {
    if (R::kSum == Sum::rows || lane_id() >= R::kGroup) return;
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
  LookedUp found[R::kDepth];
  Term terms[R::kDepth];
#pragma unroll
  for (LookedUp& piece : found) piece = look_up();
#pragma unroll
  for (int i = 0; i < R::kDepth - 1; ++i) terms[i] = fetch(found[i], i);
#pragma unroll
  for (int i = 0; i < R::kDepth - 1; ++i) put(terms[i], i);
  __syncwarp();
  LookedUp next = found[R::kDepth - 1];
  float sum[8] = {};
  float routers[8] = {};  // a sum of its own: nobody waits for rows to add the router's terms
  for (int stage = 0; now.piece().token < tokens; now.next()) {
    const int free = stage == 0 ? R::kDepth - 1 : stage - 1;
    const Term coming = fetch(next, free);
    next = look_up();

    const std::uint32_t j = column(now.piece());
    const bool inside = j < hidden;
    uint4 weights[R::kGroup];
    if constexpr (R::kSum == Sum::routed) {
#pragma unroll
      for (int k = 0; k < R::kGroup; ++k) {
        const std::int32_t e = get(stage, k).expert;
        weights[k] = load_kept(router.weights + std::int64_t{e} * hidden + j, inside && e >= 0);
      }
    }
    copy_async_wait<R::kDepth - 1>();
#pragma unroll
    for (int k = 0; k < R::kGroup; ++k) {
      const uint4 row = load_shared(ring.row(stage, k));
      if constexpr (R::kSum == Sum::weighted) {
        add_times<T>(get(stage, k).factor, row, sum);
      } else {
        add<T>(row, sum);
      }
    }
    if constexpr (R::kSum == Sum::routed) {
#pragma unroll
      for (int k = 0; k < R::kGroup; ++k) add_times<T>(get(stage, k).factor, weights[k], routers);
    }
    if (now.last_group()) {
      const std::int64_t at = std::int64_t{now.piece().token} * hidden + j;
      if constexpr (R::kSum == Sum::routed) {
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] = math::add(sum[c], routers[c]);
      }
      if (addend != nullptr) add<T>(load_once(addend + at, inside, policy), sum);
      if (inside) store_rounded(sum, out + at);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = routers[c] = 0.0f;
    }
    put(coming, free);
    __syncwarp();
    stage = stage + 1 == R::kDepth ? 0 : stage + 1;
  }
}

// A thread owns 8 columns of a token: many slots, three or four of long rows, or lists.

constexpr unsigned kThreads = 256;          // of a block, at most
constexpr unsigned kThreadsFewSlots = 128;  // the same, where slots are few
constexpr unsigned kLeastThreads = 64;      // where there is work for so many
constexpr int kInFlight = 8;                // rows that are loaded before the first is added

/// The slots of a token in a list, in order.
struct Lists {
  const std::int32_t* token_offsets;
  const std::int32_t* token_slots;
};

template <class T, bool kWeighted, bool kLists>
__global__ void __launch_bounds__(kThreads, 3)
    aggregate(const T* rows, Slots slots, Lists lists, const T* addend, T* out,
              std::uint32_t tokens, std::uint32_t hidden, bool leave_first) {
  const std::uint64_t policy = l2_policy(leave_first);
  const std::uint32_t t = blockIdx.x * blockDim.y + threadIdx.y;
  wait_for_previous();
  if (t >= tokens) return;
  // Slots and t K are int32 by validation.
  const std::int32_t begin =
      kLists ? lists.token_offsets[t] : static_cast<std::int32_t>(t) * slots.top_k;
  const std::int32_t count = kLists ? lists.token_offsets[t + 1] - begin : slots.top_k;
  std::int32_t row[kInFlight];
  float score[kInFlight];
  const auto look_up = [&](std::int32_t first) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      row[i] = -1;
      if (first + i < count) {
        const std::int32_t at = begin + first + i;
        const std::int32_t slot = kLists ? lists.token_slots[at] : at;
        row[i] = slots.rows[slot];
        if constexpr (kWeighted) score[i] = slots.scores[slot];
      }
    }
  };
  look_up(0);
  for (std::uint32_t j = threadIdx.x * 8; j < hidden; j += blockDim.x * 8) {
    const uint4 extra =
        load_once(addend + std::uint64_t{t} * hidden + j, addend != nullptr, policy);
    float sum[8] = {};
    for (std::int32_t first = 0; first < count; first += kInFlight) {
      if (count > kInFlight) look_up(first);
      uint4 part[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        part[i] = load_once(rows + std::int64_t{row[i]} * hidden + j, row[i] >= 0, policy);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (row[i] < 0) continue;
        if constexpr (kWeighted) {
          add_times<T>(score[i], part[i], sum);
        } else {
          add<T>(part[i], sum);
        }
      }
    }
    if (addend != nullptr) add<T>(extra, sum);
    store_rounded(sum, out + std::uint64_t{t} * hidden + j);
  }
}

/// Threads along the columns and tokens of a block. A token with many columns is a block of its
/// own, which takes them in two turns or more.
dim3 block_of(const AggregateDesc& d) {
  const std::int64_t chunks = d.hidden / 8;
  const std::int64_t most = d.top_k > 0 && d.top_k <= kFew ? kThreadsFewSlots : kThreads;
  const std::int64_t turns =
      std::max<std::int64_t>(chunks < 2 * kLeastThreads ? 1 : 2, (chunks + most - 1) / most);
  const std::int64_t each = (chunks + turns - 1) / turns;
  unsigned wide = kWarp;
  if (each > kWarp) {
    wide = static_cast<unsigned>((each + kWarp - 1) / kWarp * kWarp);
  } else {
    while (wide / 2 >= each) wide /= 2;
  }
  return dim3(wide, std::max(1u, kLeastThreads / wide));
}

Slots slots_of(const AggregateDesc& d, const AggregateArgs& a) {
  return {a.slot_rows, a.slot_experts, a.slot_scores, static_cast<std::int32_t>(d.top_k)};
}

/// The product before a sum has left its last rows in L2. Where little is summed they are a good
/// part of it, and wait there if what was read leaves first: 2 to 20 % of the time. Where they are
/// not, reading so takes 1 to 7 % more. docs/findings/sums.md
bool leave_first(const AggregateDesc& d, const Exec& exec) {
  return (d.rows + d.tokens) * d.hidden * std::int64_t{2} < 3 * l2_bytes(exec);
}

template <class T, bool kLists>
void start(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  const dim3 block = block_of(d);
  launch_early(a.slot_scores != nullptr ? aggregate<T, true, kLists> : aggregate<T, false, kLists>,
               blocks_for(d.tokens, block.y), block, 0, stream_of(exec),
               static_cast<const T*>(a.rows), slots_of(d, a), Lists{a.token_offsets, a.token_slots},
               static_cast<const T*>(a.addend), static_cast<T*>(a.out),
               static_cast<std::uint32_t>(d.tokens), static_cast<std::uint32_t>(d.hidden),
               leave_first(d, exec));
}

template <class T, class R>
void start_ring(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  const unsigned needed = blocks_for(d.tokens * blocks_for(d.hidden, kColumns), kWarps);
  const unsigned fit = static_cast<unsigned>(std::max(1, sm_count(exec)) * R::kBlocks);
  launch_early(aggregate_ring<T, R>, std::min(needed, fit), kWarps * kWarp, R::kBytes,
               stream_of(exec), static_cast<const T*>(a.rows), slots_of(d, a),
               Router<T>{static_cast<const T*>(a.dlogits), static_cast<const T*>(a.router_w),
                         static_cast<std::int32_t>(d.experts)},
               static_cast<const T*>(a.addend), static_cast<T*>(a.out),
               static_cast<std::uint32_t>(d.tokens), static_cast<std::uint32_t>(d.hidden),
               leave_first(d, exec));
}

/// Without lists and the router's part. docs/findings/sums.md
bool in_rings(const AggregateDesc& d) {
  return d.top_k <= 2 || (d.top_k <= kFew && d.hidden < kLongRow);
}
using ManyRouted = Ring<Sum::routed, 8, 2>;

template <class T, Sum kSum>
void start_few(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  d.top_k <= 2 ? start_ring<T, Ring<kSum, 2, 4>>(d, a, exec)
               : start_ring<T, Ring<kSum, 4, 2>>(d, a, exec);
}

template <class T>
void start_any(const AggregateDesc& d, const AggregateArgs& a, const Exec& exec) {
  const bool routed = a.router_w != nullptr;
  if (d.top_k == 0) {
    start<T, true>(d, a, exec);
  } else if (routed) {
    d.top_k > kFew ? start_ring<T, ManyRouted>(d, a, exec) : start_few<T, Sum::routed>(d, a, exec);
  } else if (!in_rings(d)) {
    start<T, false>(d, a, exec);
  } else if (a.slot_scores != nullptr) {
    start_few<T, Sum::weighted>(d, a, exec);
  } else {
    start_few<T, Sum::rows>(d, a, exec);
  }
}

/// The other rings fit into what a kernel may have unasked.
Status prepare(const AggregateDesc& d, const Exec&) {
  if (d.experts == 0 || d.top_k <= kFew) return {};
  return visit_storage(d.dtype, [](auto type) {
    return allow_shared_memory(aggregate_ring<decltype(type), ManyRouted>, ManyRouted::kBytes);
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

const Kernel<AggregateDesc> kAggregate = {"aggregate",
                                          "cuda.aggregate",
                                          DeviceType::cuda,
                                          takes_16_bit<AggregateDesc>,
                                          no_workspace<AggregateDesc>,
                                          run,
                                          prepare};

}  // namespace sonicmoe::cuda
