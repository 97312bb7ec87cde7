#pragma once

#include <climits>

#include "cuda/device/wgmma.cuh"
#include "cuda/sm90/pipeline.cuh"

/// Loads and products of a tile.
namespace sonicmoe::cuda {

/// An expert without rows has a block of zeros: its gradient is written, too.
template <class Traits>
__device__ __forceinline__ int k_blocks(const GemmParams& p, const Tile& tile) {
  if constexpr (Traits::kRows) return p.k_blocks;
  return max(1, static_cast<int>((static_cast<unsigned>(tile.rows) + kTileK - 1) / kTileK));
}

/// What a CTA loads of the operand that it shares: its half, for both CTAs, or everything, for
/// itself, where they are apart.
struct Share {
  int rank;
  bool split_n;
  __device__ __forceinline__ bool loads(int half) const { return split_n || half == rank; }
  __device__ __forceinline__ std::uint16_t mask() const { return split_n ? 1 << rank : 3; }
};

/// The shared operand where K is contiguous: two boxes of {64 k, kTileN/2 rows}. Box i starts at
/// row rows[i] of map i.
template <int kTileN>
__device__ __forceinline__ void load_b_k(std::uint32_t stage, std::uint32_t barrier,
                                         const Share& share, const CUtensorMap* const (&maps)[2],
                                         const int (&rows)[2], int k, int expert) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!share.loads(i)) continue;
    load_box_multicast(stage + i * (kTileN / 2 * kLineBytes), maps[i], barrier, share.mask(), k,
                       rows[i], expert);
  }
}

/// The shared operand where its own axis is contiguous: chunks of 64 columns, each of two boxes of
/// {64 columns, 32 k}. In place of chunks past the one at column `last` that one comes again: of
/// zeros, which the copy engine fills in past an end, all multiprocessors together get some 700
/// GB/s (docs/findings/past-the-end.md).
template <int kTileN>
__device__ __forceinline__ void load_b_n(std::uint32_t stage, std::uint32_t barrier,
                                         const Share& share, const CUtensorMap* map, int column,
                                         int last, int k, int expert) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!share.loads(i)) continue;
#pragma unroll
    for (int chunk = 0; chunk < kTileN / 64; ++chunk) {
      load_box_multicast(stage + chunk * kChunkBytes + i * (kChunkBytes / 2), map, barrier,
                         share.mask(), min(column + chunk * 64, last), k + i * 32, expert);
    }
  }
}

/// The bulk copies of one stage, by one thread.
template <class Traits>
__device__ __forceinline__ void load_boxes(const GemmParams& p, const Tile& tile, int block,
                                           std::uint32_t own, std::uint32_t shared,
                                           std::uint32_t full, int rank) {
  constexpr int kTileN = Traits::kTileN;
  // An expert without rows: its gradient comes from zeros, which zero_tail() writes.
  if (!Traits::kRows && tile.rows == 0) return mbarrier_arrive(full);
  // Who has too few registers asks for the rank again.
  if constexpr (!Traits::kGathers || Traits::kDynamic) rank = static_cast<int>(cluster_rank());
  const Share share{rank, Traits::kRows && tile.split_n != 0};
  constexpr int kOwnBox = Traits::kGathers ? 0 : kABytes;
  mbarrier_expect(full, kTileN * kLineBytes + kOwnBox);
  if constexpr (Traits::kRows) {
    const int half = block >= p.k_half;
    const int k = (block - half * p.k_half) * kTileK;
    if constexpr (Traits::kBMajor == Major::k) {
      const CUtensorMap* const maps[2] = {&p.b_maps[0], &p.b_maps[1]};
      const int first = tile.n_block * (p.paired ? kTileN / 2 : kTileN);
      load_b_k<kTileN>(shared, full, share, maps, {first, first + (p.paired ? 0 : kTileN / 2)}, k,
                       tile.expert);
    } else {
      load_b_n<kTileN>(shared, full, share, &p.b_maps[half], tile.n_block * kTileN, p.n_last_chunk,
                       k, tile.expert);
    }
    if constexpr (!Traits::kGathers) {
      load_box(own, &p.a_maps[half], full, k, tile.first_row + tile.m_block * kTileM, 0);
    }
  } else {
    const int half = tile.n_block >= p.n_half;
    // Zeros past the end come here: to look for it costs 0.3 to 4 % where no tile reaches past it
    // (docs/findings/past-the-end.md).
    constexpr int kNoLast = INT_MAX;
    load_b_n<kTileN>(shared, full, share, &p.b_maps[half],
                     (tile.n_block - half * p.n_half) * kTileN, kNoLast,
                     tile.first_row + block * kTileK, 0);
    if constexpr (!Traits::kGathers) {
#pragma unroll
      for (int chunk = 0; chunk < kTileM / 64; ++chunk) {
        load_box(own + chunk * kChunkBytes, &p.a_maps[0], full, tile.m_block * kTileM + chunk * 64,
                 tile.first_row + block * kTileK, 0);
      }
    }
  }
}

/// Rows that a step of the products takes.
inline constexpr int kStepRows = 16;

