#pragma once

#include "cuda/runtime.h"
#include "cuda/sm90/operands.cuh"
#include "cuda/sm90/tile_walk.cuh"

/// What a compiled kernel is: its numbers, its arguments, and what lies where in shared memory.
namespace sonicmoe::cuda {

enum class Schedule {
  cooperative,  ///< both consumers share a tile: they split M
  pingpong,     ///< each has a tile of its own; one's epilogue runs beside the other's mainloop
};

/// The operand that each CTA has for itself.
enum class Own {
  gather_rows,         ///< M: rows of a (T, width) tensor by token id
  load_rows,           ///< M: the expert's rows, contiguous
  gather_contraction,  ///< M: columns of a (T, width) tensor; K: the expert's rows by token id
  load_contraction,    ///< the same of contiguous rows, parts of one matrix that none lacks rows of
};

/// All numbers of one compiled kernel. The own axis is M, kOwn wide in a tile; N is the axis of the
/// operand that the CTAs of a cluster share.
template <class T_, Own kOwnLoad_, Major kSharedMajor_, int kN_, Schedule kSchedule_, int kStages_,
          class Epilogue_, bool kDealt_ = false>
struct Traits {
  using T = T_;
  using Epilogue = Epilogue_;
  static constexpr Own kOwnLoad = kOwnLoad_;
  static constexpr Major kSharedMajor = kSharedMajor_;
  static constexpr int kN = kN_;
  static constexpr Schedule kSchedule = kSchedule_;
  static constexpr int kStages = kStages_;

  static constexpr int kCluster = 2;
  static constexpr bool kRows = kOwnLoad == Own::gather_rows || kOwnLoad == Own::load_rows;
  static constexpr bool kGathers =
      kOwnLoad == Own::gather_rows || kOwnLoad == Own::gather_contraction;
  /// By how many blocks the producer's loop is unrolled: see RowGather. Wide tiles, with twice the
  /// cycles a block, gain nothing by it; without a gather less code is as fast.
  static constexpr int kBlocksInTurn = kOwnLoad == Own::gather_rows && kN <= 128 ? 2 : 1;
  using Gather = std::conditional_t<kOwnLoad == Own::gather_rows, RowGather<kBlocksInTurn>,
                                    std::conditional_t<kGathers, ContractionGather, NoGather>>;
  /// The own operand's part of a stage has a barrier of its own, which nobody but this CTA's
  /// consumers arrive on: a gather along K does not wait for the peer.
  static constexpr bool kOwnEmpties = kOwnLoad == Own::gather_contraction;
  static constexpr bool kPingpong = kSchedule == Schedule::pingpong;
  static constexpr Major kOwnMajor = kRows ? Major::k : Major::mn;
  static constexpr int kMBlocks = kOwn / 64 / (kPingpong ? 1 : 2);  // m64 blocks of one warpgroup
  static constexpr int kStageBytes = kOwnBytes + kN * kLineBytes;
  static constexpr int kTiles = 2;  // tiles that the producer announces ahead
  /// May tiles be dealt (see Dealer)?
  static constexpr bool kDealt = kDealt_;
  static constexpr int kTold = kDealt ? 16 : 0;  // places for numbers of tiles that are told
  static constexpr int kWarpBytes = Epilogue::kWarpBytes;  // for each consumer warp
  static constexpr int kEpilogueBlocks = Epilogue::template kBlocks<kN>;
  static constexpr int kBarriers = (kOwnEmpties ? 3 : 2) * kStages + 2 * kTiles + 2 + kTold;
  static constexpr int kSharedMemory = kStages * kStageBytes + 8 * kWarpBytes +
                                       kTiles * static_cast<int>(sizeof(Tile)) + kBarriers * 8 +
                                       kTold * 4;
  static constexpr int kThreads = 384;
  static constexpr int kProducerRegisters = kOwnLoad == Own::gather_rows ? 72 : kGathers ? 56 : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 16 * 8;

