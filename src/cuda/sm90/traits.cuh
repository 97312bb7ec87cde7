#pragma once

#include <type_traits>

#include "cuda/device/wgmma.cuh"
#include "cuda/runtime.h"
#include "cuda/sm90/gather_k.cuh"
#include "cuda/sm90/gather_m.cuh"
#include "cuda/sm90/tile.cuh"

/// What a compiled kernel is.
namespace sonicmoe::cuda {

enum class Schedule {
  cooperative,  ///< both consumer warpgroups share a tile and split its M
  pingpong,     ///< each consumer has a tile; its epilogue overlaps the other's main loop
};

/// How operand A comes into a stage, and what its axes are.
enum class ALoad {
  gather_m,  ///< M: rows of a (T, width) tensor by token id
  load_m,    ///< M: the expert's rows, contiguous
  gather_k,  ///< K: the expert's rows by token id. M: columns of a (T, width) tensor
  load_k,    ///< K: contiguous rows, none past the end of the matrix. M: its columns
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
  static constexpr bool kDynamic = kDynamic_;  ///< may schedule tiles dynamically (TileScheduler)
  static constexpr bool kPingpong = kSchedule == Schedule::pingpong;

  static constexpr bool kRowsAreM = kALoad == ALoad::gather_m || kALoad == ALoad::load_m;
  static constexpr bool kGathers = kALoad == ALoad::gather_m || kALoad == ALoad::gather_k;
  static constexpr Major kAMajor = kRowsAreM ? Major::k : Major::mn;
  /// How often the producer's loop over k blocks is unrolled (GatherM). Wide tiles have twice the
  /// cycles a block and gain nothing by it.
  static constexpr int kUnroll = kALoad == ALoad::gather_m && kTileN <= 128 ? 2 : 1;
  using Gather = std::conditional_t<kALoad == ALoad::gather_m, GatherM<kUnroll>,
                                    std::conditional_t<kGathers, GatherK, NoGather>>;
  /// Operand A has empty barriers of its own, so that a gather along K does not wait for the peer.
  static constexpr bool kSeparateAEmpty = kALoad == ALoad::gather_k;
  /// Blocks of 64 rows of M that one consumer warpgroup multiplies.
  static constexpr int kM64 = kTileM / 64 / (kPingpong ? 1 : 2);
  /// Stages behind a tile's k blocks that its epilogue loads into or stores from.
  static constexpr int kEpilogueStages = Epilogue::template kRingStages<kTileN>;
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

}  // namespace sonicmoe::cuda
