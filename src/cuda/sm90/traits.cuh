#pragma once

#include <cuda.h>  // CUtensorMap

#include <cstdint>
#include <type_traits>

#include "cuda/device/wgmma.cuh"

/// What a compiled kernel is, what a tile is, and what the kernel's arguments are.
namespace sonicmoe::cuda {

inline constexpr int kCluster = 2;      ///< CTAs that share operand B
inline constexpr int kTileM = 128;      ///< rows of operand A
inline constexpr int kTileK = 64;       ///< elements of K in a stage: 16 bits each, one line
inline constexpr int kStepK = 16;       ///< elements of K that one wgmma takes
inline constexpr int kLineBytes = 128;  ///< one line of the 128-byte swizzle
inline constexpr int kABytes = kTileM * kLineBytes;
inline constexpr int kChunkBytes = 64 * kLineBytes;  ///< 64 x 64 elements
inline constexpr int kProducerThreads = 128;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kThreads = kProducerThreads + 32 * kConsumerWarps;

/// One output tile of one CTA.
struct alignas(16) Tile {
  int expert;     ///< negative: there is no further tile
  int m_block;    ///< M from kTileM * m_block on, in the expert; maybe past its last row
  int n_block;    ///< N from kTileN * n_block on
  int first_row;  ///< of the expert in the tensors of all rows
  int rows;       ///< of the expert; 0: only the peer has a tile
  int split_n;    ///< 1: both CTAs have this m block, each with an n block of its own
};

enum class Schedule {
  cooperative,  ///< both consumer warpgroups share a tile and split its M
  pingpong,     ///< each consumer has a tile; its epilogue overlaps the other's main loop
};

/// How operand A comes into a stage, and what its axes are.
enum class ALoad {
  gather_m,  ///< M: rows of a (T, width) tensor by token id
  load_m,    ///< M: the expert's rows, contiguous
  gather_k,  ///< K: the expert's rows by token id. M: columns of a (T, width) tensor
  load_k,    ///< K: the expert's rows, contiguous. M: columns of those rows
};

/// What the two maps of operand B are, where rows are M.
enum class BMaps {
  of_tile,  ///< of the left and the right half of a tile
  of_k,     ///< of the first and the second part of K
};

/// All numbers of one compiled kernel.
template <class T_, ALoad kALoad_, Major kBMajor_, int kTileN_, Schedule kSchedule, int kStages_,
          class Epilogue_, bool kDynamic_ = false>
struct Traits {
  using T = T_;
  using Epilogue = Epilogue_;
  static constexpr ALoad kALoad = kALoad_;
  static constexpr Major kBMajor = kBMajor_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kStages = kStages_;
  static constexpr bool kDynamic = kDynamic_;  ///< dynamic scheduling is compiled in
  static constexpr bool kPingpong = kSchedule == Schedule::pingpong;

  static constexpr bool kRowsAreM = kALoad == ALoad::gather_m || kALoad == ALoad::load_m;
  static constexpr bool kGathers = kALoad == ALoad::gather_m || kALoad == ALoad::gather_k;
  static constexpr Major kAMajor = kRowsAreM ? Major::k : Major::mn;
  // Kernels of transposed weights set these two otherwise.
  static constexpr BMaps kBMaps = kBMajor_ == Major::k ? BMaps::of_tile : BMaps::of_k;
  static constexpr bool kBPairsRows = false;  ///< maps are as TensorView::pairs_rows says
  /// Clusters may start one after the other: Scheduling::start_spread.
  static constexpr bool kSpreadsStarts = kALoad == ALoad::gather_m;
  /// How often the producer's loop over k blocks is unrolled (GatherM). Wide tiles have twice the
  /// cycles a block and gain nothing by it.
  static constexpr int kUnroll = kALoad == ALoad::gather_m && kTileN <= 128 ? 2 : 1;
  /// Operand A has empty barriers of its own, so that a gather along K does not wait for the peer.
  static constexpr bool kSeparateAEmpty = kALoad == ALoad::gather_k;
  /// Blocks of 64 rows of M that one consumer warpgroup multiplies.
  static constexpr int kM64 = kTileM / 64 / (kPingpong ? 1 : 2);
  /// Stages behind a tile's k blocks that its epilogue loads into or stores from.
  static constexpr int kEpilogueStages = Epilogue::template kEpilogueStages<kTileN>;
  static constexpr int kTileSlots = 2;                   ///< tiles published ahead
  static constexpr int kIndexSlots = kDynamic ? 16 : 0;  ///< tile indices under way
  static constexpr int kProducerRegisters = kALoad == ALoad::gather_m ? 72 : kGathers ? 56 : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 16 * 8;