  // g++ 12 makes one of decltype(parameter) under `if constexpr` in nested generic lambdas, where
  // nvcc does not: the host would launch a kernel that was never compiled.
  static_assert(!std::is_reference_v<T>, "T is a reference");
  static_assert(kSharedMemory <= kMostSharedMemory,
                "stages do not fit into 227 KiB of shared memory");
  static_assert(kStageBytes % kBlockBytes == 0, "a stage must keep the swizzle's alignment");
  static_assert(kMBlocks * kN / 2 <= 192, "accumulators leave no registers for the epilogue");
  static_assert((kProducerRegisters + 2 * kConsumerRegisters) * 128 <= 168 * kThreads,
                "register split exceeds the register file");
  static_assert(kRows || !kPingpong, "ping-pong needs the same number of k blocks in every tile");
  static_assert(kRows || kEpilogueBlocks == 0, "consumers count blocks by tiles");
  static_assert(!kPingpong || kEpilogueBlocks == 0, "a tile's blocks follow each other");
  static_assert(kRows || !kDealt, "a tile may have too few k blocks to be told the next in");
  static_assert(!kDealt || kStages < kTold, "a peer that is behind would miss a number");
};

/// Arguments of a kernel, but for its epilogue's.
struct GemmParams {
  CUtensorMap own[2];  ///< load_rows: rows, by half of K. load_contraction: the first
  CUtensorMap
      shared[2];  ///< K contiguous: the tile's two boxes. Else by half (of K, or of the axis)
  const void* gathered;         ///< the (T, gathered_width) tensor of the operand that is gathered
  const std::int32_t* offsets;  ///< (E+1), or null: one expert that owns all rows
  const std::int32_t* row_tokens;    ///< (R)
  const std::int32_t* expert_order;  ///< contraction ops: (E), or null: by id
  int gathered_width;                ///< contraction ops: of the own axis, gathered or not
  int experts;
  int rows;                    ///< without offsets: of all experts together ...
  int part;                    ///< ... and of each
  int shared_tiles;            ///< along the shared axis
  int k_blocks;                ///< rows ops: along K ...
  int k_half;                  ///< ... of which in the first half
  bool paired;                 ///< K contiguous: both boxes start at the same row (gate and up)
  int shared_half;             ///< contraction ops: shared tiles in the first half
  int start_spread;            ///< gather_rows: cycles between the first and the last pair's start
  std::int32_t* tile_counter;  ///< kDealt: (1) numbers drawn so far, or null: see Dealer
  std::int32_t* next_tile_counter;  ///< gather_rows: (1) set to 0, or null
  bool beside_previous;             ///< needs nothing of the kernel before it in the stream
  int shared_last;  ///< rows ops, K not contiguous: where the last chunk of 64 columns begins
};

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
  __device__ __forceinline__ std::uint32_t own(int stage) const {
    return base + stage * Traits::kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t shared(int stage) const {
    return own(stage) + kOwnBytes;
  }
  __device__ __forceinline__ std::uint32_t warp(int consumer_warp) const {
    return base + Traits::kStages * Traits::kStageBytes + consumer_warp * Traits::kWarpBytes;
  }
  __device__ __forceinline__ std::uint32_t tile(int slot) const {
    return warp(8) + slot * static_cast<int>(sizeof(Tile));
  }
  __device__ __forceinline__ std::uint32_t barrier(int i) const {
    return tile(Traits::kTiles) + i * 8;
  }
  __device__ __forceinline__ std::uint32_t full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ std::uint32_t empty(int stage) const {
    return barrier(Traits::kStages + stage);
  }
  __device__ __forceinline__ std::uint32_t announced(int slot) const {
    return barrier(2 * Traits::kStages + slot);
  }
  __device__ __forceinline__ std::uint32_t taken(int slot) const {
    return barrier(2 * Traits::kStages + Traits::kTiles + slot);
  }
  __device__ __forceinline__ std::uint32_t turn(int consumer) const {
    return barrier(2 * Traits::kStages + 2 * Traits::kTiles + consumer);
  }
  __device__ __forceinline__ std::uint32_t own_empty(int stage) const {
    return barrier(2 * Traits::kStages + 2 * Traits::kTiles + 2 + stage);
  }
  __device__ __forceinline__ std::uint32_t told(int slot) const {
    return barrier(Traits::kBarriers - Traits::kTold + slot);
  }
  __device__ __forceinline__ std::uint32_t told_number(int slot) const {
    return barrier(Traits::kBarriers) + slot * 4;
  }
};

}  // namespace sonicmoe::cuda
