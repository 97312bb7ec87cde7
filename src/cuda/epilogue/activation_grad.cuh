#pragma once

#include "cuda/device/warp_tile.cuh"
#include "cuda/epilogue/dispatch.cuh"
#include "cuda/sm90/grouped_gemm.cuh"

/// Epilogue of down_proj_dgrad. The accumulators are dA' (unscaled). With H read back and A
/// computed from it again: dH = dAct(s dA', H), A' = s A, and the tile's part of dS = <dA', A>.
namespace sonicmoe::cuda {

struct ActivationGradParams {
  CUtensorMap preact_boxes[2];   ///< H: gate and up, or the one there is, (1, R, n) in 64 x 16
  CUtensorMap dpreact_boxes[2];  ///< dH alike
  CUtensorMap scaled_act_boxes;
  void* dpreact;            ///< (R, 2n) as [gate | up], or (R, n)
  void* scaled_act;         ///< (R, n)
  const float* row_scores;  ///< (R)
  float* dscores;           ///< (shared tiles, R): one partial sum for each tile along n
  std::int64_t capacity;    ///< R
  int intermediate;
  Activation activation;
};

/// A warp goes through its tile in chunks of 16 rows x 64 columns. H comes by the copy engine, the
/// first two chunks during the main loop, in which the others are asked into L2; dH takes the place
/// of H in shared memory on its way out. Rows of H past the expert's end are other experts': they
/// are computed with, and what comes out is not stored.
template <ActivationKind kKind>
struct StoreActivationGrad {
  using Params = ActivationGradParams;
  static constexpr bool kGated = kKind != ActivationKind::plain;
  static constexpr int kBufferBytes =
      (kGated ? 2 : 1) * WarpTile::kBytes;  // gate and up of a chunk
  static constexpr int kWarpBytes = 2 * kBufferBytes + WarpTile::kBytes;
  static constexpr int kWarpBarriers = 2;  // of the two buffers

  template <class Traits>
  class Run {
   public:
    using T = typename Traits::T;
    static constexpr int kCount = Traits::kN / 2;
    static constexpr int kAcross = Traits::kN / 64;  // chunks side by side
    static constexpr int kChunks = Traits::kMBlocks * kAcross;

    static_assert(kChunks % 2 == 0, "both buffers are filled equally often in a tile");

    __device__ __forceinline__ Run(const Params& e, const GemmParams&, const Tile& tile,
                                   int m_first, const WarpMemory& memory)
        : e_(e), tile_(tile), m_first_(m_first), memory_(memory) {}

    __device__ __forceinline__ void begin(float (&acc)[Traits::kMBlocks][kCount]) {
      static_for<Traits::kMBlocks>([&](auto block) { clear(acc[decltype(block)::value]); });
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
#pragma unroll
      for (int i = 0; i < 2 * Traits::kMBlocks; ++i) {
        const int row = row_of(i / 2 * kAcross, t) + t % 32 / 4 + i % 2 * 8;
        scores_[i] = row < valid() ? e_.row_scores[tile_row() + row] : 0.0f;
      }
    }

    __device__ __forceinline__ void prefetch() {
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      if (t % 32 == 0) {
        store_wait_read<0>();  // the buffers may still be on their way out
        for (int chunk = 0; chunk < 2; ++chunk) fetch(chunk, t);
        for (int chunk = 2; chunk < kChunks; ++chunk) {
          for_parts([&](int part) {
            prefetch_box(&e_.preact_boxes[part], unit_of(chunk), tile_row() + row_of(chunk, t), 0);
          });
        }
      }
      __syncwarp();
    }

    __device__ __forceinline__ void finish(float (&acc)[Traits::kMBlocks][kCount]) {
      visit_activation<kKind>(e_.activation, [&](auto fn) { finish_as<decltype(fn)>(acc); });
    }

