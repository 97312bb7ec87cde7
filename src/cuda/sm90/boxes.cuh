#pragma once

#include "cuda/sm90/load_b_n.cuh"
#include "cuda/sm90/pipeline.cuh"

/// The copy engine's loads of a stage: operand B always, operand A where nothing is gathered.
namespace sonicmoe::cuda {

/// What a CTA loads of B: a half, for both CTAs; where they split along n, all of its own n block.
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

/// Called by one producer thread: the copy engine's part of k block `block`, where rows are M.
template <class Traits>
requires(Traits::kRowsAreM) __device__ __forceinline__
    void load_boxes(const GemmParams& p, const Tile& tile, int block, SharedStorage<Traits>& memory,
                    int stage) {
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
