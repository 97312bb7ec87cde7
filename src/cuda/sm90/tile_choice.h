#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "core/device_traits.h"

/// Which of the compiled tiles an operation takes. All are pure functions of shape and device. A
/// defer_...() function returns why a larger tile defers to the next entry, or empty. The models
/// are fitted to `bench --ops --every-kernel` on an H200; docs/findings/tile-choice.md has the
/// figures.
namespace sonicmoe::cuda {

inline int tiles(std::int64_t extent, int width) {
  return static_cast<int>((extent + width - 1) / width);
}

/// The column where the last chunk of 64 columns begins; `columns` is at least 1.
inline int last_chunk(std::int64_t columns) { return static_cast<int>((columns - 1) / 64 * 64); }

/// Compares what two widths of tiles compute past the end of an axis. Defers to `other` where tiles
/// of `width` compute over `percent` % more. The narrow tile takes that much longer where both fit.
inline std::string defer_to(const char* axis, std::int64_t extent, int width, int other,
                            int percent) {
  const std::int64_t mine = static_cast<std::int64_t>(tiles(extent, width)) * width;
  const std::int64_t theirs = static_cast<std::int64_t>(tiles(extent, other)) * other;
  if (mine * 100 <= theirs * (100 + percent)) return {};
  return std::string(axis) + " " + std::to_string(extent) + ": tiles of " + std::to_string(other) +
         " waste less than tiles of " + std::to_string(width);
}

/// Weight gradients: a wide tile defers where it wastes much along n, since the small tile moves
/// half as many bytes again for each product. It also defers where experts have 16 rows or fewer on
/// average. The time is then that of the stores, and small tiles begin to store sooner.
inline std::string defer_to_small(std::int64_t rows, std::int64_t experts,
                                  std::int64_t intermediate) {
  if (rows <= 16 * experts) {
    return "rows " + std::to_string(rows) + " of " + std::to_string(experts) +
           " experts: tiles of 128 take less time than tiles of 256";
  }
  return defer_to("intermediate", intermediate, 256, 128, 45);
}

/// Clusters of two CTAs that run at the same time, one CTA on each multiprocessor.
inline int pairs_of(const DeviceTraits& device) { return std::max(device.multiprocessors / 2, 1); }

/// Bytes of L2 that the limits below count with. They were fitted on an H200 with this number in
/// place of the larger size that its driver reports. More L2 changes no choice, since that was not
/// measured; less does.
inline std::int64_t counted_l2(const DeviceTraits& device) {
  return std::min<std::int64_t>(device.l2_bytes, 50'000'000);
}

/// Cluster tiles of an expert with `m_blocks` m blocks and `across` n blocks. In the last of an odd
/// number of m blocks the CTAs split along n.
inline std::int64_t pair_tiles(std::int64_t m_blocks, int across) {
  return m_blocks / 2 * across + m_blocks % 2 * ((across + 1) / 2);
}

/// Rounds of all clusters, whole or not, for an operation over `rows` rows with `across` n blocks.
/// The mean of three cases: experts have the mean number of rows, or one standard deviation of
/// random routing more or less.
inline double rounds(const DeviceTraits& device, std::int64_t rows, std::int64_t experts,
                     int across) {
  // Experts without rows have no tiles.
  experts = std::clamp<std::int64_t>(experts, 1, std::max<std::int64_t>(rows, 1));
  const double mean = static_cast<double>(rows) / static_cast<double>(experts);
  std::int64_t of_three = 0;
  for (int side = -1; side <= 1; ++side) {
    const double of_expert = mean + side * std::sqrt(mean);
    const auto m_blocks =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(of_expert / 128)));
    of_three += pair_tiles(m_blocks, across);
  }
  return static_cast<double>(of_three * experts) / (3 * pairs_of(device));
}

/// Compares tiles of 256 columns with ping-pong over tiles of 192. A k block takes 4 cycles a
/// column, and 2 % more in the narrower tile, which moves more bytes. Neither waits for its stores.
/// The other costs of a tile are fitted.
inline std::string defer_to_pingpong(const DeviceTraits& device, std::int64_t rows,
                                     std::int64_t experts, std::int64_t columns,
                                     std::int64_t k_blocks) {
  const auto cycles = [&](int width, std::int64_t of_tile) {
    return rounds(device, rows, experts, tiles(columns, width)) * static_cast<double>(of_tile);
  };
  if (cycles(256, 1024 * k_blocks + 1400) <= cycles(192, 783 * k_blocks + 850)) return {};
  return "rows " + std::to_string(rows) + " of " + std::to_string(experts) + " experts, columns " +
         std::to_string(columns) + ", " + std::to_string(k_blocks) +
         " k blocks: tiles of 192 take less time than tiles of 256";
}

