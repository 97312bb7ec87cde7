#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/sm90/traits.cuh"

/// The copy engine's loads of operand B where N is contiguous: for dgrad, dX~ and weight gradients.
namespace sonicmoe::cuda {

/// B with N contiguous: chunks of 64 columns, each two boxes of {64 columns, 32 k}. A chunk behind
/// the one at column `last` loads that one again. The copy engine would fill it with zeros, which
/// all multiprocessors together get at some 700 GB/s (docs/findings/archive/past-the-end.md).
template <int kTileN, class Share>
__device__ __forceinline__ void load_b_n(std::uint32_t stage, const Barrier& full,
                                         const Share& share, const CUtensorMap* map, int column,
                                         int last, int k, int expert) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!share.loads(i)) continue;
#pragma unroll
    for (int chunk = 0; chunk < kTileN / 64; ++chunk) {
      load_box_multicast(stage + chunk * kChunkBytes + i * (kChunkBytes / 2), map, full.address(),
                         share.mask(), min(column + chunk * 64, last), k + i * 32, expert);
    }
  }
}

}  // namespace sonicmoe::cuda
