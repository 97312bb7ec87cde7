#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "core/device_traits.h"

/// Which of the compiled tiles an operation takes: pure functions of shape and device, each the
/// reason why a larger tile defers to the next, or empty. The models are fitted to
/// `bench --ops --every-kernel` on an H200; docs/findings/tile-choice.md has the figures.
namespace sonicmoe::cuda {

inline int tiles(std::int64_t extent, int width) {
  return static_cast<int>((extent + width - 1) / width);
}

/// Where the last chunk of 64 of so many columns, at least one, begins.
inline int last_chunk(std::int64_t columns) { return static_cast<int>((columns - 1) / 64 * 64); }

/// By what the tiles compute past the end of an axis: defers where that is over `percent` % more,
/// which is how much longer the narrow tile takes where both fit.
inline std::string defer_to(const char* axis, std::int64_t extent, int width, int other,
                            int percent) {
  const std::int64_t mine = static_cast<std::int64_t>(tiles(extent, width)) * width;
  const std::int64_t theirs = static_cast<std::int64_t>(tiles(extent, other)) * other;
  if (mine * 100 <= theirs * (100 + percent)) return {};
  return std::string(axis) + " " + std::to_string(extent) + ": tiles of " + std::to_string(other) +
         " waste less than tiles of " + std::to_string(width);
}

/// Weight gradients: by waste along n, for the small tile moves half as many bytes again for each
/// product; and where experts have 16 rows or fewer in the mean. What they are then is bytes to
/// write, and small tiles write them sooner.
inline std::string defer_to_small(std::int64_t rows, std::int64_t experts,
                                  std::int64_t intermediate) {
  if (rows <= 16 * experts) {
    return "rows " + std::to_string(rows) + " of " + std::to_string(experts) +
           " experts: tiles of 128 take less time than tiles of 256";
  }
  return defer_to("intermediate", intermediate, 256, 128, 45);
}

/// Pairs of CTAs at work at a time, one CTA on each multiprocessor.
inline int pairs_of(const DeviceTraits& device) { return std::max(device.multiprocessors / 2, 1); }

/// Bytes of L2 that operands may count on. The limits below were fitted on an H200 with this number
/// in place of the size that its driver reports, which is larger, as an H100's is. More L2 changes
/// no choice, for nobody has measured that; less does.
inline std::int64_t counted_l2(const DeviceTraits& device) {
  return std::min<std::int64_t>(device.l2_bytes, 50'000'000);
}

/// Tiles of pairs of CTAs in an expert's m_blocks of rows, `across` tiles to a stripe. The last
/// of an odd number of m_blocks is shared by a pair along `across`.
inline std::int64_t pair_tiles(std::int64_t m_blocks, int across) {
  return m_blocks / 2 * across + m_blocks % 2 * ((across + 1) / 2);
}

/// Rounds of all pairs, whole or not, that an operation over `rows` rows takes, `across` tiles to a
/// stripe of 128 rows. Experts have the mean number of rows, or a standard deviation of random
/// routing more or less, with equal weight.
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

/// Ping-pong over tiles of 192 columns, or 256 cooperatively. A k block of 64 takes 4 cycles a
/// column, 2 % more in the narrower tile, which moves more bytes. Neither has to wait for its
/// stores; what a tile costs beside its products, and the end of the whole, is fitted.
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

/// up_proj and dgrad: defers where `narrow` tiles across take less time than `wide` ones. A round
/// of those takes `percent` % of one of tiles twice as wide.
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

/// up_proj: what a round of its narrow tiles takes, in per cent of one of wide tiles. Where x is
/// twice as large as L2 and sums are long, narrow tiles read rows of x from memory again:
/// docs/findings/tile-choice.md.
inline int narrow_up_proj_percent(const DeviceTraits& device, std::int64_t bytes,
                                  std::int64_t k_blocks) {
  return bytes > 2 * counted_l2(device) && k_blocks >= 64 ? 70 : 57;
}

/// Cycles over which the pairs of CTAs of a product with gathered rows begin, one after the other:
/// half of a tile's time. Who begins together also stores together, tile after tile, and meanwhile
/// nobody gathers. Without effect where the `bytes` that are gathered from fit into L2, and few
/// tiles do not repay the wait: docs/findings/start-spread.md.
inline int start_spread(const DeviceTraits& device, std::int64_t bytes, double rounds,
                        double tile_cycles) {
  constexpr double kMost = 1e6;  // times the number of pairs it fits an int
  if (bytes <= counted_l2(device) || rounds < 8) return 0;
  return static_cast<int>(std::min(tile_cycles / 2, kMost));
}

/// No tile that is dealt has fewer k blocks.
inline constexpr int kLeastDynamicBlocks = 12;

/// Are tiles dealt to whoever is free, instead of each pair of CTAs having its share? That repays
/// where operands are long, and where there are many tiles: docs/findings/dealing.md. A counter
/// that nobody has `cleared` yet costs a launch of 2 to 3 microseconds and an early start.
inline bool schedules_dynamically(double rounds, int k_blocks, bool gathers, bool cleared) {
  if (rounds < 8) return false;
  if (gathers) return k_blocks >= (cleared ? 24 : 32);
  return k_blocks >= (cleared ? kLeastDynamicBlocks : 16);
}

/// The router's products with x, in tiles of `width` experts. Bytes that come into a multiprocessor
/// are what they take time for: 128 rows or columns of x beside `width` of the other operand.

/// Time of logits = x Wr^T, in rounds of all pairs by what a tile brings in.
inline std::int64_t logits_cost(const DeviceTraits& device, std::int64_t tokens,
                                std::int64_t experts, int width) {
  const std::int64_t pairs = static_cast<std::int64_t>(tiles(tokens, 256)) * tiles(experts, width);
  return tiles(pairs, pairs_of(device)) * static_cast<std::int64_t>(128 + width);
}

/// dWr = dlogits^T x has few tiles and a long sum over tokens: parts of the tokens go to different
/// pairs, and their fp32 sums are added by another kernel. More parts are less of the one and more
/// of the other.
struct TokenSplit {
  int parts;
  int tokens;   ///< of each part: a multiple of `step`, or all
  double cost;  ///< microseconds
};
inline TokenSplit token_split(const DeviceTraits& device, std::int64_t tokens, std::int64_t hidden,
                              std::int64_t experts, int width, int step) {
  if (tokens == 0) return {0, step, 0.0};
  // 50 GB/s into a multiprocessor; a sum written and read, at 3 TB/s.
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
