#pragma once

#include "cuda/sm90/pipeline.cuh"

/// Which tile a cluster computes next.
namespace sonicmoe::cuda {

/// The tiles of all experts by index, for one CTA of a cluster. Each producer warp derives them
/// from the experts' rows in device memory; its 32 lanes hold a window of 32 experts.
///
/// Experts ascend; where rows are K they may come in Extents::expert_order. A cluster tile is a
/// pair of m blocks and one n block. Inside an expert, groups of kGroup pairs come one after the
/// other. In a group all pairs of an n block come before the next n block, so that neighbouring
/// clusters find each other's operands in L2.
///
/// Where rows are M, an expert with an odd number of m blocks leaves the last one without a
/// neighbour. There the CTAs split along n: both take that m block, each an n block of its own. If
/// the number of n blocks is odd, too, the second CTA gets a tile without rows. If there is one n
/// block, they do not split, and the second CTA's m block lies past the expert's last row.
template <bool kRowsAreM>
class TileWalk {
 public:
  __device__ __forceinline__ TileWalk(const Extents& extents, int m_extent)
      : extents_(extents), m_extent_(m_extent) {
    load_window();
  }

  /// The tile with `index` for the CTA of this rank; false past the last. The whole warp calls, and
  /// no index is less than the one before.
  __device__ __forceinline__ bool find(int index, int rank, Tile* tile) {
    while (true) {
      const int total = __shfl_sync(~0u, through_, 31);
      if (index < start_ + total) break;
      window_ += 32;
      if (window_ >= extents_.experts) return false;
      start_ += total;
      load_window();
    }
    const int inside = index - start_;
    const int lane = __popc(__ballot_sync(~0u, through_ <= inside));
    tile->expert = kRowsAreM ? window_ + lane : __shfl_sync(~0u, expert_, lane);
    tile->first_row = __shfl_sync(~0u, first_row_, lane);
    tile->rows = __shfl_sync(~0u, count_, lane);
    const int before = __shfl_sync(~0u, through_, lane == 0 ? 0 : lane - 1);
    const int local = inside - (lane == 0 ? 0 : before);
    const int m_blocks = m_blocks_of(tile->rows);
    const int n_blocks = extents_.n_blocks;
    const int pairs = splits(m_blocks) ? m_blocks / kCluster : (m_blocks + 1) / kCluster;
    tile->split_n = local >= pairs * n_blocks;
    if (tile->split_n) {
      tile->m_block = m_blocks - 1;
      tile->n_block = (local - pairs * n_blocks) * kCluster + rank;
      if (tile->n_block >= n_blocks) tile->rows = 0;
      return true;
    }
    const int group = local / (kGroup * n_blocks);
    const int in_group = local - group * (kGroup * n_blocks);
    const int size = min(kGroup, pairs - group * kGroup);
    tile->n_block = in_group / size;
    const int pair = group * kGroup + in_group - tile->n_block * size;
    tile->m_block = pair * kCluster + rank;
    return true;
  }

 private:
  static constexpr int kGroup = 8;
  static_assert(kCluster == 2, "pairs");

  __device__ __forceinline__ int m_blocks_of(int rows) const {
    return ((kRowsAreM ? rows : m_extent_) + kTileM - 1) / kTileM;
  }
  /// Do the CTAs split the last of so many m blocks along n?
  __device__ __forceinline__ bool splits(int m_blocks) const {
    return kRowsAreM && m_blocks % kCluster != 0 && extents_.n_blocks > 1;
  }
  __device__ __forceinline__ int cluster_tiles(int rows) const {
    const int m_blocks = m_blocks_of(rows), n_blocks = extents_.n_blocks;
    if (!splits(m_blocks)) return (m_blocks + 1) / kCluster * n_blocks;
    return m_blocks / kCluster * n_blocks + (n_blocks + 1) / kCluster;
  }

  /// Lane i takes the expert at place window_ + i.
  __device__ __forceinline__ void load_window() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int expert = window_ + lane;
    if constexpr (!kRowsAreM) {
      const bool ordered = extents_.expert_order != nullptr && expert < extents_.experts;
      if (ordered) expert = extents_.expert_order[expert];
      if (expert < 0) expert = extents_.experts;  // no expert: no tiles
      expert_ = expert;
    }
    first_row_ = 0;
    count_ = 0;
    through_ = 0;
    if (expert < extents_.experts) {
      if (extents_.begins != nullptr) {
        first_row_ = extents_.begins[expert];
        count_ = extents_.ends[expert] - first_row_;
      } else {
        first_row_ = min(expert * extents_.part_rows, extents_.rows);
        count_ = min(extents_.part_rows, extents_.rows - first_row_);
      }
      through_ = cluster_tiles(count_);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, through_, step);
      if (lane >= step) through_ += other;
    }
  }

  const Extents& extents_;
  int m_extent_;
  int window_ = 0, start_ = 0;      // first place and first tile index of the window
  int expert_, first_row_, count_;  // of this lane's expert
  int through_;                     // cluster tiles of the window through this lane's expert
};

