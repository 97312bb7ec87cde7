#pragma once

#include "cuda/sm90/epilogue/dispatch.cuh"
#include "cuda/sm90/epilogue/epilogue.cuh"
#include "cuda/sm90/epilogue/limits.cuh"
#include "cuda/sm90/epilogue/ports.cuh"
#include "cuda/sm90/epilogue/row_reduce.cuh"

/// Epilogue of down_proj_dgrad. The accumulators are dA' (unscaled). It reads H back, computes A
/// from it again, and stores dH = dAct(s dA', H), A' = s A, and the tile's part of dS = <dA', A>.
namespace sonicmoe::cuda {

template <class Activations>
struct ActivationGradParams {
  CUtensorMap preact_boxes[2];   ///< H by parts (PreactParts), in boxes of 64 x 64
  CUtensorMap dpreact_boxes[2];  ///< dH alike, in 64 x 16
  CUtensorMap scaled_act_boxes;  ///< in 64 x 16
  void* dpreact;                 ///< (R, W)
  void* scaled_act;              ///< (R, n)
  const float* row_scores;       ///< (R); contiguous rows: or null, for s = 1
  float* dscores;                ///< (n blocks, R): one partial sum for each; null without scores
  std::int64_t capacity;         ///< R
  int intermediate;
  Activations activations;
};

/// A tile has an epilogue stage for each 64 columns. The producer brings H there, part beside part,
/// and dH takes its place on the way out. Where gates and ups alternate, the accumulators' columns
/// come in the order of TensorView::pairs_rows. So a lane has the units whose pairs ldmatrix brings
/// it. A warp has 16 rows. Rows of H past the expert's end
/// belong to other experts, and may already be dH; dA' is anything there. They are computed but not
/// stored.
template <class Activations, bool kAlternates>
struct StoreActivationGrad : DefersNothing {
  using Params = ActivationGradParams<Activations>;
  static constexpr bool kAdds = false;
  template <class T>
  using Parts = PreactParts<T, Activations::kGated, kAlternates>;
  static constexpr int kBuffers = 2;  ///< for A'
  static constexpr int kStagingBytes = kBuffers * WarpTile::kBytes;
  template <int kN>
  static constexpr int kEpilogueStages = kN / 64;
  /// Gathered rows have scores.
  template <class Traits>
  static constexpr bool kAlwaysScored = Traits::kGathers;

  /// H of chunk `chunk`.
  template <class Traits>
  static __device__ __forceinline__ void load(const Params& e, const Tile& tile, int chunk,
                                              std::uint32_t stage, Barrier& full) {
    const int left = tile.rows - tile.m_block * kTileM;
    const int halves = left > 64 ? 2 : left > 0 ? 1 : 0;
    const Parts<typename Traits::T> parts{e.preact_boxes};
    full.expect(parts.kCount * halves * kChunkBytes);
    for (int part = 0; part < parts.kCount; ++part) {
      for (int half = 0; half < halves; ++half) {
        load_box(stage + EpilogueStages<Traits>::part(part) + half * kChunkBytes, parts.map(part),
                 full.address(), parts.column(part, tile.n_block * Traits::kTileN + chunk * 64),
                 tile.first_row + tile.m_block * kTileM + half * 64, 0);
      }
    }
  }

  template <class Traits>
  struct Run {
    const Params& e;
    const GemmParams& gemm;
    const Tile& tile;
    int m_first;
    std::uint32_t staging;
    float scores[2] = {};  ///< s of this lane's two rows, from prefetch()

    using T = typename Traits::T;
    static constexpr bool kGated = Activations::kGated;
    static constexpr int kCount = Traits::kTileN / 2;
    static_assert(Traits::kM64 == 1);

    __device__ __forceinline__ void begin(float (&acc)[1][kCount]) {}

    __device__ __forceinline__ void prefetch() {
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row(t) + t % 32 / 4 + i * 8;
        const bool scored = kAlwaysScored<Traits> || e.row_scores != nullptr;
        scores[i] = row >= valid() ? 0.0f : scored ? e.row_scores[tile_row() + row] : 1.0f;
      }
    }

    __device__ __forceinline__ void finish(float (&acc)[1][kCount], Deferred<Traits>&,
                                           const EpilogueStages<Traits>& stages) {
      e.activations.visit([&](const auto& fn) {
        visit_limits<T>(fn, [&](const auto& inside, const auto& limits) {
          finish_as(inside, limits, acc[0], stages);
        });
      });
    }

    __device__ __forceinline__ int valid() const { return tile.rows - tile.m_block * kTileM; }
    __device__ __forceinline__ int tile_row() const {
      return tile.first_row + tile.m_block * kTileM;
    }
    /// This warp's first row, in the tile.
    __device__ __forceinline__ int first_row(int t) const { return m_first * 64 + t / 32 * 16; }

