#pragma once

#include <algorithm>
#include <cstddef>

#include "cuda/device/barrier.cuh"
#include "cuda/sm90/traits.cuh"

/// Shared memory of a CTA, and what passes through it: stages and published tiles. grouped_gemm.cuh
/// has the table of barriers.
namespace sonicmoe::cuda {

/// A position in a ring of `kSlots` slots, in one register.
template <int kSlots>
struct Ring {
  unsigned count = 0;
  __device__ __forceinline__ int slot() const { return static_cast<int>(count % kSlots); }
  /// Parity of the rounds completed: what a consumer waits for. A producer waits for the other.
  __device__ __forceinline__ std::uint32_t phase() const { return count / kSlots & 1; }
};

/// A CTA's shared memory. An array of barriers that a kernel has no use for has one slot.
template <class Traits>
struct SharedStorage {
  struct Stage {
    unsigned char a[kABytes];
    unsigned char b[Traits::kTileN * kLineBytes];
  };
  static constexpr int kAEmpty = Traits::kSeparateAEmpty ? Traits::kStages : 1;
  static constexpr int kIndices = std::max(Traits::kIndexSlots, 1);

  Stage stages[Traits::kStages];
  unsigned char staging[kConsumerWarps][Traits::Epilogue::kStagingBytes];
  Tile tiles[Traits::kTileSlots];
  Barrier full[Traits::kStages], empty[Traits::kStages], a_empty[kAEmpty];
  Barrier published[Traits::kTileSlots], consumed[Traits::kTileSlots];
  Barrier turn[2];
  Barrier index_sent[kIndices];
  std::int32_t indices[kIndices];

  static_assert(sizeof(Stage) % kBlockBytes == 0, "a stage must keep the swizzle's alignment");
};

template <class Traits>
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& memory) {
  constexpr int kReaders = Traits::kPingpong ? kConsumerWarps / 2 : kConsumerWarps;
  for (int i = 0; i < Traits::kStages; ++i) {
    memory.full[i].init(1 + (Traits::kGathers ? kProducerThreads : 0));
    memory.empty[i].init(kCluster * kReaders);
    if constexpr (Traits::kSeparateAEmpty) memory.a_empty[i].init(kReaders);
  }
  for (int i = 0; i < Traits::kTileSlots; ++i) {
    memory.published[i].init(1);
    memory.consumed[i].init(32 * kConsumerWarps);
  }
  for (int i = 0; i < Traits::kIndexSlots; ++i) memory.index_sent[i].init(1);
  for (Barrier& turn : memory.turn) turn.init(kConsumerWarps / 2);
  fence_mbarrier_init();
}

/// Called by the producer's first warp, which is ahead of the consumers: publishes their next tile,
/// so that they need no scheduler and none of its registers. Tile::split_n stays with the producer.
template <class Traits>
__device__ __forceinline__ void publish(SharedStorage<Traits>& memory,
                                        Ring<Traits::kTileSlots> tiles, const Tile& tile) {
  static_assert(offsetof(Tile, expert) == 0 && offsetof(Tile, m_block) == 4 &&
                offsetof(Tile, n_block) == 8 && offsetof(Tile, first_row) == 12 &&
                offsetof(Tile, rows) == 16 && alignof(Tile) == 16);
  memory.consumed[tiles.slot()].wait(tiles.phase() ^ 1);
  if (elect_one()) {
    const std::uint32_t to = shared_address(&memory.tiles[tiles.slot()]);
    store_shared(to, tile.expert, tile.m_block, tile.n_block, tile.first_row);
    store_shared_word(to + offsetof(Tile, rows), tile.rows);
    memory.published[tiles.slot()].arrive();
  }
  __syncwarp();
}

/// Called by all consumer threads: the next published tile. Every lane arrives, since to racecheck
/// one lane's arrival says nothing about the reads of the others.
template <class Traits>
__device__ __forceinline__ Tile next_tile(SharedStorage<Traits>& memory,
                                          Ring<Traits::kTileSlots>& tiles) {
  memory.published[tiles.slot()].wait(tiles.phase());
  const std::uint32_t from = shared_address(&memory.tiles[tiles.slot()]);
  const uint4 head = load_shared(from);
  const Tile tile = {static_cast<int>(head.x), static_cast<int>(head.y), static_cast<int>(head.z),
                     static_cast<int>(head.w), load_shared_word(from + offsetof(Tile, rows))};
  memory.consumed[tiles.slot()].arrive();
  ++tiles.count;
  return tile;
}

/// Called by a warp whose products have read a stage: it arrives in both CTAs, since either writes
/// half of the other's B. An arrival need not order reads by wgmma, which have ended.
template <class Traits>
__device__ __forceinline__ void release(SharedStorage<Traits>& memory, int stage) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane < kCluster) memory.empty[stage].arrive_at(lane);
  if constexpr (Traits::kSeparateAEmpty) {
    if (lane == kCluster) memory.a_empty[stage].arrive();
  }
}

/// The stages of the ring behind a tile's k blocks, which belong to its epilogue. The epilogue
/// reads what its load() brought there, stores from there, and releases all but the last stage. The
/// kernel releases that one beside the next tile's first products.
template <class Traits>
class EpilogueStages {
 public:
  __device__ __forceinline__ EpilogueStages(SharedStorage<Traits>& memory, unsigned first)
      : memory_(memory), first_(first) {}

  /// Offset in a stage of part 0 or 1, each kTileM rows x 64 columns. The parts lie behind the
  /// place of operand A where the stage has room for both; else part 1 takes A's place.
  static constexpr int part(int i) {
    constexpr int kStageBytes = sizeof(typename SharedStorage<Traits>::Stage);
    static_assert(kStageBytes >= 2 * kABytes);
    const int at = (1 + i) * kABytes;
    return at + kABytes <= kStageBytes ? at : 0;
  }
  /// Address of stage `i`, once it is full.
  __device__ __forceinline__ std::uint32_t wait(int i) const {
    memory_.full[ring(i).slot()].wait(ring(i).phase());
    return shared_address(&memory_.stages[ring(i).slot()]);
  }
  /// Called by a warp that has read stage `i`, after the copy engine has read what leaves from
  /// there. Unlike after products, the warp itself has accessed the stage. So the arrival in this
  /// CTA is a local one, which orders those accesses before the next loads.
  __device__ __forceinline__ void release(int i) const {
    Barrier& empty = memory_.empty[ring(i).slot()];
    const unsigned lane = threadIdx.x % 32;
    if (lane == cluster_rank()) {
      empty.arrive();
    } else if (lane < kCluster) {
      empty.arrive_at(static_cast<int>(lane));
    }
  }

 private:
  __device__ __forceinline__ Ring<Traits::kStages> ring(int i) const { return {first_ + i}; }
  SharedStorage<Traits>& memory_;
  unsigned first_;
};

}  // namespace sonicmoe::cuda
