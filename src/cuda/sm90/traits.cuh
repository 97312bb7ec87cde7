#pragma once

#include "cuda/device/wgmma.cuh"
#include "cuda/runtime.h"
#include "cuda/sm90/gather.cuh"
#include "cuda/sm90/tile.cuh"

/// What a compiled kernel is: its numbers, its arguments, and what lies where in shared memory.
namespace sonicmoe::cuda {

enum class Schedule {
  cooperative,  ///< both consumers share a tile: they split M
  pingpong,     ///< each has a tile of its own; one's epilogue runs beside the other's mainloop
};

/// The operand that each CTA has for itself.
enum class ALoad {
  gather_m,  ///< M: rows of a (T, width) tensor by token id
  load_m,    ///< M: the expert's rows, contiguous
  gather_k,  ///< M: columns of a (T, width) tensor; K: the expert's rows by token id
  load_k,    ///< the same of contiguous rows, parts of one matrix that none lacks rows of
};

/// All numbers of one compiled kernel. The own axis is M, kTileM wide in a tile; N is the axis of
/// the operand that the CTAs of a cluster share.
template <class T_, ALoad kALoad_, Major kBMajor_, int kTileN_, Schedule kSchedule_, int kStages_,
          class Epilogue_, bool kDynamic_ = false>
struct Traits {
  using T = T_;
  using Epilogue = Epilogue_;
  static constexpr ALoad kALoad = kALoad_;
  static constexpr Major kBMajor = kBMajor_;
  static constexpr int kTileN = kTileN_;
  static constexpr Schedule kSchedule = kSchedule_;
  static constexpr int kStages = kStages_;

  static constexpr int kCluster = 2;
  static constexpr bool kRows = kALoad == ALoad::gather_m || kALoad == ALoad::load_m;
  static constexpr bool kGathers = kALoad == ALoad::gather_m || kALoad == ALoad::gather_k;
  /// By how many blocks the producer's loop is unrolled: see RowGather. Wide tiles, with twice the
  /// cycles a block, gain nothing by it; without a gather less code is as fast.
  static constexpr int kUnroll = kALoad == ALoad::gather_m && kTileN <= 128 ? 2 : 1;
  using Gather = std::conditional_t<kALoad == ALoad::gather_m, RowGather<kUnroll>,
                                    std::conditional_t<kGathers, ContractionGather, NoGather>>;
  /// The own operand's part of a stage has a barrier of its own, which nobody but this CTA's
  /// consumers arrive on: a gather along K does not wait for the peer.
  static constexpr bool kSeparateAEmpty = kALoad == ALoad::gather_k;
  static constexpr bool kPingpong = kSchedule == Schedule::pingpong;
  static constexpr Major kAMajor = kRows ? Major::k : Major::mn;
  static constexpr int kM64 = kTileM / 64 / (kPingpong ? 1 : 2);  // m64 blocks of one warpgroup
  static constexpr int kStageBytes = kABytes + kTileN * kLineBytes;
  static constexpr int kTileSlots = 2;  // tiles that the producer publishes ahead
  /// May tiles be dealt (see TileCounter)?
  static constexpr bool kDynamic = kDynamic_;
  static constexpr int kIndexSlots =
      kDynamic ? 16 : 0;  // places for numbers of tiles that are told
  static constexpr int kStagingBytes = Epilogue::kStagingBytes;  // for each consumer warp
  static constexpr int kEpilogueStages = Epilogue::template kRingStages<kTileN>;
  static constexpr int kBarriers =
      (kSeparateAEmpty ? 3 : 2) * kStages + 2 * kTileSlots + 2 + kIndexSlots;
  static constexpr int kSharedMemory = kStages * kStageBytes + 8 * kStagingBytes +
                                       kTileSlots * static_cast<int>(sizeof(Tile)) + kBarriers * 8 +
                                       kIndexSlots * 4;
  static constexpr int kThreads = 384;
  static constexpr int kProducerRegisters = kALoad == ALoad::gather_m ? 72 : kGathers ? 56 : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 16 * 8;

  // g++ 12 makes one of decltype(parameter) under `if constexpr` in nested generic lambdas, where
  // nvcc does not: the host would launch a kernel that was never compiled.
  static_assert(!std::is_reference_v<T>, "T is a reference");
  static_assert(kSharedMemory <= kMostSharedMemory,
                "stages do not fit into 227 KiB of shared memory");
  static_assert(kStageBytes % kBlockBytes == 0, "a stage must keep the swizzle's alignment");
  static_assert(kM64 * kTileN / 2 <= 192, "accumulators leave no registers for the epilogue");
  static_assert((kProducerRegisters + 2 * kConsumerRegisters) * 128 <= 168 * kThreads,
                "register split exceeds the register file");
  static_assert(kRows || !kPingpong, "ping-pong needs the same number of k blocks in every tile");
  static_assert(kRows || kEpilogueStages == 0, "consumers count blocks by tiles");
  static_assert(!kPingpong || kEpilogueStages == 0, "a tile's blocks follow each other");
  static_assert(kRows || !kDynamic, "a tile may have too few k blocks to be told the next in");
  static_assert(!kDynamic || kStages < kIndexSlots, "a peer that is behind would miss a number");
};

/// Arguments of a kernel, but for its epilogue's.
struct GemmParams {
  CUtensorMap a_maps[2];  ///< load_rows: rows, by half of K. load_contraction: the first
  CUtensorMap
      b_maps[2];  ///< K contiguous: the tile's two boxes. Else by half (of K, or of the axis)
  const void* gathered;         ///< the (T, gathered_width) tensor of the operand that is gathered
  const std::int32_t* offsets;  ///< (E+1), or null: one expert that owns all rows
  const std::int32_t* row_tokens;    ///< (R)
  const std::int32_t* expert_order;  ///< contraction ops: (E), or null: by id
  int gathered_width;                ///< contraction ops: of the own axis, gathered or not
  int experts;
  int rows;                    ///< without offsets: of all experts together ...
  int part;                    ///< ... and of each
  int n_blocks;                ///< along the shared axis
  int k_blocks;                ///< rows ops: along K ...
  int k_half;                  ///< ... of which in the first half
  bool paired;                 ///< K contiguous: both boxes start at the same row (gate and up)
  int n_half;                  ///< contraction ops: shared tiles in the first half
  int start_spread;            ///< gather_rows: cycles between the first and the last pair's start
  std::int32_t* tile_counter;  ///< kDynamic: (1) numbers drawn so far, or null: see TileCounter
  std::int32_t* next_tile_counter;  ///< gather_rows: (1) set to 0, or null
  bool overlap_previous;            ///< needs nothing of the kernel before it in the stream
  int n_last_chunk;  ///< rows ops, K not contiguous: where the last chunk of 64 columns begins
};

}  // namespace sonicmoe::cuda
