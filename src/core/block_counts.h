#pragma once

#include <cstddef>
#include <cstdint>

#include "sonicmoe/ops.h"

namespace sonicmoe {

/// Handoff::block_counts: for every kTokens tokens in turn, a byte for each expert, how many of
/// them have it. Metadata on CUDA can then place all slots in one launch: its thread blocks, of
/// `each` such rows, sum what they need for themselves. That pays while they have little to read.
struct BlockCounts {
  static constexpr std::int64_t kTokens = 64;
  static constexpr std::int64_t kSlots = 2048;         ///< of a thread block, at most
  static constexpr std::int64_t kExperts = 512;        ///< at most
  static constexpr std::int64_t kBins = 1024;          ///< experts times `each`, at most
  static constexpr std::int64_t kMostRead = 16 << 20;  ///< bytes, by all thread blocks together

  std::int64_t rows = 0;    ///< of counts
  std::int64_t stride = 0;  ///< bytes of a row: experts, filled up to a multiple of 16 by zeros
  std::int64_t each = 0;    ///< rows of a thread block: 4, 2 or 1; 0: not used

  static BlockCounts of(std::int64_t tokens, std::int64_t experts, std::int64_t top_k) {
    BlockCounts counts;
    if (tokens <= 0 || top_k <= 0 || top_k > experts || experts > kExperts) return counts;
    for (std::int64_t each = 4; each > 0; each /= 2) {
      if (each * kTokens * top_k > kSlots || each * experts > kBins) continue;
      const std::int64_t rows = (tokens + kTokens - 1) / kTokens;
      const std::int64_t stride = (experts + 15) / 16 * 16;
      if ((rows + each - 1) / each <= kMostRead / (rows * stride)) counts = {rows, stride, each};
      return counts;
    }
    return counts;
  }
  std::int64_t bytes() const { return rows * stride; }
};

/// Bytes of Handoff::block_counts; 0 on the CPU and for sizes where it is neither written nor read.
std::size_t block_counts_bytes(const TopKDesc& desc, Device device) noexcept;

}  // namespace sonicmoe