  // g++ 12 deduces a reference from decltype(parameter) in nested generic lambdas where nvcc does
  // not; the host would then launch a kernel that nvcc never compiled.
  static_assert(!std::is_reference_v<T>, "T is a reference");
  static_assert(kM64 * kTileN / 2 <= 192, "accumulators leave no registers for the epilogue");
  static_assert(128 * (kProducerRegisters + 2 * kConsumerRegisters) <= 168 * kThreads,
                "the register split exceeds the register file");
  static_assert(kRowsAreM || !kPingpong, "ping-pong needs as many k blocks in every tile");
  static_assert(kRowsAreM || kEpilogueStages == 0, "consumers compute their stage from k blocks");
  static_assert(!kPingpong || kEpilogueStages == 0, "a tile's stages follow each other");
  static_assert(kRowsAreM || !kDynamic, "an index needs more k blocks than a tile may have");
  static_assert(!kDynamic || kStages < kIndexSlots, "a late CTA would miss an index");
};

/// Operand A. A gather reads `rows`; the copy engine reads through `maps`.
struct OperandA {
  CUtensorMap maps[2];             ///< load_m: A by half of K. load_k: maps[0] alone
  const void* rows;                ///< gathers: the (T, width) tensor
  const std::int32_t* row_tokens;  ///< gathers: (R), the token of each row
  int width;                       ///< of `rows` in elements; where rows are K: the extent of M
};

/// Operand B, always through tensor maps.
struct OperandB {
  CUtensorMap maps[2];  ///< BMaps says of what; where rows are K, by half of N
  bool gate_and_up;     ///< K contiguous: both boxes start at the same row of their maps
  int last_chunk;       ///< N contiguous, rows are M: where the last chunk of 64 columns begins
};

/// How many tiles and k blocks there are.
struct Extents {
  const std::int32_t* begins;        ///< (E) first row of each expert, or null: equal parts
  const std::int32_t* ends;          ///< (E) the row behind its last
  const std::int32_t* expert_order;  ///< rows are K: (E) order of tiles, or null: by id
  int experts;
  int rows, part_rows;   ///< equal parts: rows of all experts, and of each
  int n_blocks, n_half;  ///< along N; n_half: in the first map of B, where N has two
  int k_blocks, k_half;  ///< rows are M: along K, at least 1, and in the first maps of A and B
};

/// When tiles begin.
struct Scheduling {
  int start_spread;            ///< of kSpreadsStarts: cycles between first and last start
  std::int32_t* tile_counter;  ///< dynamic scheduling: (1) indices drawn so far; null: static
};

/// How this kernel stands to its neighbours in the stream (core/handoff.h).
struct Chain {
  bool overlap_previous;            ///< this kernel needs nothing of the one before it
  std::int32_t* next_tile_counter;  ///< rows are M: (1) reset to 0 for a later kernel, or null
};

/// Arguments of the kernel besides those of its epilogue.
struct GemmParams {
  OperandA a;
  OperandB b;
  Extents extents;
  Scheduling scheduling;
  Chain chain;
};

}  // namespace sonicmoe::cuda
