#pragma once

#include "cuda/sm90/epilogue/dispatch.cuh"
#include "cuda/sm90/epilogue/epilogue.cuh"
#include "cuda/sm90/epilogue/ports.cuh"

/// Epilogue of up_proj: H = acc + b1 is stored for backward (unless for inference), and A = act(H)
/// from the unrounded H.
namespace sonicmoe::cuda {

template <class Activations>
struct ActivationParams {
  CUtensorMap preact_boxes[2];      ///< H by parts (PreactParts), in boxes of 64 x 16
  CUtensorMap act_boxes;            ///< A (1, R, n) alike
  void* preact;                     ///< (R, W); null for inference
  void* act;                        ///< (R, n)
  const void* b1[2];                ///< gate and up, or the one there is; null: no bias
  std::int64_t bias_stride;         ///< elements from one unit's gate to the next unit's ...
  std::int64_t bias_expert_stride;  ///< ... and from one expert to the next
  int intermediate;
  Activations activations;
};

/// A of 16 columns, from accumulated gates and ups. Without a gate the activation ignores the ups.
template <class T, class Fn>
__device__ __forceinline__ Fragment activate(const Fn& fn, const float* gates, const float* ups) {
  Fragment act;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float *g = &gates[2 * j], *u = &ups[2 * j];
    // One reciprocal of four goes to the special function unit, three to Newton's method: with all
    // of them there a tile waits for it (docs/findings/archive/sigmoid.md). The column decides
    // which, so equal rows have equal bits: j % 2 is a half of the rows, j / 2 of the columns.
    act.w[j] = Pair<T>::pack(fn.forward_by_newton(g[0], u[0]),
                             j < 2 ? fn.forward(g[1], u[1]) : fn.forward_by_newton(g[1], u[1]));
  }
  return act;
}

/// The same where gates and ups alternate: from 32 accumulated columns. A lane has a unit of each
/// four.
template <class T, class Fn>
__device__ __forceinline__ Fragment activate_pairs(const Fn& fn, const float* acc) {
  Fragment act;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint32_t units[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float* h = &acc[8 * i + 4 * j];
      units[j] = i + j == 0 ? Pair<T>::pack(fn.forward(h[0], h[1]), fn.forward(h[2], h[3]))
                            : Pair<T>::pack(fn.forward_by_newton(h[0], h[1]),
                                            fn.forward_by_newton(h[2], h[3]));
    }
    to_columns(units[0], units[1], &act.w[2 * i], &act.w[2 * i + 1]);
  }
  return act;
}

/// Without `kBias`, b1 is not looked at. H of a chunk of 64 units leaves from an epilogue stage, A
/// from the warp's staging.
template <class Activations, bool kBias, bool kAlternates>
struct StoreActivation : DefersNothing {
  using Params = ActivationParams<Activations>;
  static constexpr bool kAdds = kBias;
  static constexpr bool kGated = Activations::kGated;
  /// Units (columns of A) of a tile kN wide. With a gate the tile's left half holds gate columns
  /// and the right half the up columns of the same units, or they alternate. Either way a pair
  /// meets in one thread.
  template <int kN>
  static constexpr int kUnits = kGated ? kN / 2 : kN;
  template <int kN>
  static constexpr int kEpilogueStages = kUnits<kN> / 64;
  static constexpr int kBuffers = 2;  ///< for A: it fills one before it waits for the other's reads
  static constexpr int kStagingBytes = kBuffers * WarpTile::kBytes;

  /// The epilogue stages come empty.
  template <class Traits>
  static __device__ __forceinline__ void load(const Params&, const Tile&, int, std::uint32_t,
                                              Barrier& full) {
    full.arrive();
  }

  template <class Traits>
  struct Run {
    const Params& e;
    const GemmParams& gemm;
    const Tile& tile;
    int m_first;
    std::uint32_t staging;

    using T = typename Traits::T;
    static constexpr int kCount = Traits::kTileN / 2;
    static constexpr int kUnits = StoreActivation::kUnits<Traits::kTileN>;
    static constexpr int kUp = kGated ? kCount / 2 : 0;  // accumulators from gates to ups
    using Parts = PreactParts<T, kGated, kAlternates>;
    static_assert(Traits::kM64 == 1);
    static_assert(kGated || !kAlternates);

