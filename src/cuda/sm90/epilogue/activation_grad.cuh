#pragma once

#include "cuda/device/warp_tile.cuh"
#include "cuda/sm90/epilogue/dispatch.cuh"
#include "cuda/sm90/pipeline.cuh"

/// Epilogue of down_proj_dgrad. The accumulators are dA' (unscaled). With H read back and A
/// computed from it again: dH = dAct(s dA', H), A' = s A, and the tile's part of dS = <dA', A>.
namespace sonicmoe::cuda {

template <class Activations>
struct ActivationGradParams {
  CUtensorMap preact_boxes[2];   ///< H: gate and up, or the one there is, (1, R, n) in 64 x 64
  CUtensorMap dpreact_boxes[2];  ///< dH alike, in 64 x 16
  CUtensorMap scaled_act_boxes;  ///< in 64 x 16
  void* dpreact;                 ///< (R, 2n) as [gate | up], or (R, n)
  void* scaled_act;              ///< (R, n)
  const float* row_scores;       ///< (R)
  float* dscores;                ///< (shared tiles, R): one partial sum for each tile along n
  std::int64_t capacity;         ///< R
  int intermediate;
  Activations activations;
};

/// The tile is gone through in chunks of 64 columns, each in a stage of the pipeline of its own:
/// the producer brings H there, gate beside up, as if it were another k block. dH takes the place
/// of H on its way out. A warp has 16 rows of a chunk. Rows of H past the expert's end are other
/// experts', or already their dH where that takes H's place, and dA' there may be anything: they
/// are computed with, and what comes out is not stored.
template <class Activations>
struct StoreActivationGrad : DefersNothing {
  using Params = ActivationGradParams<Activations>;
  static constexpr bool kAdds = false;
  static constexpr int kParts = Activations::kGated ? 2 : 1;
  static constexpr int kScaledTiles = 2;  ///< of A', in turn
  static constexpr int kStagingBytes = kScaledTiles * WarpTile::kBytes;
  template <int kTileN>
  static constexpr int kRingStages = kTileN / 64;

  /// H of chunk `block` into a stage, by one thread.
  template <class Traits>
  static __device__ __forceinline__ void load(const Params& e, const Tile& tile, int block,
                                              std::uint32_t stage, std::uint32_t full) {
    const int left = tile.rows - tile.m_block * kTileM;
    const int halves = left > 64 ? 2 : left > 0 ? 1 : 0;
    mbarrier_expect(full, kParts * halves * kChunkBytes);
    for (int part = 0; part < kParts; ++part) {
      for (int half = 0; half < halves; ++half) {
        load_box(stage + EpilogueStages<Traits>::place(part) + half * kChunkBytes,
                 &e.preact_boxes[part], full, tile.n_block * Traits::kTileN + block * 64,
                 tile.first_row + tile.m_block * kTileM + half * 64, 0);
      }
    }
  }

  template <class Traits>
  class Run {
   public:
    using T = typename Traits::T;
    static constexpr bool kGated = kParts == 2;
    static constexpr int kCount = Traits::kTileN / 2;

    static_assert(Traits::kM64 == 1);

    __device__ __forceinline__ Run(const Params& e, const GemmParams&, const Tile& tile,
                                   int m_first, std::uint32_t staging)
        : e_(e), tile_(tile), m_first_(m_first), staging_(staging) {}

    __device__ __forceinline__ void begin(float (&acc)[1][kCount]) {}

    __device__ __forceinline__ void prefetch() {
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row(t) + t % 32 / 4 + i * 8;
        scores_[i] = row < valid() ? e_.row_scores[tile_row() + row] : 0.0f;
      }
    }

    __device__ __forceinline__ void finish(float (&acc)[1][kCount], Deferred<Traits>&,
                                           const EpilogueStages<Traits>& stages) {
      e_.activations.visit([&](const auto& fn) { finish_as(fn, acc[0], stages); });
    }

   private:
    __device__ __forceinline__ int valid() const { return tile_.rows - tile_.m_block * kTileM; }
    __device__ __forceinline__ int tile_row() const {
      return tile_.first_row + tile_.m_block * kTileM;
    }
    /// This warp's first row, in the tile.
    __device__ __forceinline__ int first_row(int t) const { return m_first_ * 64 + t / 32 * 16; }

