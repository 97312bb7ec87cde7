#pragma once

#include <cstdint>

namespace sonicmoe::cuda {

/// One output tile of one CTA. Where tiles are taller than 128 rows, or come in halves, `first_row`
/// and `rows` are the tile's own, and `own` is 0.
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
///
/// Taller tiles than 128 rows lie next to each other along the shared axis (kGroup of 1), and are
/// 128 high where rows would not fill them: the last pair of an expert, if that is enough for it,
/// and all pairs of the last experts, so that clusters end at about the same time. Their `own` is
/// 0, and `first_row` and `rows` are the tile's own.
///
/// With kRows the tiles of the last round may come as two halves each, the first and the last rows
/// of their stripes, so that clusters that would have none left take half of those of the others.
template <bool kRows, int kOwn, int kCluster>
class TileWalk {
 public:
  static constexpr bool kTall = kOwn > 128;
  static constexpr int kGroup = kTall ? 1 : 8;
  static constexpr int kLow = 128;
  static_assert(kCluster == 2, "pairs");
  static_assert(kRows || !kTall, "tiles of contractions are 128 wide");

  /// `offsets` null: the rows are split into equal parts of `part` rows, one for each expert.
  /// `order` (not kRows) null: experts ascend; what is no expert there has no tiles. `clusters`:
  /// how many share the tiles, if those of a last round with at most half as many are to be halved;
  /// else 0. `low_from` (kTall): the first of the experts whose tiles are all 128 high.
  __device__ TileWalk(const std::int32_t* offsets, const std::int32_t* order, int experts, int rows,
                      int part, int own_extent, int shared_tiles, int clusters, int low_from)
      : offsets_(offsets),
        order_(order),
        experts_(experts),
        rows_(rows),
        part_(part),
        own_extent_(own_extent),
        shared_tiles_(shared_tiles),
        low_from_(low_from) {
    load_window();
    if (kRows && clusters > 0) halve_last_round(clusters);
  }

  /// The tile with number `index` for this CTA of the cluster; false past the last. Indices must
  /// not decrease from call to call. The whole warp calls together.
  __device__ __forceinline__ bool find(int index, int rank, Tile* tile) {
    const int past = kRows ? index - halved_from_ : -1;
    if (past >= 0) index = halved_from_ + past / 2;
    if (!find_whole(index, rank, tile)) return false;
    if (past >= 0) halve(past % 2, tile);
    return true;
  }

 private:
  __device__ __forceinline__ bool find_whole(int index, int rank, Tile* tile) {
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
    const int stripes = own_stripes(tile->rows, tile->expert);
    const int pairs = apart(stripes) ? stripes / kCluster : (stripes + 1) / kCluster;
    tile->apart = local >= pairs * shared_tiles_;
    if (tile->apart) {
      tile->own = stripes - 1;
      if (kTall) place(tile, height(tile->expert), height(tile->expert));
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
    if (kTall) {
      const int usual = height(tile->expert);
      const int left = tile->rows - pair * kCluster * usual;
      place(tile, usual, left <= kCluster * kLow ? kLow : usual);
    }
    return true;
  }

  /// The rows of a tile that is `height` high, in a pair where those before it were `usual`.
  static __device__ __forceinline__ void place(Tile* tile, int usual, int height) {
    const int first = tile->own / kCluster * kCluster * usual + tile->own % kCluster * height;
    clip(tile, first, height);
  }

  static __device__ __forceinline__ void halve(int half, Tile* tile) {
    clip(tile, tile->own * kOwn + half * (kOwn / 2), kOwn / 2);
  }

  /// At most `most` rows from the expert's `first` on. A tile without stays at the expert's first
  /// row, which exists.
  static __device__ __forceinline__ void clip(Tile* tile, int first, int most) {
    const int rows = min(tile->rows - first, most);
    if (rows > 0) tile->first_row += first;
    tile->rows = max(rows, 0);
    tile->own = 0;
  }

  __device__ __forceinline__ void halve_last_round(int clusters) {
    int total = 0;
    for (int e = static_cast<int>(threadIdx.x) % 32; e < experts_; e += 32) {
      total += cluster_tiles(offsets_[e + 1] - offsets_[e], e);
    }
    total = __reduce_add_sync(~0u, total);
    const int last = total % clusters;
    if (last <= clusters / 2) halved_from_ = total - last;
  }

  /// Of this expert's tiles, but for a last pair that needs less.
  __device__ __forceinline__ int height(int expert) const {
    return kTall && expert >= low_from_ ? kLow : kOwn;
  }
  __device__ __forceinline__ int own_stripes(int rows, int expert) const {
    const int extent = kRows ? rows : own_extent_;
    return height(expert) == kLow ? (extent + kLow - 1) / kLow : (extent + kOwn - 1) / kOwn;
  }
  /// Does the last of these stripes go apart? Not if there is nothing to share it by, nor where it
  /// is always the same one.
  __device__ __forceinline__ bool apart(int stripes) const {
    return kRows && stripes % kCluster != 0 && shared_tiles_ > 1;
  }
  __device__ __forceinline__ int cluster_tiles(int rows, int expert) const {
    const int stripes = own_stripes(rows, expert);
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
      last_ = cluster_tiles(count_, expert);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, last_, step);
      if (lane >= step) last_ += other;
    }
  }

  const std::int32_t* offsets_;
  const std::int32_t* order_;
  int experts_, rows_, part_, own_extent_, shared_tiles_, low_from_;
  int window_ = 0, start_ = 0;
  int halved_from_ = 1 << 30;              // past the last: no operands have so many
  int expert_, first_row_, count_, last_;  // of this lane's expert
};

}  // namespace sonicmoe::cuda