    __device__ __forceinline__ void begin(float (&acc)[1][kCount]) {
      if constexpr (!kBias) return;
      constexpr int kBiases = kGated && !kAlternates ? 2 : 1;  // side by side in the tile
      constexpr int kColumns = Traits::kTileN / kBiases;
      static_for<kBiases>([&](auto index) {
        constexpr int part = decltype(index)::value;
        const T* bias = static_cast<const T*>(e.b1[part]);
        if (bias != nullptr) bias += tile.expert * e.bias_expert_stride;
        const ColumnBias<T> columns{bias, e.bias_stride, e.intermediate * (kAlternates ? 2 : 1)};
        columns.template start<part * kUp, kColumns>(acc, tile.n_block * kColumns);
      });
    }
    __device__ __forceinline__ void prefetch() {}

    __device__ __forceinline__ void finish(float (&acc)[1][kCount], Deferred<Traits>&,
                                           const EpilogueStages<Traits>& stages) {
      e.activations.visit([&](const auto& fn) { finish_as(fn, acc[0], stages); });
    }

    template <class Fn>
    __device__ __forceinline__ void finish_as(const Fn& fn, float (&acc)[kCount],
                                              const EpilogueStages<Traits>& stages) {
      const int n = e.intermediate;
      const int t = here(static_cast<int>(threadIdx.x)) % 128, lane = t % 32;
      const int row = m_first * 64 + uniform(t / 32) * 16;       // this warp's first, in the tile
      const int rows = tile.rows - tile.m_block * kTileM - row;  // the expert's from there on
      const int at = tile.first_row + tile.m_block * kTileM + row;
      T* const preact = static_cast<T*>(e.preact);
      const Parts parts{e.preact_boxes, preact, n};
      const ChunkStore<T> acts{&e.act_boxes, static_cast<T*>(e.act), n, n};
      const bool whole = rows >= WarpTile::kRows;
      // The accumulators of a chunk are part[0] to part[31] of each part.
      const auto store_chunk = [&](int chunk, const float* part0, const float* part1) {
        const int unit = tile.n_block * kUnits + chunk * 64;
        const std::uint32_t stage = uniform(stages.wait(chunk)) + row * kLineBytes;
        const WarpTile staged[2] = {{stage + stages.part(0), lane}, {stage + stages.part(1), lane}};
        const WarpTile act(staging + chunk % kBuffers * WarpTile::kBytes, lane);
        if (preact != nullptr) {
          put_rounded<T>(staged[0], part0);
          if (kGated) put_rounded<T>(staged[1], part1);
          order_before_copy_engine();
          if (whole && lane == 0) parts.send(staged, at, unit);
          __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kAlternates) {
            act.put(i, activate_pairs<T>(fn, (i < 2 ? part0 : part1) + i % 2 * 16));
          } else {
            act.put(i, activate<T>(fn, part0 + 8 * i, part1 + 8 * i));
          }
        }
        if (chunk > 0) {
          // Rarely blocks: the copy engine reads what left from the chunk before. The boxes of this
          // chunk's H are in no group yet.
          if (lane == 0) store_wait_read<0>();
          __syncwarp();
          stages.release(chunk - 1);
        }
        order_before_copy_engine();
        if (whole && lane == 0) acts.send(act, at, unit);
        if (!whole) {
          if (preact != nullptr) parts.store_rows(staged, at, unit, rows);
          acts.store_rows(act, at, unit, rows);
          order_before_copy_engine();  // which writes there next
        }
        if (lane == 0) store_commit();
      };
      // Accumulators from chunk to chunk, and from part to part.
      constexpr int kStep = kAlternates ? 64 : 32, kPart = kAlternates ? 32 : kUp;
      static_for<kUnits / 64>([&](auto chunk) {
        const float* const part0 = acc + decltype(chunk)::value * kStep;
        store_chunk(decltype(chunk)::value, part0, part0 + kPart);
      });
    }
  };
};

}  // namespace sonicmoe::cuda
