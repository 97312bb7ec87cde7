#pragma once

#include <concepts>

#include "cuda/sm90/pipeline.cuh"

/// What the kernel asks of an epilogue.
namespace sonicmoe::cuda {

/// An epilogue turns a tile's accumulators into what the operation stores. All members run on the
/// device; consumer warps call them unless stated otherwise.
///
///   Params             arguments of the kernel
///   kAdds              begin() sets the accumulators, and the products add to them
///   kStagingBytes      shared memory of each consumer warp
///   kRingStages<kN>    stages behind the k blocks of a tile kN wide, each kTileM rows x 64 columns
///   load()             called by one producer thread for each of those stages, which is empty:
///                      arrives on `full` once, and may issue boxes that count on it
///   Deferred           what finish() leaves in registers to store beside the next tile's products
///   send()             stores one piece of it; false if there is none
///   Run                serves one tile; an aggregate of what the kernel hands to it:
///     begin()          before the products: sets the accumulators if kAdds
///     prefetch()       beside the first products
///     finish()         after the products. Stores, releases all ring stages but the last. Boxes
///     may
///                      still leave from staging and the last stage when it returns
///
/// Rows past the expert's end and columns past the matrix hold anything; an epilogue must not store
/// them, since the next expert's rows follow.
template <class E, class Traits>
using RunOf = typename E::template Run<Traits>;

// clang-format off
template <class E, class Traits>
concept Epilogue =
    requires(const typename E::Params& params, const GemmParams& gemm, const Tile& tile, int index,
             std::uint32_t address, Barrier& full, typename E::template Deferred<Traits>& deferred,
             RunOf<E, Traits>& run, const EpilogueStages<Traits>& stages,
             float (&acc)[Traits::kM64][Traits::kTileN / 2]) {
  { E::kAdds } -> std::convertible_to<bool>;
  { E::kStagingBytes } -> std::convertible_to<int>;
  { E::template kRingStages<Traits::kTileN> } -> std::convertible_to<int>;
  E::template load<Traits>(params, tile, /*which of the stages*/ index, /*of it*/ address, full);
  { E::template send<Traits>(params, deferred, /*of staging*/ address, /*consumer*/ index) }
      -> std::same_as<bool>;
  RunOf<E, Traits>{params, gemm, tile, /*first 64 rows*/ index, /*of staging*/ address};
  run.begin(acc);
  run.prefetch();
  run.finish(acc, deferred, stages);
};
// clang-format on

/// Base of epilogues that store a tile at once.
struct DefersNothing {
  template <class Traits>
  struct Deferred {};
  template <class Traits, class Params>
  static __device__ __forceinline__ bool send(const Params&, Deferred<Traits>&, std::uint32_t,
                                              int) {
    return false;
  }
};

/// Base of epilogues without ring stages.
struct LoadsNothing {
  template <int kN>
  static constexpr int kRingStages = 0;
  template <class Traits, class Params>
  static __device__ __forceinline__ void load(const Params&, const Tile&, int, std::uint32_t,
                                              Barrier&) {}
};

}  // namespace sonicmoe::cuda
