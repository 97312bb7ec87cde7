#pragma once

#include "cuda/sm90/pipeline.cuh"

/// Which tile comes next.
namespace sonicmoe::cuda {

/// The tiles of all experts by number; each producer warp derives them for itself from the offsets
/// in device memory. Experts ascend, or come in a given order; inside an expert, groups of `kGroup`
/// cluster tiles along the own axis, in each the shared axis outside, so that neighbouring clusters
/// reuse each other's operands from L2.
///
/// An expert whose number of m_blocks along the own axis is odd leaves no second one for the last
/// pair: there the CTAs go apart, both on that stripe, each with a stripe of its own along the
/// shared axis. (If that number is odd too, nothing is left for the second CTA: a tile without
/// rows.)
///
/// `kRows`: the own axis is the expert's rows, so that experts differ in their number of tiles.
/// Otherwise the own axis has `m_extent` elements for every expert, and the rows are contracted.
template <bool kRows, int kTileM, int kCluster>
class TileWalk {
 public:
  static constexpr int kGroup = 8;
  static_assert(kCluster == 2, "pairs");

  /// `offsets` null: the rows are split into equal parts of `part` rows, one for each expert.
  /// `order` (not kRows) null: experts ascend; what is no expert there has no tiles.
  __device__ TileWalk(const std::int32_t* offsets, const std::int32_t* order, int experts, int rows,
                      int part, int m_extent, int n_blocks)
      : offsets_(offsets),
        order_(order),
        experts_(experts),
        rows_(rows),
        part_(part),
        m_extent_(m_extent),
        n_blocks_(n_blocks) {
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
    const int m_blocks = m_blocks_of(tile->rows);
    const int pairs = splits_last(m_blocks) ? m_blocks / kCluster : (m_blocks + 1) / kCluster;
    tile->split_n = local >= pairs * n_blocks_;
    if (tile->split_n) {
      tile->m_block = m_blocks - 1;
      tile->n_block = (local - pairs * n_blocks_) * kCluster + rank;
      if (tile->n_block >= n_blocks_) tile->rows = 0;
      return true;
    }
    const int group = local / (kGroup * n_blocks_);
    const int in_group = local - group * (kGroup * n_blocks_);
    const int size = min(kGroup, pairs - group * kGroup);
    tile->n_block = in_group / size;
    const int pair = group * kGroup + in_group - tile->n_block * size;
    tile->m_block = pair * kCluster + rank;
    return true;
  }

 private:
  __device__ __forceinline__ int m_blocks_of(int rows) const {
    return ((kRows ? rows : m_extent_) + kTileM - 1) / kTileM;
  }
  /// Does the last of these m_blocks go apart? Not if there is nothing to share it by, nor where it
  /// is always the same one.
  __device__ __forceinline__ bool splits_last(int m_blocks) const {
    return kRows && m_blocks % kCluster != 0 && n_blocks_ > 1;
  }
  __device__ __forceinline__ int cluster_tiles(int rows) const {
    const int m_blocks = m_blocks_of(rows);
    if (!splits_last(m_blocks)) return (m_blocks + 1) / kCluster * n_blocks_;
    return m_blocks / kCluster * n_blocks_ + (n_blocks_ + 1) / kCluster;
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
  int experts_, rows_, part_, m_extent_, n_blocks_;
  int window_ = 0, start_ = 0;
  int expert_, first_row_, count_, last_;  // of this lane's expert
};

/// The number of the tile that a cluster has after the one it has: every stride-th; or, with a
/// counter, tiles are dealt in order to whoever asks next. By stride a cluster that is slower than
/// others falls behind with every tile, and no longer finds their operands in L2
/// (docs/findings/dealing.md).
///
/// The leader of the first CTA draws while a tile is loaded, and tells both CTAs. No number is
/// overwritten before all have read it: a CTA is at most kStages blocks ahead of its peer. A
/// cluster's first tile is not drawn, and whoever draws a number past the last tile ends. Without
/// kDynamic there is next() alone.
template <class Traits>
class TileCounter {
 public:
  /// The block, from 0, by which there is an answer. Every tile that is dealt has it.
  static constexpr int kSendAt = 3;

  /// `counter`: null where tiles go by stride.
  __device__ __forceinline__ TileCounter(std::int32_t* counter, SharedMemory<Traits> memory,
                                         int first, int stride)
      : counter_(counter), memory_(memory), stride_(stride), number_(first) {}

  /// By one thread of each CTA, before the blocks of a tile. Nothing waits for the answer here, and
  /// elect_one() elects the same thread for send_index().
  __device__ __forceinline__ void draw() {
    if (counter_ != nullptr && cluster_rank() == 0) drawn_ = atomicAdd(counter_, 1);
  }
  /// By the same thread, later. `tiles`: how many this cluster has had, with this one.
  __device__ __forceinline__ void send_index(unsigned tiles) {
    if (counter_ == nullptr) return;
    const Ring<Traits::kIndexSlots> place{tiles - 1};
    mbarrier_expect(memory_.index_sent(place.slot()), 4);
    if (cluster_rank() != 0) return;
    // What is below 0 or past this, because the counter did not begin with 0, is past the last
    // tile: no operands have so many.
    constexpr unsigned kMost = 1u << 30;
    const int number = static_cast<int>(min(static_cast<unsigned>(drawn_), kMost)) + stride_;
#pragma unroll
    for (int to = 0; to < Traits::kCluster; ++to) {
      store_async(memory_.tile_index(place.slot()), memory_.index_sent(place.slot()), to, number);
    }
  }
  /// By all threads that produce.
  __device__ __forceinline__ int next(unsigned tiles) {
    if constexpr (Traits::kDynamic) {
      if (counter_ != nullptr) {
        const Ring<Traits::kIndexSlots> place{tiles - 1};
        mbarrier_wait(memory_.index_sent(place.slot()), place.phase());
        return uniform(load_shared_word(memory_.tile_index(place.slot())));
      }
    }
    return number_ += stride_;
  }

 private:
  std::int32_t* counter_;
  SharedMemory<Traits> memory_;
  int stride_;
  int number_;     // of the tile, by stride
  int drawn_ = 0;  // by the thread that asks and tells
};

}  // namespace sonicmoe::cuda
