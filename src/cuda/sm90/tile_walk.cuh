#pragma once

#include <cstdint>

namespace sonicmoe::cuda {

/// One output tile of one CTA.
struct alignas(16) Tile {
  int expert;
  int own;        ///< which 128-wide stripe along the axis that the CTA does not share
  int shared;     ///< which stripe along the axis that the CTAs of a cluster share
  int first_row;  ///< of the expert
  int rows;       ///< of the expert
  int apart;      ///< 1: the CTAs have the same rows and neighbouring shared stripes
};

/// The tiles of all experts by number; each producer warp derives them for itself from the offsets
/// in device memory. Experts ascend, or come in a given order; inside an expert, groups of `kGroup`
/// cluster tiles along the own axis, in each the shared axis outside, so that neighbouring clusters
/// reuse each other's operands from L2.
///
/// An expert whose number of stripes along the own axis is odd leaves no second one for the last
/// pair: there the CTAs go apart, both on that stripe, each with a stripe of its own along the
/// shared axis. (If that number is odd too, nothing is left for the second CTA: a tile without
/// rows.)
///
/// `kRows`: the own axis is the expert's rows, so that experts differ in their number of tiles.
/// Otherwise the own axis has `own_extent` elements for every expert, and the rows are contracted.
template <bool kRows, int kOwn, int kCluster>
class TileWalk {
 public:
  static constexpr int kGroup = 8;
  static_assert(kCluster == 2, "pairs");

  /// `offsets` null: the rows are split into equal parts of `part` rows, one for each expert.
  /// `order` (not kRows) null: experts ascend; what is no expert there has no tiles.
  __device__ TileWalk(const std::int32_t* offsets, const std::int32_t* order, int experts, int rows,
                      int part, int own_extent, int shared_tiles)
      : offsets_(offsets),
        order_(order),
        experts_(experts),
        rows_(rows),
        part_(part),
        own_extent_(own_extent),
        shared_tiles_(shared_tiles) {
    load_window();
  }

  /// The tile with number `index` for this CTA of the cluster; false past the last. Indices must
  /// not decrease from call to call. The whole warp calls together.
  __device__ __forceinline__ bool find(int index, int rank, Tile* tile) {
    while (true) {
      const int total = __shfl_sync(~0u, last_, 31);
      if (index < start_ + total) break;
      window_ += 32;
      if (window_ >= experts_) return false;
      start_ += total;
      load_window();
    }
    const int inside = index - start_;
    const int lane = __popc(__ballot_sync(~0u, last_ <= inside));
    tile->expert = kRows ? window_ + lane : __shfl_sync(~0u, expert_, lane);
    tile->first_row = __shfl_sync(~0u, first_row_, lane);
    tile->rows = __shfl_sync(~0u, count_, lane);
    const int before = __shfl_sync(~0u, last_, lane == 0 ? 0 : lane - 1);
    const int local = inside - (lane == 0 ? 0 : before);
    const int stripes = own_stripes(tile->rows);
    const int pairs = apart(stripes) ? stripes / kCluster : (stripes + 1) / kCluster;
    tile->apart = local >= pairs * shared_tiles_;
    if (tile->apart) {
      tile->own = stripes - 1;
      tile->shared = (local - pairs * shared_tiles_) * kCluster + rank;
      if (tile->shared >= shared_tiles_) tile->rows = 0;
      return true;
    }
    const int group = local / (kGroup * shared_tiles_);
    const int in_group = local - group * (kGroup * shared_tiles_);
    const int size = min(kGroup, pairs - group * kGroup);
    tile->shared = in_group / size;
    const int pair = group * kGroup + in_group - tile->shared * size;
    tile->own = pair * kCluster + rank;
    return true;
  }

 private:
  __device__ __forceinline__ int own_stripes(int rows) const {
    return ((kRows ? rows : own_extent_) + kOwn - 1) / kOwn;
  }
  /// Does the last of these stripes go apart? Not if there is nothing to share it by, nor where it
  /// is always the same one.
  __device__ __forceinline__ bool apart(int stripes) const {
    return kRows && stripes % kCluster != 0 && shared_tiles_ > 1;
  }
  __device__ __forceinline__ int cluster_tiles(int rows) const {
    const int stripes = own_stripes(rows);
    if (!apart(stripes)) return (stripes + 1) / kCluster * shared_tiles_;
    return stripes / kCluster * shared_tiles_ + (shared_tiles_ + 1) / kCluster;
  }

  /// Lane i takes the expert at place window + i; `last_` becomes the inclusive sum of tiles in the
  /// window.
  __device__ __forceinline__ void load_window() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int expert = window_ + lane;
    if constexpr (!kRows) {
      if (order_ != nullptr && expert < experts_) expert = order_[expert];
      if (expert < 0) expert = experts_;
      expert_ = expert;
    }
    first_row_ = 0;
    count_ = 0;
    last_ = 0;
    if (expert < experts_) {
      if (offsets_ != nullptr) {
        first_row_ = offsets_[expert];
        count_ = offsets_[expert + 1] - first_row_;
      } else {
        first_row_ = min(expert * part_, rows_);
        count_ = min(part_, rows_ - first_row_);
      }
      last_ = cluster_tiles(count_);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, last_, step);
      if (lane >= step) last_ += other;
    }
  }

  const std::int32_t* offsets_;
  const std::int32_t* order_;
  int experts_, rows_, part_, own_extent_, shared_tiles_;
  int window_ = 0, start_ = 0;
  int expert_, first_row_, count_, last_;  // of this lane's expert
};

}  // namespace sonicmoe::cuda
