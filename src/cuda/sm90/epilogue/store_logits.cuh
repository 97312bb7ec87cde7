#pragma once

#include "cuda/device/warp.cuh"
#include "cuda/sm90/epilogue/epilogue.cuh"
#include "cuda/sm90/epilogue/store_tile.cuh"

/// Epilogue that stores logits from the accumulators: any number of experts, an optional bias.
namespace sonicmoe::cuda {

struct LogitsParams {
  void* out;           ///< (rows, experts)
  const float* bias;   ///< (experts), or null
  int experts;         ///< columns of `out`
  float small_factor;  ///< of StoreSplitLogits: multiplies the products with small parts
};

/// Base of both epilogues.
struct MakesLogits : LoadsNothing, DefersNothing {
  using Params = LogitsParams;
  static constexpr bool kAdds = false;
  static constexpr int kStagingBytes = 16;  // unused; an array has at least one element
};

/// Out: the type of the logits.
template <class Out>
struct StoreLogits : MakesLogits {
  template <class Traits>
  struct Run {
    const Params& e;
    const GemmParams& gemm;
    const Tile& tile;
    int m_first;
    std::uint32_t staging;

    static constexpr int kCount = Traits::kTileN / 2;

    __device__ __forceinline__ void begin(float (&)[Traits::kM64][kCount]) {}
    __device__ __forceinline__ void prefetch() {}

    __device__ __forceinline__ void finish(float (&acc)[Traits::kM64][kCount], Deferred<Traits>&,
                                           const EpilogueStages<Traits>&) {
      // A pair of experts begins at an even element only if all rows do.
      if (e.experts % 2 == 0) {
        store<true>(acc);
      } else {
        store<false>(acc);
      }
    }

    template <bool kPairs>
    __device__ __forceinline__ void store(const float (&acc)[Traits::kM64][kCount]) const {
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int first = tile.m_block * kTileM + m_first * 64 + t / 32 * 16 + t % 32 / 4;
      const int expert = tile.n_block * Traits::kTileN + t % 4 * 2;
      const int rows = tile.rows - first, experts = e.experts - expert;
      Out* to[2 * Traits::kM64];  // of this thread's rows, eight apart
#pragma unroll
      for (int i = 0; i < 2 * Traits::kM64; ++i) {
        const std::int64_t row = tile.first_row + first + i / 2 * 64 + i % 2 * 8;
        to[i] = static_cast<Out*>(e.out) + row * e.experts + expert;
      }
      static_for<kCount / 4>([&](auto index) {
        constexpr int j = decltype(index)::value, kAt = j * 8;
        const auto bias = [&](int i) {  // -0 changes no bit of a sum
          return e.bias != nullptr && kAt + i < experts ? e.bias[expert + kAt + i] : -0.0f;
        };
        const float b[2] = {bias(0), bias(1)};
#pragma unroll
        for (int i = 0; i < 2 * Traits::kM64; ++i) {
          if (i / 2 * 64 + i % 2 * 8 >= rows) continue;
          const float* const a = &acc[i / 2][4 * j + i % 2 * 2];
          if constexpr (kPairs) {
            if (kAt < experts) {
              store_pair(to[i] + kAt, math::add(a[0], b[0]), math::add(a[1], b[1]));
            }
          } else {
            if (kAt < experts) to[i][kAt] = from_float<Out>(math::add(a[0], b[0]));
            if (kAt + 1 < experts) to[i][kAt + 1] = from_float<Out>(math::add(a[1], b[1]));
          }
        }
      });
    }

    static __device__ __forceinline__ void store_pair(float* to, float x, float y) {
      *reinterpret_cast<float2*>(to) = {x, y};
    }
    template <class T>
    static __device__ __forceinline__ void store_pair(T* to, float x, float y) {
      *reinterpret_cast<std::uint32_t*>(to) = Pair<T>::pack(x, y);
    }
  };
};

/// fp32 logits of weights in three parts. 16 experts take 48 columns of the products: their tiny
/// parts, their small ones, their big ones. A thread holds all parts of an expert.
///
/// Tensor cores truncate where fp32 rounds. So fp32 additions take over the products with big parts
/// after every 256 elements of K (docs/findings/archive/fp32-router.md).
struct StoreSplitLogits : MakesLogits {
  static constexpr int kBlock = 48;  ///< columns of 16 experts

  template <class Traits>
  struct Run {
    const Params& e;
    const GemmParams& gemm;
    const Tile& tile;
    int m_first;
    std::uint32_t staging;
    static constexpr int kEights = Traits::kTileN / kBlock * 2;  ///< of experts
    float sums[kEights][4] = {};                                 ///< of products with big parts

    static_assert(Traits::kM64 == 1 && Traits::kTileN % kBlock == 0);
    using Accumulators = float[1][Traits::kTileN / 2];

    __device__ __forceinline__ void begin(Accumulators&) {}
    __device__ __forceinline__ void prefetch() {}

    /// Where the accumulators of a part of eight experts begin. Part 0 is the tiny one.
    static constexpr int at(int eight, int part) {
      return 4 * (eight / 2 * (kBlock / 8) + 2 * part + eight % 2);
    }

    __device__ __forceinline__ void add_up(Accumulators& acc) {
#pragma unroll
      for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& big = acc[0][at(eight, 2) + i];
          sums[eight][i] = math::add(sums[eight][i], big);
          big = 0.0f;
        }
      }
    }

    __device__ __forceinline__ void finish(Accumulators& acc, Deferred<Traits>&,
                                           const EpilogueStages<Traits>&) {
      add_up(acc);
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int first = tile.m_block * kTileM + m_first * 64 + t / 32 * 16 + t % 32 / 4;
      const int expert = tile.n_block * (8 * kEights) + t % 4 * 2;
      const int rows = tile.rows - first, experts = e.experts - expert;
      float* const to =
          static_cast<float*>(e.out) + std::int64_t{tile.first_row + first} * e.experts + expert;
      static_for<kEights>([&](auto index) {
        constexpr int kEight = decltype(index)::value;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = i / 2 * 8, column = 8 * kEight + i % 2;
          if (row >= rows || column >= experts) continue;
          const float tiny = acc[0][at(kEight, 0) + i], small = acc[0][at(kEight, 1) + i];
          const float rest = math::fma(tiny, e.small_factor, small);
          float sum = math::fma(rest, e.small_factor, sums[kEight][i]);
          if (e.bias != nullptr) sum = math::add(sum, e.bias[expert + column]);
          to[row * std::int64_t{e.experts} + column] = sum;
        }
      });
    }
  };
};

}  // namespace sonicmoe::cuda
