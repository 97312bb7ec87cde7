#pragma once

#include "cuda/device/warp_tile.cuh"
#include "cuda/epilogue/dispatch.cuh"
#include "cuda/sm90/grouped_gemm.cuh"

/// Epilogue of down_proj_dgrad. The accumulators are dA' (unscaled). With H read back and A
/// computed from it again: dH = dAct(s dA', H), A' = s A, and the tile's part of dS = <dA', A>.
namespace sonicmoe::cuda {

struct ActivationGradParams {
  const void* preact;       ///< (R, 2n) as [gate | up], or (R, n)
  void* dpreact;            ///< the same shape
  void* scaled_act;         ///< (R, n)
  const float* row_scores;  ///< (R)
  float* dscores;           ///< (shared tiles, R): one partial sum for each tile along n
  std::int64_t capacity;    ///< R
  int intermediate;
  Activation activation;
};

/// A warp goes through its tile in chunks of 16 rows x 64 columns. Chunks of H are fetched two
/// ahead, the first two before the main loop; dH takes their place in shared memory on its way out.
template <ActivationKind kKind>
struct StoreActivationGrad {
  using Params = ActivationGradParams;
  static constexpr bool kGated = kKind != ActivationKind::plain;
  static constexpr int kBufferBytes =
      (kGated ? 2 : 1) * WarpTile::kBytes;  // gate and up of a chunk
  static constexpr int kWarpBytes = 2 * kBufferBytes + WarpTile::kBytes;

  template <class Traits>
  class Run {
   public:
    using T = typename Traits::T;
    static constexpr int kCount = Traits::kN / 2;
    static constexpr int kAcross = Traits::kN / 64;  // chunks side by side
    static constexpr int kChunks = Traits::kMBlocks * kAcross;

    __device__ __forceinline__ Run(const Params& e, const GemmParams&, const Tile& tile,
                                   int m_first, std::uint32_t staging)
        : e_(e), tile_(tile), m_first_(m_first), staging_(staging) {}

    __device__ __forceinline__ void begin(float (&acc)[Traits::kMBlocks][kCount]) {
      static_for<Traits::kMBlocks>([&](auto block) { clear(acc[decltype(block)::value]); });
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int lane = t % 32;
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) fetch(chunk, t);
#pragma unroll
      for (int i = 0; i < 2 * Traits::kMBlocks; ++i) {
        const int row = row_of(i / 2 * kAcross, t) + lane / 4 + i % 2 * 8;
        scores_[i] = row < valid() ? e_.row_scores[first() + row] : 0.0f;
      }
    }

    __device__ __forceinline__ void finish(float (&acc)[Traits::kMBlocks][kCount]) {
      visit_activation<kKind>(e_.activation, [&](auto fn) { finish_as<decltype(fn)>(acc); });
    }

   private:
    __device__ __forceinline__ int valid() const { return tile_.rows - tile_.own * kOwn; }
    __device__ __forceinline__ std::int64_t first() const {
      return static_cast<std::int64_t>(tile_.first_row) + tile_.own * kOwn;
    }
    /// This warp's first row of a chunk, in the tile.
    __device__ __forceinline__ int row_of(int chunk, int t) const {
      return (m_first_ + chunk / kAcross) * 64 + t / 32 * 16;
    }
    __device__ __forceinline__ int unit_of(int chunk) const {
      return tile_.shared * Traits::kN + chunk % kAcross * 64;
    }
    __device__ __forceinline__ std::uint32_t buffer(int chunk) const {
      return staging_ + chunk % 2 * kBufferBytes;
    }

    __device__ __forceinline__ void fetch(int chunk, int t) {
      const int n = e_.intermediate;
      const int row = row_of(chunk, t), unit = unit_of(chunk);
      const std::int64_t width = kGated ? 2 * n : n;
      const T* from = static_cast<const T*>(e_.preact) + (first() + row) * width + unit;
      WarpTile(buffer(chunk), t % 32).fetch(from, width, valid() - row, n - unit);
      if (kGated) {
        WarpTile(buffer(chunk) + WarpTile::kBytes, t % 32)
            .fetch(from + n, width, valid() - row, n - unit);
      }
      copy_async_commit();
    }

    template <class Fn>
    __device__ __forceinline__ void finish_as(float (&acc)[Traits::kMBlocks][kCount]) {
      const int n = e_.intermediate;
      const std::int64_t width = kGated ? 2 * n : n;
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int lane = t % 32;
      const WarpTile scaled(staging_ + 2 * kBufferBytes, lane);
      float dot[2] = {0.0f, 0.0f};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int m = chunk / kAcross;
        const WarpTile gate(buffer(chunk), lane), up(buffer(chunk) + WarpTile::kBytes, lane);
        if (chunk + 1 < kChunks) {
          copy_async_wait<1>();
        } else {
          copy_async_wait<0>();
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Block g = gate.get(i);
          Block u = {};
          if (kGated) u = up.get(i);
          Block dg, du, a;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float score = scores_[2 * m + j % 2];
            const float* da = &acc[m][(chunk % kAcross * 4 + i) * 8 + 2 * j];
            const float2 gs = Pair<T>::unpack(g.w[j]);
            const float2 us = Pair<T>::unpack(u.w[j]);
            const math::Gradients r0 = Fn::backward(gs.x, us.x, score * da[0]);
            const math::Gradients r1 = Fn::backward(gs.y, us.y, score * da[1]);
            dot[j % 2] += da[0] * r0.act;
            dot[j % 2] += da[1] * r1.act;
            dg.w[j] = Pair<T>::pack(r0.dgate, r1.dgate);
            du.w[j] = Pair<T>::pack(r0.dup, r1.dup);
            a.w[j] = Pair<T>::pack(score * r0.act, score * r1.act);
          }
          gate.put(i, dg);
          if (kGated) up.put(i, du);
          scaled.put(i, a);
        }
        __syncwarp();
        const int row = row_of(chunk, t), unit = unit_of(chunk);
        const int rows = valid() - row, columns = n - unit;
        T* const dpreact = static_cast<T*>(e_.dpreact) + (first() + row) * width + unit;
        gate.store(dpreact, width, rows, columns);
        if (kGated) up.store(dpreact + n, width, rows, columns);
        scaled.store(static_cast<T*>(e_.scaled_act) + (first() + row) * n + unit, n, rows, columns);
        __syncwarp();
        if (chunk + 2 < kChunks) fetch(chunk + 2, t);
        if (chunk % kAcross == kAcross - 1) {
          // Columns past n have zero weights and zero H: they added nothing.
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float sum = quad_sum(dot[h]);
            const int r = row + lane / 4 + 8 * h;
            if (lane % 4 == 0 && r < valid()) {
              e_.dscores[tile_.shared * e_.capacity + first() + r] = sum;
            }
            dot[h] = 0.0f;
          }
        }
      }
    }

    const Params& e_;
    const Tile& tile_;
    int m_first_;
    std::uint32_t staging_;
    float scores_[2 * Traits::kMBlocks];
  };
};

}  // namespace sonicmoe::cuda
