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
  float small_factor;  ///< with kParts: multiplies the products with small parts
};

/// Out: the type of the logits. kParts: the products have two columns for each expert, first with
/// the small part of its weights, then with the big one. A thread holds both of them.
template <class Out, bool kParts>
struct StoreLogits : LoadsNothing, DefersNothing {
  using Params = LogitsParams;
  static constexpr bool kAdds = false;
  static constexpr int kStagingBytes = 16;  // unused; an array has at least one element

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
      if (!kParts && e.experts % 2 == 0) {
        store<true>(acc);
      } else {
        store<false>(acc);
      }
    }

    template <bool kPairs>
    __device__ __forceinline__ void store(const float (&acc)[Traits::kM64][kCount]) const {
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int first = tile.m_block * kTileM + m_first * 64 + t / 32 * 16 + t % 32 / 4;
      const int expert =
          tile.n_block * (kParts ? Traits::kTileN / 2 : Traits::kTileN) + t % 4 * (kParts ? 1 : 2);
      const int rows = tile.rows - first, experts = e.experts - expert;
      Out* to[2 * Traits::kM64];  // of this thread's rows, eight apart
#pragma unroll
      for (int i = 0; i < 2 * Traits::kM64; ++i) {
        const std::int64_t row = tile.first_row + first + i / 2 * 64 + i % 2 * 8;
        to[i] = static_cast<Out*>(e.out) + row * e.experts + expert;
      }
      static_for<kCount / 4>([&](auto index) {
        constexpr int j = decltype(index)::value, kAt = j * (kParts ? 4 : 8);
        const auto bias = [&](int i) {  // -0 changes no bit of a sum
          return e.bias != nullptr && kAt + i < experts ? e.bias[expert + kAt + i] : -0.0f;
        };
        const float b[2] = {bias(0), kParts ? 0.0f : bias(1)};
#pragma unroll
        for (int i = 0; i < 2 * Traits::kM64; ++i) {
          if (i / 2 * 64 + i % 2 * 8 >= rows) continue;
          const float* const a = &acc[i / 2][4 * j + i % 2 * 2];
          if constexpr (kParts) {
            const float sum = math::fma(a[0], e.small_factor, a[1]);
            if (kAt < experts) to[i][kAt] = from_float<Out>(math::add(sum, b[0]));
          } else if constexpr (kPairs) {
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

}  // namespace sonicmoe::cuda
