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

/// B with K contiguous: two boxes of {64 k, kTileN/2 rows}. Box i starts at row rows[i] of maps[i].
template <class Traits>
__device__ __forceinline__ void load_b_k(std::uint32_t stage, const Barrier& full,
                                         const BShare& share, const CUtensorMap* const (&maps)[2],
                                         const int (&rows)[2], int k, int expert) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!share.loads(i)) continue;
    const std::uint32_t to = stage + i * (Traits::kTileN / 2 * kLineBytes);
    if constexpr (Traits::kBPairsRows) {
      load_box5_multicast(to, maps[i], full.address(), share.mask(), k, rows[i] / 8, expert);
    } else {
      load_box_multicast(to, maps[i], full.address(), share.mask(), k, rows[i], expert);
    }
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
  constexpr bool kMapsOfTile = Traits::kBMaps == BMaps::of_tile;
  if constexpr (Traits::kBMajor == Major::k) {
    const bool gate_and_up = kMapsOfTile && p.b.gate_and_up;
    const int row = tile.n_block * (gate_and_up ? kTileN / 2 : kTileN);
    load_b_k<Traits>(b, full, share,
                     {&p.b.maps[kMapsOfTile ? 0 : half], &p.b.maps[kMapsOfTile ? 1 : half]},
                     {row, row + (gate_and_up ? 0 : kTileN / 2)}, k, tile.expert);
  } else if constexpr (kMapsOfTile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_b_n<kTileN / 2>(b + i * (kTileN / 128 * kChunkBytes), full, share, &p.b.maps[i],
                           tile.n_block * (kTileN / 2), p.b.last_chunk, k, tile.expert);
    }
  } else {
    load_b_n<kTileN>(b, full, share, &p.b.maps[half], tile.n_block * kTileN, p.b.last_chunk, k,
                     tile.expert);
  }
  if constexpr (!Traits::kGathers) {
    load_box(a, &p.a.maps[half], full.address(), k, tile.first_row + tile.m_block * kTileM, 0);
  }
}

}  // namespace sonicmoe::cuda
