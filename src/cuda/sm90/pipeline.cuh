#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/sm90/traits.cuh"

/// The ring of stages.
namespace sonicmoe::cuda {

/// A position in a ring of `kSlots`: one register.
template <int kSlots>
struct Ring {
  unsigned count = 0;
  __device__ __forceinline__ int slot() const { return static_cast<int>(count % kSlots); }
  /// Parity of the rounds gone.
  __device__ __forceinline__ std::uint32_t phase() const { return count / kSlots & 1; }
};

/// Shared memory: stages, the epilogue's part of each consumer warp, announced tiles, barriers.
template <class Traits>
struct SharedMemory {
  std::uint32_t base;
  __device__ __forceinline__ std::uint32_t a(int stage) const {
    return base + stage * Traits::kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t b(int stage) const { return a(stage) + kABytes; }
  __device__ __forceinline__ std::uint32_t warp(int consumer_warp) const {
    return base + Traits::kStages * Traits::kStageBytes + consumer_warp * Traits::kStagingBytes;
  }
  __device__ __forceinline__ std::uint32_t tile(int slot) const {
    return warp(8) + slot * static_cast<int>(sizeof(Tile));
  }
  __device__ __forceinline__ std::uint32_t barrier(int i) const {
    return tile(Traits::kTileSlots) + i * 8;
  }
  __device__ __forceinline__ std::uint32_t full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ std::uint32_t empty(int stage) const {
    return barrier(Traits::kStages + stage);
  }
  __device__ __forceinline__ std::uint32_t published(int slot) const {
    return barrier(2 * Traits::kStages + slot);
  }
  __device__ __forceinline__ std::uint32_t consumed(int slot) const {
    return barrier(2 * Traits::kStages + Traits::kTileSlots + slot);
  }
  __device__ __forceinline__ std::uint32_t order(int consumer) const {
    return barrier(2 * Traits::kStages + 2 * Traits::kTileSlots + consumer);
  }
  __device__ __forceinline__ std::uint32_t a_empty(int stage) const {
    return barrier(2 * Traits::kStages + 2 * Traits::kTileSlots + 2 + stage);
  }
  __device__ __forceinline__ std::uint32_t index_sent(int slot) const {
    return barrier(Traits::kBarriers - Traits::kIndexSlots + slot);
  }
  __device__ __forceinline__ std::uint32_t tile_index(int slot) const {
    return barrier(Traits::kBarriers) + slot * 4;
  }
};

/// Tells the consumers which tile comes next; a negative expert ends the work. By the first warp of
/// the producer, which walks ahead of them. They need no walk of their own, and its registers.
template <class Traits>
__device__ __forceinline__ void publish(SharedMemory<Traits> memory, Ring<Traits::kTileSlots> tiles,
                                        const Tile& tile) {
  mbarrier_wait(memory.consumed(tiles.slot()), tiles.phase() ^ 1);
  if (elect_one()) {
    const std::uint32_t at = memory.tile(tiles.slot());
    asm volatile(
        "st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n"
        "st.shared.b32 [%0 + 16], %5;" ::"r"(at),
        "r"(tile.expert), "r"(tile.m_block), "r"(tile.n_block), "r"(tile.first_row), "r"(tile.rows)
        : "memory");
    mbarrier_arrive(memory.published(tiles.slot()));
  }
  __syncwarp();
}

/// The next tile, as each lane has read it. Every lane says that it has: for racecheck, to which
/// the arrival of one says nothing about the others of its warp.
template <class Traits>
__device__ __forceinline__ Tile next_tile(SharedMemory<Traits> memory,
                                          Ring<Traits::kTileSlots>& tiles) {
  mbarrier_wait(memory.published(tiles.slot()), tiles.phase());
  const std::uint32_t at = memory.tile(tiles.slot());
  Tile tile{};
  asm volatile(
      "ld.shared.v4.b32 {%0, %1, %2, %3}, [%5];\n"
      "ld.shared.b32 %4, [%5 + 16];"
      : "=r"(tile.expert), "=r"(tile.m_block), "=r"(tile.n_block), "=r"(tile.first_row),
        "=r"(tile.rows)
      : "r"(at)
      : "memory");
  mbarrier_arrive(memory.consumed(tiles.slot()));
  ++tiles.count;
  return tile;
}

/// This warp has read the stage, its own and the peer's copy of the shared operand alike.
template <class Traits>
__device__ __forceinline__ void release(SharedMemory<Traits> memory, int stage) {
  const unsigned lane = threadIdx.x % 32;
  if (lane < Traits::kCluster) mbarrier_arrive_at(memory.empty(stage), lane);
  if constexpr (Traits::kSeparateAEmpty) {
    if (lane == Traits::kCluster) mbarrier_arrive(memory.a_empty(stage));
  }
}

/// The stages after those of a tile's k blocks, which belong to its epilogue: for what it reads,
/// and to store from. It waits for each, in order, and gives back all but the last, which goes back
/// during the next tile.
template <class Traits>
class EpilogueStages {
 public:
  __device__ __forceinline__ EpilogueStages(SharedMemory<Traits> memory,
                                            const Ring<Traits::kStages>& pipe)
      : memory_(memory), first_(pipe) {}

  /// Where part 0 or 1 of a tile's rows x 64 columns lies in a stage: away from the gathered
  /// operand where there is room, else the second in its place.
  static constexpr int place(int part) {
    static_assert(Traits::kStageBytes >= 2 * kABytes);
    const int at = (1 + part) * kABytes;
    return at + kABytes <= Traits::kStageBytes ? at : 0;
  }

  /// Address of stage `block`, once it is there.
  __device__ __forceinline__ std::uint32_t wait(int block) const {
    const Ring<Traits::kStages> at = ring(block);
    mbarrier_wait(memory_.full(at.slot()), at.phase());
    return memory_.a(at.slot());
  }
  /// This warp has read stage `block`, or the copy engine has what it stored from there. Like
  /// release(), but the arrival on our own barrier is a local one: threads that read and wrote the
  /// stage themselves are followed in this CTA by threads that fill it.
  __device__ __forceinline__ void give_back(int block) const {
    const std::uint32_t empty = memory_.empty(ring(block).slot());
    const unsigned lane = threadIdx.x % 32;
    if (lane == cluster_rank()) {
      mbarrier_arrive(empty);
    } else if (lane < Traits::kCluster) {
      mbarrier_arrive_at(empty, lane);
    }
  }

 private:
  __device__ __forceinline__ Ring<Traits::kStages> ring(int block) const {
    return {first_.count + block};
  }
  SharedMemory<Traits> memory_;
  Ring<Traits::kStages> first_;
};

}  // namespace sonicmoe::cuda
