#pragma once

#include <type_traits>

#include "cuda/device/fragment.cuh"
#include "cuda/device/warp.cuh"

/// Sums over a token's rows with the router's part, and what they share with those without.
namespace sonicmoe::cuda {

/// sum[c] = f(sum[c], value c), for eight values of 16 bits or four of fp32.
template <class T, class F>
__device__ __forceinline__ void for_each(const uint4& values, float* sum, F f) {
  const std::uint32_t word[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if constexpr (std::is_same_v<T, float>) {
      sum[c] = f(sum[c], __uint_as_float(word[c]));
    } else {
      const float2 two = Pair<T>::unpack(word[c]);
      sum[2 * c] = f(sum[2 * c], two.x);
      sum[2 * c + 1] = f(sum[2 * c + 1], two.y);
    }
  }
}
template <class T>
__device__ __forceinline__ void add(const uint4& values, float* sum) {
  for_each<T>(values, sum, [](float x, float y) { return math::add(x, y); });
}
template <class T>
__device__ __forceinline__ void add_times(float factor, const uint4& values, float* sum) {
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

// The kernel with the router's part. A warp sums 256 columns of a token at a time.

inline constexpr int kWarps = 8;              // of a block that keeps no weights
inline constexpr int kRings = 128 << 10;      // bytes of rows in all rings of a multiprocessor
inline constexpr int kColumns = 8 * kWarp;    // of a part of a row: 16 bytes a lane
inline constexpr int kRowBytes = 16 * kWarp;  // of a part of a row

/// The operands of the router's part.
template <class D, class W_>
struct Router {
  using W = W_;
  static constexpr int kPieces = sizeof(W) / 2;  // of 16 bytes, for a lane's eight weights
  const D* dlogits;                              ///< (T, E)
  const W* weights;                              ///< (E, d)
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

/// R::kBlocks, or one where ptxas for sm_100 and sm_120 would spill with two.
template <class R, class Routed>
inline constexpr int kBlocksWithoutSpills =
    kArch > 90 && R::kGroup == 8 && !R::kKeeps && Routed::kPieces > 1 ? 1 : R::kBlocks;

/// A missing row or term adds a zero that changes no bit of `out`. The sum of rows begins at
/// positive zero and never becomes negative zero, so adding either zero keeps its bits. The
/// router's sum may end as either zero, for it is added to the sum of rows.
template <class T, class R, class Routed>
__global__ void __launch_bounds__(R::kMostWarps* kWarp, kBlocksWithoutSpills<R, Routed>)
    aggregate_ring(const T* rows, Slots slots, Routed router, const T* addend, T* out,
                   std::uint32_t tokens, std::uint32_t hidden, std::uint32_t sections,
                   std::uint32_t parts, bool leave_first) {
  constexpr int kPieces = Routed::kPieces;
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
    const std::uint32_t line = parts * kWarp * kPieces;  // 16-byte pieces of an expert's section
    for (std::uint32_t i = threadIdx.x; i < router.experts * line; i += blockDim.x) {
      const std::uint32_t e = i / line, j = first_column + i % line * (8 / kPieces);
      const bool there = j < hidden;
      // All lanes' first pieces, then all second ones: loads without bank conflicts.
      const std::uint32_t in_part = i % (kPieces * kWarp);
      const std::uint32_t at =
          kPieces == 1 ? i : i - in_part + in_part % kPieces * kWarp + in_part / kPieces;
      copy_async_16(kept + at * 16, router.weights + (there ? std::int64_t{e} * hidden + j : 0),
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
    const auto add_term = [&](int k, int i, const uint4& weights) {
      add_times<typename Routed::W>(get(stage, k).factor, weights, routers + 4 * i);
    };
    uint4 weights[R::kKeeps ? 1 : R::kGroup];  // not kept: a piece of all of a group loads at once
    const auto load_weights = [&](int i) {
#pragma unroll
      for (int k = 0; k < R::kGroup; ++k) {
        const std::int32_t e = get(stage, k).expert;
        weights[k] =
            load_kept(router.weights + std::int64_t{e} * hidden + j + 4 * i, inside && e >= 0);
      }
    };
    if constexpr (R::kKeeps) {
#pragma unroll
      for (int k = 0; k < R::kGroup; ++k) {
        const std::int32_t e = get(stage, k).expert;
        const std::uint32_t at =
            (e * parts + now.piece().part) * (kPieces * kRowBytes) + lane_id() * 16;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          add_term(k, i, e < 0 ? uint4{} : load_shared(kept + at + i * kRowBytes));
        }
      }
    } else {
      load_weights(0);
    }
    copy_async_wait<R::kDepth - 1>();
#pragma unroll
    for (int k = 0; k < R::kGroup; ++k) add<T>(load_shared(ring.row(stage, k)), sum);
#pragma unroll
    for (int i = 0; i < kPieces && !R::kKeeps; ++i) {
      if (i > 0) load_weights(i);
#pragma unroll
      for (int k = 0; k < R::kGroup; ++k) add_term(k, i, weights[k]);
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

}  // namespace sonicmoe::cuda