    template <class Fn, class Limits>
    __device__ __forceinline__ void finish_as(const Fn& fn, const Limits& limits,
                                              float (&acc)[kCount],
                                              const EpilogueStages<Traits>& stages) {
      const int n = e.intermediate;
      const int t = here(static_cast<int>(threadIdx.x)) % 128, lane = t % 32;
      const int row = uniform(first_row(t));
      const int rows = valid() - row, at = tile_row() + row;
      const Parts<T> dparts{e.dpreact_boxes, static_cast<T*>(e.dpreact), n};
      const ChunkStore<T> acts{&e.scaled_act_boxes, static_cast<T*>(e.scaled_act), n, n};
      RowReduce dscores;
      const auto store_chunk = [&](int chunk, const float* da) {
        const std::uint32_t stage = uniform(stages.wait(chunk)) + row * kLineBytes;
        const WarpTile staged[2] = {{stage + stages.part(0), lane}, {stage + stages.part(1), lane}};
        // The copy engine has read what left from here two chunks ago: see the wait below.
        const WarpTile scaled(staging + chunk % kBuffers * WarpTile::kBytes, lane);
        if constexpr (kAlternates) {
          differentiate_pairs(fn, limits, da, staged, scaled, dscores);
        } else {
          differentiate(fn, limits, da, staged, scaled, dscores);
        }
        if (chunk > 0) {
          // Rarely blocks: the copy engine reads what left from the chunk before.
          if (lane == 0) store_wait_read<0>();
          __syncwarp();
          stages.release(chunk - 1);
        }
        const int unit = tile.n_block * Traits::kTileN + chunk * 64;
        const bool whole = rows >= WarpTile::kRows && unit < n;
        order_before_copy_engine();
        if (whole && lane == 0) {
          dparts.send(staged, at, unit);
          acts.send(scaled, at, unit);
          store_commit();
        }
        if (!whole) {
          dparts.store_rows(staged, at, unit, rows);
          acts.store_rows(scaled, at, unit, rows);
          order_before_copy_engine();  // which writes there next
        }
      };
      constexpr int kChunks = Traits::kTileN / 64;
      if constexpr (kChunks > 2) {
        // One body for all chunks, which come to acc[0] to acc[31] in turn. Unrolled, the code does
        // not fit into the instruction cache. Without pin() the compiler serialises wgmma in some
        // kernels, and in narrow tiles, with half as many chunks, even so
        // (docs/findings/archive/instruction-cache.md).
#pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          store_chunk(chunk, acc);
#pragma unroll
          for (int i = 32; i < kCount; ++i) acc[i - 32] = acc[i];
          pin(acc);
        }
      } else {
        static_for<kChunks>([&](auto chunk) {
          store_chunk(decltype(chunk)::value, &acc[decltype(chunk)::value * 32]);
        });
      }
      // Columns past n add nothing: H is zero there and so is A. (Unless dA' is infinite or NaN
      // there, from weights of other columns.)
      if (!kAlwaysScored<Traits> && e.dscores == nullptr) return;
      dscores.store(e.dscores + tile.n_block * e.capacity + at, rows, lane);
    }

    /// dH and A' of a chunk, in place of H and in `scaled`. `da`: dA' of it, 32 accumulators.
    template <class Fn, class Limits>
    __device__ __forceinline__ void differentiate(const Fn& fn, const Limits& limits,
                                                  const float* da, const WarpTile (&staged)[2],
                                                  const WarpTile& scaled, RowReduce& dscores) {
      const WarpTile &gate = staged[0], &up = staged[1];
      // Fragments are loaded one ahead. A function with limits of its own leaves no registers.
      constexpr bool kAhead = !kHasLimits<Fn>;
      Fragment next_g = {}, next_u = {};
      const auto load = [&](int i) {
        next_g = gate.get(i);
        if (kGated) next_u = up.get(i);
      };
      if (kAhead) load(0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!kAhead) load(i);
        const Fragment g = next_g, u = next_u;
        if (kAhead && i < 3) load(i + 1);
        Fragment dg, du, a;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float score = scores[j % 2];
          const float* d = &da[i * 8 + 2 * j];
          const auto gates = limits.gates(g.w[j]);
          const auto ups = limits.ups(u.w[j]);
          const float2 gs = Pair<T>::unpack(gates.inside);
          const float2 us = Pair<T>::unpack(ups.inside);
          const math::Gradients r0 = fn.backward(gs.x, us.x, score * d[0]);
          const math::Gradients r1 = fn.backward(gs.y, us.y, score * d[1]);
          dscores.add(j % 2, d[0], r0.act);
          dscores.add(j % 2, d[1], r1.act);
          dg.w[j] = gates.slope(Pair<T>::pack(r0.dgate, r1.dgate));
          du.w[j] = ups.slope(Pair<T>::pack(r0.dup, r1.dup));
          a.w[j] = Pair<T>::pack(score * r0.act, score * r1.act);
        }
        gate.put(i, dg);
        if (kGated) up.put(i, du);
        scaled.put(i, a);
      }
    }

    /// The same where gates and ups alternate: a fragment has the pairs of 8 units, of which a lane
    /// has units q and 4 + q.
    template <class Fn, class Limits>
    __device__ __forceinline__ void differentiate_pairs(const Fn& fn, const Limits& limits,
                                                        const float* da,
                                                        const WarpTile (&staged)[2],
                                                        const WarpTile& scaled,
                                                        RowReduce& dscores) {
      Fragment next = staged[0].get(0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Fragment a;
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
          const int at = 2 * i + eight;  // of 8 fragments, four in a part
          const Fragment h = next;
          if (at < 7) next = staged[(at + 1) / 4].get((at + 1) % 4);
          Fragment dh;
          std::uint32_t acts[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {  // unit q, then unit 4 + q
            float act[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              const float d = da[at * 4 + 2 * row + j];
              const auto limited = limits.pair(h.w[2 * j + row]);
              const float2 pair = Pair<T>::unpack(limited.inside);
              const math::Gradients r = fn.backward(pair.x, pair.y, scores[row] * d);
              dscores.add(row, d, r.act);
              dh.w[2 * j + row] = limited.slope(Pair<T>::pack(r.dgate, r.dup));
              act[row] = scores[row] * r.act;
            }
            acts[j] = Pair<T>::pack(act[0], act[1]);
          }
          staged[at / 4].put(at % 4, dh);
          to_columns(acts[0], acts[1], &a.w[2 * eight], &a.w[2 * eight + 1]);
        }
        scaled.put(i, a);
      }
    }
  };
};

}  // namespace sonicmoe::cuda
