#pragma once

#include "cuda/sm90/pipeline.cuh"

/// The copy engine's loads of a stage: operand B always, operand A where nothing is gathered.
namespace sonicmoe::cuda {

/// What this CTA loads of operand B: one half, multicast to both CTAs; or all of its own n block,
/// where the CTAs split along n.
struct BShare {
  int rank;
  bool split_n;
  __device__ __forceinline__ bool loads(int half) const { return split_n || half == rank; }
  __device__ __forceinline__ std::uint16_t mask() const { return split_n ? 1 << rank : 3; }
};

/// B with K contiguous: two boxes of {64 k, kTileN/2 rows}. Box i starts at row rows[i] of map i.
template <int kTileN>
__device__ __forceinline__ void load_b_k(std::uint32_t stage, const Barrier& full,
                                         const BShare& share, const CUtensorMap (&maps)[2],
                                         const int (&rows)[2], int k, int expert) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!share.loads(i)) continue;
    load_box_multicast(stage + i * (kTileN / 2 * kLineBytes), &maps[i], full.address(),
                       share.mask(), k, rows[i], expert);
  }
}

/// B with N contiguous: chunks of 64 columns, each two boxes of {64 columns, 32 k}. A chunk behind
/// the one at column `last` loads that one again. The copy engine would fill it with zeros, which
/// all multiprocessors together get at some 700 GB/s (docs/findings/past-the-end.md).
template <int kTileN>
__device__ __forceinline__ void load_b_n(std::uint32_t stage, const Barrier& full,
                                         const BShare& share, const CUtensorMap* map, int column,
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

/// Called by one producer thread: the copy engine's part of k block `block`, where rows are M.
template <class Traits>
__device__ __forceinline__ void load_boxes(const GemmParams& p, const Tile& tile, int block,
                                           SharedStorage<Traits>& memory, int stage) {
  constexpr int kTileN = Traits::kTileN;
  const std::uint32_t a = shared_address(memory.stages[stage].a);
  const std::uint32_t b = shared_address(memory.stages[stage].b);
  Barrier& full = memory.full[stage];
  const BShare share{static_cast<int>(cluster_rank()), tile.split_n != 0};
  full.expect(kTileN * kLineBytes + (Traits::kGathers ? 0 : kABytes));
  const int half = block >= p.extents.k_half;
  const int k = (block - half * p.extents.k_half) * kTileK;
  if constexpr (Traits::kBMajor == Major::k) {
    const int row = tile.n_block * (p.b.gate_and_up ? kTileN / 2 : kTileN);
    load_b_k<kTileN>(b, full, share, p.b.maps, {row, row + (p.b.gate_and_up ? 0 : kTileN / 2)}, k,
                     tile.expert);
  } else {
    load_b_n<kTileN>(b, full, share, &p.b.maps[half], tile.n_block * kTileN, p.b.last_chunk, k,
                     tile.expert);
  }
  if constexpr (!Traits::kGathers) {
    load_box(a, &p.a.maps[half], full.address(), k, tile.first_row + tile.m_block * kTileM, 0);
  }
}

}  // namespace sonicmoe::cuda