/// up_proj and dgrad: defers where `narrow` n blocks take less time than `wide` n blocks of twice
/// the width. A round of narrow tiles takes `percent` % of a round of wide ones.
inline std::string defer_to_narrow(const DeviceTraits& device, std::int64_t rows,
                                   std::int64_t experts, int wide, int narrow, int percent) {
  const auto whole = [&](int across) {
    return std::max(1.0, std::ceil(rounds(device, rows, experts, across)));
  };
  if (whole(wide) * 100 <= whole(narrow) * percent) return {};
  return "rows " + std::to_string(rows) + " of " + std::to_string(experts) +
         " experts: " + std::to_string(narrow) + " narrow tiles across take less time than " +
         std::to_string(wide);
}

/// up_proj: the time of a round of narrow tiles in per cent of a round of wide ones. Where x is
/// twice as large as L2 and K is long, narrow tiles read rows of x from memory again
/// (docs/findings/tile-choice.md). `bytes`: of x.
inline int narrow_up_proj_percent(const DeviceTraits& device, std::int64_t bytes,
                                  std::int64_t k_blocks) {
  return bytes > 2 * counted_l2(device) && k_blocks >= 64 ? 70 : 57;
}

/// Cycles over which clusters start one after the other: half a tile's time. Clusters that start
/// together also store together, tile after tile. None loads rows meanwhile. `bytes`: of the tensor
/// that rows come from. Where it fits into L2 the wait is useless, and few rounds do not repay it:
/// then 0 (docs/findings/archive/start-spread.md).
inline int start_spread(const DeviceTraits& device, std::int64_t bytes, double rounds,
                        double tile_cycles) {
  constexpr double kMost = 1e6;  // times the number of clusters it fits an int
  if (bytes <= counted_l2(device) || rounds < 8) return 0;
  return static_cast<int>(std::min(tile_cycles / 2, kMost));
}

/// A tile that is scheduled dynamically has at least so many k blocks.
inline constexpr int kLeastDynamicBlocks = 12;

/// Does a free cluster draw its next tile, instead of having its share? That repays where K is long
/// and where there are many tiles (docs/findings/dealing.md). Without a counter that an earlier
/// operation has `cleared`, a memset costs 2 to 3 microseconds and the early start.
inline bool schedules_dynamically(double rounds, int k_blocks, bool gathers, bool cleared) {
  if (rounds < 8) return false;
  if (gathers) return k_blocks >= (cleared ? 24 : 32);
  return k_blocks >= (cleared ? kLeastDynamicBlocks : 16);
}

// The router's products with x, in tiles of `width` experts, take the time of the bytes that come
// into a multiprocessor: 128 rows or columns of x and `width` of the other operand.

/// logits = x Wr^T: rounds of all clusters, times what a tile brings in.
inline std::int64_t logits_cost(const DeviceTraits& device, std::int64_t tokens,
                                std::int64_t experts, int width) {
  const std::int64_t pairs = static_cast<std::int64_t>(tiles(tokens, 256)) * tiles(experts, width);
  return tiles(pairs, pairs_of(device)) * static_cast<std::int64_t>(128 + width);
}

/// dWr = dlogits^T x has few tiles and a long sum over tokens. So clusters take parts of the
/// tokens, and another kernel adds their fp32 sums. More parts shorten the first and lengthen the
/// second.
struct TokenSplit {
  int parts;
  int tokens;   ///< of each part: a multiple of `step`, or all
  double cost;  ///< microseconds
};
inline TokenSplit token_split(const DeviceTraits& device, std::int64_t tokens, std::int64_t hidden,
                              std::int64_t experts, int width, int step) {
  if (tokens == 0) return {0, step, 0.0};
  // 50 GB/s into a multiprocessor; 3 TB/s for sums that are written and read.
  const double whole = static_cast<double>(tokens) * (128 + width) * 2 / 50e3;
  const double part = static_cast<double>(experts) * static_cast<double>(hidden) * 8 / 3e6;
  const int pairs = tiles(hidden, 256) * tiles(experts, width);  // of CTAs, for one part
  const int most = std::min(std::max(pairs_of(device) / pairs, 1), tiles(tokens, 2 * step));
  const int wanted = std::clamp(static_cast<int>(std::lround(std::sqrt(whole / part))), 1, most);
  const std::int64_t rounded = std::int64_t{tiles(tiles(tokens, wanted), step)} * step;
  const int each = static_cast<int>(std::min(rounded, tokens));
  const int parts = tiles(tokens, each);
  return {parts, each, tiles(pairs, pairs_of(device)) * whole / parts + part * parts};
}

}  // namespace sonicmoe::cuda
