#pragma once

#include <cstddef>
#include <cstdint>

/// The output tile of a CTA, kTileM x Traits::kTileN, and how its operands lie in shared memory.
namespace sonicmoe::cuda {

inline constexpr int kCluster = 2;      ///< CTAs that share operand B
inline constexpr int kTileM = 128;      ///< rows of operand A
inline constexpr int kTileK = 64;       ///< elements of K in a stage: 16 bits each, one line
inline constexpr int kStepK = 16;       ///< elements of K that one wgmma takes
inline constexpr int kLineBytes = 128;  ///< one line of the 128-byte swizzle
inline constexpr int kABytes = kTileM * kLineBytes;
inline constexpr int kChunkBytes = 64 * kLineBytes;  ///< 64 x 64 elements
inline constexpr int kProducerThreads = 128;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kThreads = kProducerThreads + 32 * kConsumerWarps;

/// One output tile of one CTA.
struct alignas(16) Tile {
  int expert;     ///< negative: there is no further tile
  int m_block;    ///< M from kTileM * m_block on, counted in the expert
  int n_block;    ///< N from kTileN * n_block on
  int first_row;  ///< of the expert in the tensors of all rows
  int rows;       ///< of the expert; 0 if this CTA has no tile beside its peer's
  int split_n;    ///< 1: both CTAs have this m block, each with an n block of its own
};

}  // namespace sonicmoe::cuda