    template <class Fn>
    __device__ __forceinline__ void finish_as(const Fn& fn, float (&acc)[kCount],
                                              const EpilogueStages<Traits>& stages) {
      const int n = e_.intermediate;
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int lane = t % 32;
      const int row = uniform(first_row(t));
      const int rows = valid() - row;
      float dot[2] = {0.0f, 0.0f};
      static_for<Traits::kTileN / 64>([&](auto index) {
        constexpr int chunk = decltype(index)::value;
        const std::uint32_t stage = uniform(stages.wait(chunk)) + row * kLineBytes;
        const WarpTile gate(stage + stages.place(0), lane), up(stage + stages.place(1), lane);
        // What was stored from here two chunks ago has been read: see below.
        const WarpTile scaled(staging_ + chunk % kScaledTiles * WarpTile::kBytes, lane);
        Fragment next_g = gate.get(0), next_u = {};
        if (kGated) next_u = up.get(0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Fragment g = next_g, u = next_u;
          if (i < 3) {
            next_g = gate.get(i + 1);
            if (kGated) next_u = up.get(i + 1);
          }
          Fragment dg, du, a;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float score = scores_[j % 2];
            const float* da = &acc[(chunk * 4 + i) * 8 + 2 * j];
            const float2 gs = Pair<T>::unpack(g.w[j]);
            const float2 us = Pair<T>::unpack(u.w[j]);
            const math::Gradients r0 = fn.backward(gs.x, us.x, score * da[0]);
            const math::Gradients r1 = fn.backward(gs.y, us.y, score * da[1]);
            dot[j % 2] = math::fma(da[0], r0.act, dot[j % 2]);
            dot[j % 2] = math::fma(da[1], r1.act, dot[j % 2]);
            dg.w[j] = Pair<T>::pack(r0.dgate, r1.dgate);
            du.w[j] = Pair<T>::pack(r0.dup, r1.dup);
            a.w[j] = Pair<T>::pack(score * r0.act, score * r1.act);
          }
          gate.put(i, dg);
          if (kGated) up.put(i, du);
          scaled.put(i, a);
        }
        if (chunk > 0) {
          // By now the stores of the chunk before have been read.
          if (lane == 0) store_wait_read<0>();
          __syncwarp();
          stages.give_back(chunk - 1);
        }
        const int unit = tile_.n_block * Traits::kTileN + chunk * 64;
        const bool whole = rows >= WarpTile::kRows && unit < n;
        fence_async_proxy();
        __syncwarp();
        if (whole && lane == 0) {
          const int at = tile_row() + row;
          store_box(&e_.dpreact_boxes[0], gate.address(), unit, at, 0);
          if (kGated) store_box(&e_.dpreact_boxes[1], up.address(), unit, at, 0);
          store_box(&e_.scaled_act_boxes, scaled.address(), unit, at, 0);
          store_commit();
        }
        if (!whole) {
          const std::int64_t at = static_cast<std::int64_t>(tile_row()) + row;
          const std::int64_t width = kGated ? 2 * n : n;
          T* const dpreact = static_cast<T*>(e_.dpreact) + at * width + unit;
          gate.store(dpreact, width, rows, n - unit);
          if (kGated) up.store(dpreact + n, width, rows, n - unit);
          scaled.store(static_cast<T*>(e_.scaled_act) + at * n + unit, n, rows, n - unit);
          // Read before the copy engine writes there.
          fence_async_proxy();
          __syncwarp();
        }
      });
      // Columns past n have zero H, for which A is zero: they added nothing, unless their dA', of
      // weights that are zero or those of other columns, is infinite or NaN.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = quad_sum(dot[h]);
        const int r = row + lane / 4 + 8 * h;
        if (lane % 4 == 0 && r < valid()) {
          e_.dscores[tile_.n_block * e_.capacity + tile_row() + r] = sum;
        }
      }
    }

    const Params& e_;
    const Tile& tile_;
    int m_first_;
    std::uint32_t staging_;
    float scores_[2];
  };
};

}  // namespace sonicmoe::cuda
