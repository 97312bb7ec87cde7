#pragma once

#include <climits>

#include "cuda/device/wgmma.cuh"
#include "cuda/sm90/boxes.cuh"

/// What is different where rows are K, in the weight gradients: an expert's last k block may have
/// fewer than kTileK rows, or none.
namespace sonicmoe::cuda {

/// Called by one producer thread: the copy engine's part of k block `block`.
template <class Traits>
requires(!Traits::kRowsAreM) __device__ __forceinline__
    void load_boxes(const GemmParams& p, const Tile& tile, int block, SharedStorage<Traits>& memory,
                    int stage) {
  constexpr int kTileN = Traits::kTileN;
  Barrier& full = memory.full[stage];
  // An expert without rows: zero_past_end() writes the zeros that its gradient comes from.
  if (tile.rows == 0) return full.arrive();
  const BShare share{static_cast<int>(cluster_rank()), false};
  full.expect(kTileN * kLineBytes + (Traits::kGathers ? 0 : kABytes));
  const int half = tile.n_block >= p.extents.n_half;
  const int column = (tile.n_block - half * p.extents.n_half) * kTileN;
  const int row = tile.first_row + block * kTileK;
  // Chunks past the end load zeros here: where no tile reaches past the end, a limit costs 0.2 % of
  // wide tiles and 3 % of narrow ones (docs/findings/archive/past-the-end.md).
  load_b_n<kTileN>(shared_address(memory.stages[stage].b), full, share, &p.b.maps[half], column,
                   INT_MAX, row, 0);
  if constexpr (!Traits::kGathers) {
#pragma unroll
    for (int chunk = 0; chunk < kTileM / 64; ++chunk) {
      load_box(shared_address(memory.stages[stage].a) + chunk * kChunkBytes, &p.a.maps[0],
               full.address(), tile.m_block * kTileM + chunk * 64, row, 0);
    }
  }
}

/// The last block of an expert holds rows of other experts, or rows that no expert owns, and zero
/// times their NaN would be NaN. All consumer threads zero those lines as far as the last step
/// goes: of both operands, or of B where a gather has left zeros in A.
template <class Traits>
__device__ __forceinline__ void zero_past_end(SharedStorage<Traits>& memory, int stage, int valid) {
  const int t = static_cast<int>(threadIdx.x) - kProducerThreads;
  const int lines = max(1, (valid + kStepK - 1) / kStepK) * kStepK - valid;
  if (lines == 0) return;
  // B lies behind A, and both hold chunks of 64 columns.
  const std::uint32_t first =
      shared_address(Traits::kGathers ? memory.stages[stage].b : memory.stages[stage].a);
  constexpr int kColumns = Traits::kTileN + (Traits::kGathers ? 0 : kTileM);
  constexpr int kPieces = kColumns / 64 * 8;  // 16-byte pieces of one k
  for (int i = t; i < lines * kPieces; i += 32 * kConsumerWarps) {
    const int line = valid + i / kPieces;
    const std::uint32_t at = first + i % kPieces / 8 * kChunkBytes + line * kLineBytes + i % 8 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  // Each thread makes its zeros visible to wgmma; past the barrier all have.
  fence_async_proxy();
  named_barrier(1, 32 * kConsumerWarps);
}

/// The products of a last block with `rows` rows, at most kTileK and maybe none. `step(a, b, adds)`
/// issues one step of K for the descriptors a and b; `pin_all()` pins the accumulators.
template <Major kMajorA, Major kMajorB, class Step, class PinAll>
__device__ __forceinline__ void multiply_tail(std::uint32_t a, std::uint32_t b, int adds, int rows,
                                              Step&& step, PinAll&& pin_all) {
#pragma unroll 1
  do {
    pin_all();
    wgmma_fence();
    step(a, b, adds);
    wgmma_commit();
    pin_all();
    adds = 1;
    a += kStepK16<kMajorA>;
    b += kStepK16<kMajorB>;
    rows -= kStepK;
  } while (rows > 0);
}

}  // namespace sonicmoe::cuda
