#pragma once

#include <concepts>

#include "cuda/sm90/pipeline.cuh"

/// What the kernel asks of an epilogue.
namespace sonicmoe::cuda {

template <class E, class Traits>
using RunOf = typename E::template Run<Traits>;

// clang-format off
/// An epilogue turns a tile's accumulators into what the operation stores. Consumer warps call its
/// members, unless stated otherwise.
///
///   Params           arguments of the kernel.
///   kAdds            begin() sets the accumulators, and the products add to them.
///   kStagingBytes    shared memory of each consumer warp.
///   kEpilogueStages  stages behind the k blocks of a tile kN wide (EpilogueStages).
///   load()           one producer thread calls it for each of those stages, once it is empty. It
///                    arrives on `full` once, and may issue boxes that count on it.
///   Deferred         what finish() leaves in registers, to store beside the next tile's products.
///   send()           stores one piece of it; false if there is none.
///   Run              serves one tile; an aggregate that begins with what the kernel hands to it.
///     begin()        before the products: sets the accumulators if kAdds.
///     prefetch()     beside the first products.
///     add_up()       where there is one: after every kAddUpBlocks k blocks, whose products have
///                    ended. Takes what it wants out of the accumulators.
///     finish()       after the products: stores, and releases all epilogue stages but the last.
///                    When it returns, boxes may still leave from staging and the last stage.
///
/// Rows past the expert's end and columns past the matrix hold anything. An epilogue must not store
/// them, since the next expert's rows follow.
template <class E, class Traits>
concept Epilogue =
    requires(const typename E::Params& params, const GemmParams& gemm, const Tile& tile, int index,
             std::uint32_t address, Barrier& full, typename E::template Deferred<Traits>& deferred,
             RunOf<E, Traits>& run, const EpilogueStages<Traits>& stages,
             float (&acc)[Traits::kM64][Traits::kTileN / 2]) {
  { E::kAdds } -> std::convertible_to<bool>;
  { E::kStagingBytes } -> std::convertible_to<int>;
  { E::template kEpilogueStages<Traits::kTileN> } -> std::convertible_to<int>;
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
  template <class Traits, class... Arguments>
  static __device__ __forceinline__ bool send(const Arguments&...) {
    return false;
  }
};

}  // namespace sonicmoe::cuda
