#pragma once

#include <cstddef>
#include <cstdint>

#include "sonicmoe/ops.h"

namespace sonicmoe {

/// Sizes of Handoff::block_counts. It has one row for each kTokens consecutive tokens, and a byte
/// for each expert in a row: how many of these tokens chose the expert. With it metadata on CUDA
/// places all slots in one launch. A thread block places the slots of `each` rows and sums the
/// counts of all rows itself. That pays while thread blocks have little to read
/// (docs/findings/routing.md).
struct BlockCounts {
  static constexpr std::int64_t kTokens = 64;
  static constexpr std::int64_t kSlots = 2048;         ///< most slots of a thread block
  static constexpr std::int64_t kExperts = 512;        ///< most experts
  static constexpr std::int64_t kBins = 1024;          ///< most experts times `each`
  static constexpr std::int64_t kMostRead = 16 << 20;  ///< most bytes that all blocks together read

  std::int64_t rows = 0;    ///< of counts
  std::int64_t stride = 0;  ///< bytes of a row: experts, padded with zeros to a multiple of 16
  std::int64_t each = 0;    ///< rows of a thread block, a power of two up to 4; 0: unused

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

/// Bytes of Handoff::block_counts; 0 on the CPU and for sizes where top_k and metadata do not use
/// it.
std::size_t block_counts_bytes(const TopKDesc& desc, Device device) noexcept;

}  // namespace sonicmoe