/// Hands tiles to clusters. Static scheduling: each cluster takes every clusters()-th index.
/// Dynamic scheduling: a free cluster draws the next index from a counter, so that no cluster falls
/// behind and misses operands in L2 (docs/findings/dealing.md). CTA 0 draws while a tile is loaded
/// and sends the index to both CTAs, into more slots than a CTA can be tiles ahead of its peer. A
/// cluster does not draw its first tile. It ends when it draws an index past the last tile.
template <class Traits>
class TileScheduler {
 public:
  /// The k block, from 0, at which an index is sent. launch_scheduled() asserts that tiles have it.
  static constexpr int kSendAt = 3;

  __device__ __forceinline__ TileScheduler(const GemmParams& p, SharedStorage<Traits>& memory)
      : p_(p.scheduling),
        memory_(memory),
        walk_(p.extents, /*m_extent, where rows are K*/ p.a.width),
        index_(static_cast<int>(blockIdx.x) / kCluster) {}

  /// The cluster's first tile; false if there is none. With kSpreadsStarts, clusters start one
  /// after the other, so that they do not all load and all store at a time
  /// (docs/findings/archive/start-spread.md).
  __device__ __forceinline__ bool first(Tile* tile) {
    const bool found = walk_.find(index_, rank(), tile);
    if constexpr (Traits::kSpreadsStarts) {
      wait_cycles(index_ * p_.start_spread / clusters());
    }
    return found;
  }
  /// Called by all producer threads after the blocks of `tiles` tiles: the next one, or false.
  __device__ __forceinline__ bool next(unsigned tiles, Tile* tile) {
    return walk_.find(next_index(tiles), rank(), tile);
  }

  /// Called by one thread of each CTA before the blocks of a tile; the one of CTA 0 draws. Nothing
  /// waits for the counter here. elect_one() elects the same thread for send_index().
  __device__ __forceinline__ void draw() {
    if (p_.tile_counter != nullptr && rank() == 0) drawn_ = atomicAdd(p_.tile_counter, 1);
  }
  /// Called by the same threads at block kSendAt of tile number `tiles`, counted from 1. Each
  /// expects the index in its own CTA; the one of CTA 0 sends it to both.
  __device__ __forceinline__ void send_index(unsigned tiles) {
    if (p_.tile_counter == nullptr) return;
    const int slot = Ring<Traits::kIndexSlots>{tiles - 1}.slot();
    memory_.index_sent[slot].expect(sizeof(std::int32_t));
    if (rank() != 0) return;
    // Numbers below 0 or past kMost, from a counter that did not begin with 0, become an index past
    // the last tile: no operands have so many tiles.
    constexpr unsigned kMost = 1u << 30;
    const int index = static_cast<int>(min(static_cast<unsigned>(drawn_), kMost)) + clusters();
#pragma unroll
    for (int to = 0; to < kCluster; ++to) {
      store_async(shared_address(&memory_.indices[slot]), memory_.index_sent[slot].address(), to,
                  index);
    }
  }

 private:
  static __device__ __forceinline__ int rank() { return static_cast<int>(cluster_rank()); }
  static __device__ __forceinline__ int clusters() {
    return static_cast<int>(gridDim.x) / kCluster;
  }
  __device__ __forceinline__ int next_index(unsigned tiles) {
    if constexpr (Traits::kDynamic) {
      if (p_.tile_counter != nullptr) {
        const Ring<Traits::kIndexSlots> at{tiles - 1};
        memory_.index_sent[at.slot()].wait(at.phase());
        return uniform(load_shared_word(shared_address(&memory_.indices[at.slot()])));
      }
    }
    return index_ += clusters();
  }

  const Scheduling& p_;
  SharedStorage<Traits>& memory_;
  TileWalk<Traits::kRowsAreM> walk_;
  int index_;      // of the tile, with static scheduling
  int drawn_ = 0;  // of the thread that draws
};

}  // namespace sonicmoe::cuda
