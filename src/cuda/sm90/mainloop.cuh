#pragma once

#include "cuda/device/wgmma.cuh"
#include "cuda/sm90/boxes.cuh"
#include "cuda/sm90/gather_k.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/rows_are_k.cuh"

/// The main loop of a tile: loads of its k blocks, and their products.
namespace sonicmoe::cuda {

/// k blocks of a tile. Where rows are K, an expert without rows has one block of zeros, so that its
/// gradient is written, too.
template <class Traits>
__device__ __forceinline__ int k_blocks(const GemmParams& p, const Tile& tile) {
  if constexpr (Traits::kRowsAreM) return p.extents.k_blocks;
  return max(1, static_cast<int>((static_cast<unsigned>(tile.rows) + kTileK - 1) / kTileK));
}

/// Called by the producer's threads: k block `block` into the next stage. A gather along K does not
/// wait for the peer, and begins before the boxes, since it takes longest.
template <class Traits>
__device__ __forceinline__ void load(const GemmParams& p, const Tile& tile, int block,
                                     GatherOf<Traits>& gather, SharedStorage<Traits>& memory,
                                     const Ring<Traits::kStages>& pipe, bool leader_warp) {
  const int stage = pipe.slot();
  const std::uint32_t free = pipe.phase() ^ 1;
  const auto gather_a = [&] {
    gather.load(shared_address(memory.stages[stage].a), block);
    copy_async_arrive(memory.full[stage].address());
  };
  if constexpr (Traits::kSeparateAEmpty) {
    memory.a_empty[stage].wait(free);
    gather_a();
  }
  if (!Traits::kSeparateAEmpty || leader_warp) memory.empty[stage].wait(free);
  if (leader_warp && elect_one()) load_boxes(p, tile, block, memory, stage);
  __syncwarp();
  if constexpr (Traits::kGathers && !Traits::kSeparateAEmpty) gather_a();
}

/// Passes over `stages` stages of a tile in which this warpgroup has no rows. The last epilogue
/// stage goes back when the next tile begins, as after other tiles.
template <class Traits>
__device__ __forceinline__ void skip(SharedStorage<Traits>& memory, Ring<Traits::kStages>& pipe,
                                     int stages) {
#pragma unroll 1  // unrolled, it takes registers from all of the kernel
  for (int i = 0; i < stages; ++i, ++pipe.count) {
    memory.full[pipe.slot()].wait(pipe.phase());
    const bool last = Traits::kEpilogueStages > 0 && i + 1 == stages;
    if (!last) release(memory, pipe.slot());
  }
}

inline constexpr int kAddUpBlocks = 4;  ///< k blocks of a sum of tensor cores: 256 elements

/// acc = the products of a tile's k blocks, or acc += with Epilogue::kAdds. Calls during() beside
/// the first block's products and issued() when the last are issued. Calls send() beside each whole
/// block's; where rows are M, not beside the first block's. epilogue.cuh says when it calls
/// run.add_up().
template <class Traits, class Run, class During, class Send, class Issued>
__device__ __forceinline__ void multiply(SharedStorage<Traits>& memory, Ring<Traits::kStages>& pipe,
                                         int blocks, int rows, int m_first,
                                         float (&acc)[Traits::kM64][Traits::kTileN / 2], Run& run,
                                         During&& during, Send&& send, Issued&& issued) {
  constexpr Major kMajorA = Traits::kAMajor, kMajorB = Traits::kBMajor;
  constexpr int kStageBytes = sizeof(typename SharedStorage<Traits>::Stage);
  // Descriptors count 16 bytes.
  const std::uint32_t first_a =
      descriptor<kMajorA>(shared_address(memory.stages[0].a) + m_first * kChunkBytes, kChunkBytes);
  const std::uint32_t first_b =
      descriptor<kMajorB>(shared_address(memory.stages[0].b), kChunkBytes);
  const auto stage_offset = [&] {
    return static_cast<std::uint32_t>(pipe.slot() * (kStageBytes >> 4));
  };
  const auto pin_all = [&] {
#pragma unroll
    for (int m = 0; m < Traits::kM64; ++m) pin(acc[m]);
  };
  // One step of K. `adds`: 0 in the first of a tile, which overwrites.
  const auto step = [&](std::uint32_t a, std::uint32_t b, int adds) {
#pragma unroll
    for (int m = 0; m < Traits::kM64; ++m) {
      wgmma<typename Traits::T, Traits::kTileN, kMajorA, kMajorB>(
          acc[m], a + m * (kChunkBytes >> 4), b, Traits::Epilogue::kAdds ? 1 : adds);
    }
  };
  // Where rows are K, the last block need not have all its rows.
  const int whole =
      Traits::kRowsAreM ? blocks : static_cast<int>(static_cast<unsigned>(rows) / kTileK);

  int previous = -1;
  // Once this block is issued and the one before has ended, the stage of that one goes back.
  const auto release_previous = [&] {
    wgmma_wait<1>();
    if (previous >= 0) release(memory, previous);
    previous = pipe.slot();
    ++pipe.count;
  };
  const auto whole_block = [&](int block, auto adds) {
    memory.full[pipe.slot()].wait(pipe.phase());
    // cp.async wrote A through the generic proxy, and wgmma reads through the async proxy. The
    // barrier gave this thread those writes; the fence passes them on.
    if constexpr (Traits::kGathers) fence_async_proxy();
    const std::uint32_t at = stage_offset();
    pin_all();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileK / kStepK; ++i) {
      step(first_a + at + i * kStepK16<kMajorA>, first_b + at + i * kStepK16<kMajorB>,
           i > 0 ? 1 : static_cast<int>(adds));
    }
    wgmma_commit();
    pin_all();
    if (block == 0) during();
    // Where rows are M the first block is code of its own: a second copy of send() gains nothing.
    constexpr bool kFirst = !std::is_same_v<decltype(adds), int>;
    if constexpr (!kFirst) send();
    release_previous();
  };
  int block = 0;
  if constexpr (Traits::kRowsAreM) whole_block(block++, std::integral_constant<int, 0>{});
  for (; block < whole; ++block) {
    whole_block(block, Traits::kRowsAreM ? 1 : block);
    if constexpr (requires { run.add_up(acc); }) {
      if (block % kAddUpBlocks != kAddUpBlocks - 1) continue;
      wgmma_wait<0>();
      pin_all();
      run.add_up(acc);
    }
  }
  if constexpr (!Traits::kRowsAreM) {
    if (whole < blocks) {
      memory.full[pipe.slot()].wait(pipe.phase());
      const int left = rows - whole * kTileK;
      zero_past_end(memory, pipe.slot(), left);
      if constexpr (Traits::kGathers) fence_async_proxy();
      multiply_tail<kMajorA, kMajorB>(first_a + stage_offset(), first_b + stage_offset(), whole,
                                      left, step, pin_all);
      if (whole == 0) during();
      release_previous();
    }
  }
  issued();
  wgmma_wait<0>();
  pin_all();
  release(memory, previous);
}

}  // namespace sonicmoe::cuda
