#pragma once

#include <cstdint>

/// The output tile of a CTA, and what it is cut into.
namespace sonicmoe::cuda {

inline constexpr int kTileK = 64;
inline constexpr int kTileM = 128;
inline constexpr int kLineBytes = 128;
inline constexpr int kABytes = kTileM * kLineBytes;
inline constexpr int kChunkBytes = 64 * kLineBytes;  // 64 x 64 elements
inline constexpr int kProducerThreads = 128;

/// One output tile of one CTA.
struct alignas(16) Tile {
  int expert;
  int m_block;    ///< which 128-wide stripe along the axis that the CTA does not share
  int n_block;    ///< which stripe along the axis that the CTAs of a cluster share
  int first_row;  ///< of the expert
  int rows;       ///< of the expert
  int split_n;    ///< 1: the CTAs have the same rows and neighbouring shared stripes
};

}  // namespace sonicmoe::cuda
