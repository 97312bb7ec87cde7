#pragma once

#include <cstdint>

#include "cuda/device/ptx.cuh"

/// Sizes of the portable kernels' tiles, and which tile a thread block computes.
namespace sonicmoe::cuda::sm80 {

inline constexpr int kTileM = 128;
inline constexpr int kNarrow = 128;  ///< N of every tile but the wide one of up_proj
inline constexpr int kMostThreads = 256;
/// Threads of a tile: a warp for each 64 x 64.
template <int kTileN>
inline constexpr int kThreadsOf = kTileN;
/// Stages of the ring.
template <int kTileN>
inline constexpr int kStagesOf = kTileN == 256 ? 4 : 3;
inline constexpr int kTileK = 64;       ///< elements of K in a stage: 16 bits each, one line
inline constexpr int kLineBytes = 128;  ///< of shared memory
inline constexpr int kPieces = 8;       ///< of 16 bytes in a line

/// One output tile.
struct Tile {
  int expert;     ///< negative: none
  int m_block;    ///< M from kTileM * m_block on
  int n_block;    ///< N from kTileN * n_block on
  int first_row;  ///< of the expert in the tensors of all rows
  int rows;       ///< of the expert
};

/// How many tiles there are.
struct Extents {
  const std::int32_t* begins;        ///< (E) first row of each expert, or null: equal parts
  const std::int32_t* ends;          ///< (E) the row behind its last
  const std::int32_t* expert_order;  ///< (E) order of tiles, or null: by id
  int experts;
  int rows, part_rows;  ///< equal parts: rows of all experts, and of each
  int m_blocks;         ///< along M; 0: rows are M, so an expert has as many as its rows need
  int n_blocks;         ///< along N
};

/// What find_tile() keeps in shared memory.
struct alignas(16) TileSearch {
  // In front: the compiler reads them 16 bytes at a time, and `found` is written meanwhile.
  int of_warp[kMostThreads / 32];
  Tile found;
};

/// m blocks whose tiles of one n block come before the next n block, so that thread blocks that run
/// together find each other's operands in L2.
/// ExactGemm.SeveralGroupsOfTiles has experts of more.
inline constexpr int kGroup = 16;

/// The tile with an index; all threads call. Experts ascend, or come in Extents::expert_order.
/// There are more thread blocks than tiles: the host knows only how many there may be.
template <int kThreads>
__device__ __forceinline__ Tile find_tile(const Extents& x, int index, TileSearch& shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  if (thread == 0) shared.found.expert = -1;
  int start = 0;  // tiles of the experts before this window
  for (int window = 0; window < x.experts && start <= index; window += kThreads) {
    int expert = window + thread, first = 0, rows = 0, m_blocks = 0;
    if (expert < x.experts) {
      if (x.expert_order != nullptr) expert = x.expert_order[expert];
      if (expert >= 0 && expert < x.experts) {
        if (x.begins != nullptr) {
          first = x.begins[expert];
          rows = x.ends[expert] - first;
        } else {
          first = min(expert * x.part_rows, x.rows);
          rows = min(x.part_rows, x.rows - first);
        }
        m_blocks = x.m_blocks > 0 ? x.m_blocks : (rows + kTileM - 1) / kTileM;
      }
    }
    const int tiles = m_blocks * x.n_blocks;
    int through = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    if (lane == 31) shared.of_warp[warp] = through;
    __syncthreads();  // the sums of all warps are there
    int before = start + through - tiles;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      const int sum = shared.of_warp[w];
      if (w < warp) before += sum;
      start += sum;
    }
    if (index >= before && index < before + tiles) {
      const int local = index - before;
      const int group = local / (kGroup * x.n_blocks);
      const int inside = local - group * kGroup * x.n_blocks;
      const int size = min(kGroup, m_blocks - group * kGroup);
      const int n_block = inside / size;
      shared.found = {expert, group * kGroup + inside - n_block * size, n_block, first, rows};
    }
    __syncthreads();  // the tile is there, if it is in this window
  }
  return shared.found;
}

}  // namespace sonicmoe::cuda::sm80