/// The last k block of an expert has rows of other experts in its multicast operand, and zero times
/// their NaN would be NaN: zero those lines, as far as the last step goes. The gathered operand
/// came with zeros there.
template <class Traits>
__device__ __forceinline__ void zero_tail(SharedMemory<Traits> memory, int stage, int valid) {
  const int t = static_cast<int>(threadIdx.x) - 128;
  const int lines = max(1, (valid + kStepRows - 1) / kStepRows) * kStepRows - valid;
  if (lines == 0) return;
  constexpr int kPieces = Traits::kTileN / 64 * 8;  // 16-byte pieces of one k
  for (int i = t; i < lines * kPieces; i += 256) {
    const int line = valid + i / kPieces;
    const std::uint32_t at =
        memory.b(stage) + i % kPieces / 8 * kChunkBytes + line * kLineBytes + i % 8 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  fence_async_proxy();
  named_barrier(1, 256);
}

/// Keeps the pipeline going through a tile of which this warpgroup's part has no rows. Its last
/// epilogue block is seen full too, and goes back when the next tile begins, as always.
template <class Traits>
__device__ __forceinline__ void pass(SharedMemory<Traits> memory, Ring<Traits::kStages>& pipe,
                                     int blocks) {
#pragma unroll 1  // unrolled, it takes registers from all of the kernel
  for (int block = 0; block < blocks; ++block, ++pipe.count) {
    mbarrier_wait(memory.full(pipe.slot()), pipe.phase());
    const bool last = Traits::kEpilogueStages > 0 && block + 1 == blocks;
    if (!last) release(memory, pipe.slot());
  }
}

/// acc = the products of all k blocks of a tile, added to what is there if the epilogue says so.
/// Calls during() beside those of the first, send() beside those of each in the loop, and issued()
/// when the last are on their way.
template <class Traits, class During, class Send, class Issued>
__device__ __forceinline__ void multiply(SharedMemory<Traits> memory, Ring<Traits::kStages>& pipe,
                                         int blocks, int rows, int m_first,
                                         float (&acc)[Traits::kM64][Traits::kTileN / 2],
                                         During&& during, Send&& send, Issued&& issued) {
  constexpr Major kMajorA = Traits::kAMajor;
  constexpr Major kMajorB = Traits::kBMajor;
  const std::uint32_t first_a =
      descriptor<kMajorA>(memory.a(0) + m_first * kChunkBytes, kChunkBytes);
  const std::uint32_t first_b = descriptor<kMajorB>(memory.b(0), kChunkBytes);
  const auto pin_all = [&] {
#pragma unroll
    for (int m = 0; m < Traits::kM64; ++m) pin(acc[m]);
  };
  const auto stage_offset = [&] {
    return static_cast<std::uint32_t>(pipe.slot() * (Traits::kStageBytes >> 4));
  };
  // `later`: 0 for the first step of a tile.
  const auto step = [&](std::uint32_t a, std::uint32_t b, int later) {
#pragma unroll
    for (int m = 0; m < Traits::kM64; ++m) {
      wgmma<typename Traits::T, Traits::kTileN, kMajorA, kMajorB>(
          acc[m], a + m * (kChunkBytes >> 4), b, Traits::Epilogue::kAdds ? 1 : later);
    }
  };
  // Contractions: the last block need not have all its rows.
  const int whole = Traits::kRows ? blocks : static_cast<int>(static_cast<unsigned>(rows) / kTileK);

  int previous = -1;
  const auto whole_block = [&](int block, auto later) {
    mbarrier_wait(memory.full(pipe.slot()), pipe.phase());
    // The gathered operand was written through the generic proxy; we have acquired those writes
    // and pass them on to wgmma, which reads through the async proxy.
    if constexpr (Traits::kGathers) fence_async_proxy();
    const std::uint32_t at = stage_offset();
    pin_all();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileK / kStepRows; ++i) {
      step(first_a + at + i * kStepK16<kMajorA>, first_b + at + i * kStepK16<kMajorB>,
           i > 0 ? 1 : static_cast<int>(later));
    }
    wgmma_commit();
    pin_all();
    if (block == 0) during();
    // In the loop: another copy of its code beside the first block gains nothing.
    if constexpr (std::is_same_v<decltype(later), int>) send();
    // A stage goes back once the next block is being multiplied.
    wgmma_wait<1>();
    if (previous >= 0) release(memory, previous);
    previous = pipe.slot();
    ++pipe.count;
  };
  int block = 0;
  if constexpr (Traits::kRows) whole_block(block++, std::integral_constant<int, 0>{});
  for (; block < whole; ++block) whole_block(block, Traits::kRows ? 1 : block);
  if constexpr (!Traits::kRows) {
    if (whole < blocks) {
      mbarrier_wait(memory.full(pipe.slot()), pipe.phase());
      const int valid = rows - whole * kTileK;
      zero_tail(memory, pipe.slot(), valid);
      if constexpr (Traits::kGathers) fence_async_proxy();
      std::uint32_t a = first_a + stage_offset(), b = first_b + stage_offset();
      int later = whole;
      int left = valid;
#pragma unroll 1
      do {
        pin_all();
        wgmma_fence();
        step(a, b, later);
        wgmma_commit();
        pin_all();
        later = 1;
        a += kStepK16<kMajorA>;
        b += kStepK16<kMajorB>;
        left -= kStepRows;
      } while (left > 0);
      if (whole == 0) during();
      wgmma_wait<1>();
      if (previous >= 0) release(memory, previous);
      previous = pipe.slot();
      ++pipe.count;
    }
  }
  issued();
  wgmma_wait<0>();
  pin_all();
  release(memory, previous);
}

}  // namespace sonicmoe::cuda