   private:
    template <class F>
    static __device__ __forceinline__ void for_parts(F&& f) {
      f(0);
      if (kGated) f(1);
    }
    __device__ __forceinline__ int valid() const { return tile_.rows - tile_.own * kOwn; }
    __device__ __forceinline__ int tile_row() const { return tile_.first_row + tile_.own * kOwn; }
    /// This warp's first row of a chunk, in the tile.
    __device__ __forceinline__ int row_of(int chunk, int t) const {
      return (m_first_ + chunk / kAcross) * 64 + t / 32 * 16;
    }
    __device__ __forceinline__ int unit_of(int chunk) const {
      return tile_.shared * Traits::kN + chunk % kAcross * 64;
    }
    __device__ __forceinline__ std::uint32_t buffer(int chunk) const {
      return memory_.staging + chunk % 2 * kBufferBytes;
    }

    /// By one lane.
    __device__ __forceinline__ void fetch(int chunk, int t) {
      const std::uint32_t landed = memory_.barriers + chunk % 2 * 8;
      mbarrier_expect(landed, kBufferBytes);
      for_parts([&](int part) {
        load_box(buffer(chunk) + part * WarpTile::kBytes, &e_.preact_boxes[part], landed,
                 unit_of(chunk), tile_row() + row_of(chunk, t), 0);
      });
    }

    template <class Fn>
    __device__ __forceinline__ void finish_as(float (&acc)[Traits::kMBlocks][kCount]) {
      const int n = e_.intermediate;
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int lane = t % 32;
      const WarpTile scaled(memory_.staging + 2 * kBufferBytes, lane);
      float dot[2] = {0.0f, 0.0f};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int m = chunk / kAcross;
        const WarpTile gate(buffer(chunk), lane), up(buffer(chunk) + WarpTile::kBytes, lane);
        mbarrier_wait(memory_.barriers + chunk % 2 * 8,
                      (memory_.turn * (kChunks / 2) + chunk / 2) % 2);
        Block a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i == 2 && chunk > 0) {
            // By now the chunk before has been read, and its buffer can take the one after.
            if (lane == 0) {
              store_wait_read<0>();
              if (chunk + 1 < kChunks) fetch(chunk + 1, t);
            }
            __syncwarp();
          }
          const Block g = gate.get(i);
          Block u = {};
          if (kGated) u = up.get(i);
          Block dg, du;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float score = scores_[2 * m + j % 2];
            const float* da = &acc[m][(chunk % kAcross * 4 + i) * 8 + 2 * j];
            const float2 gs = Pair<T>::unpack(g.w[j]);
            const float2 us = Pair<T>::unpack(u.w[j]);
            const math::Gradients r0 = Fn::backward(gs.x, us.x, score * da[0]);
            const math::Gradients r1 = Fn::backward(gs.y, us.y, score * da[1]);
            dot[j % 2] = math::fma(da[0], r0.act, dot[j % 2]);
            dot[j % 2] = math::fma(da[1], r1.act, dot[j % 2]);
            dg.w[j] = Pair<T>::pack(r0.dgate, r1.dgate);
            du.w[j] = Pair<T>::pack(r0.dup, r1.dup);
            a[i].w[j] = Pair<T>::pack(score * r0.act, score * r1.act);
          }
          gate.put(i, dg);
          if (kGated) up.put(i, du);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) scaled.put(i, a[i]);

        const int row = row_of(chunk, t), unit = unit_of(chunk);
        const int rows = valid() - row;
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
        if (chunk % kAcross == kAcross - 1) {
          // Columns past n have zero weights and zero H: they added nothing.
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float sum = quad_sum(dot[h]);
            const int r = row + lane / 4 + 8 * h;
            if (lane % 4 == 0 && r < valid()) {
              e_.dscores[tile_.shared * e_.capacity + tile_row() + r] = sum;
            }
            dot[h] = 0.0f;
          }
        }
      }
    }

    const Params& e_;
    const Tile& tile_;
    int m_first_;
    WarpMemory memory_;
    float scores_[2 * Traits::kMBlocks];
  };
};

}  // namespace sonicmoe::cuda
