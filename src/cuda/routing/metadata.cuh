#pragma once

#include "core/block_counts.h"
#include "cuda/routing/routing.cuh"
#include "math/load_class.h"

/// What the two ways to metadata share.
namespace sonicmoe::cuda {

/// Arguments with what is handed on beside them.
struct HandedMetadata : MetadataArgs {
  const std::uint8_t* block_counts;
  std::int32_t* next_tile_counter;  ///< set to 0, or null

  HandedMetadata(const MetadataArgs& args, const Handoff& handoff)
      : MetadataArgs(args),
        block_counts(handoff.block_counts),
        next_tile_counter(handoff.next_tile_counter) {}
};

/// All of metadata for the slots of top_k, with what it counted, in one launch.
void place_counted(const MetadataDesc& d, const HandedMetadata& a, const BlockCounts& counts,
                   cudaStream_t stream);

/// order[i] = the expert that has i others before it: of a higher class, or of the same and with a
/// lower id. A thread an expert; `block` counts the blocks that do this, `others` is shared memory
/// for a number of each thread.
__device__ __forceinline__ void rank_experts(const std::int32_t* counts, int experts,
                                             const math::LoadClass& load_class, int block,
                                             std::int32_t* others, std::int32_t* order) {
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int mine = block * threads + thread;
  const std::int32_t own = mine < experts ? load_class(counts[mine]) : 0;
  int before = 0;
  for (int first = 0; first < experts; first += threads) {
    const int some = min(threads, experts - first);
    __syncthreads();
    if (thread < some) others[thread] = load_class(counts[first + thread]);
    __syncthreads();
    if (mine >= experts) continue;
#pragma unroll 8
    for (int i = 0; i < some; ++i) {
      before += others[i] > own || (others[i] == own && first + i < mine);
    }
  }
  if (mine < experts) order[before] = mine;
}

/// A row that no expert owns.
__device__ __forceinline__ void empty_row(const MetadataArgs& a, std::int64_t row) {
  a.row_slots[row] = -1;
  a.row_tokens[row] = 0;
  if (a.row_scores != nullptr) a.row_scores[row] = 0.0f;
}

/// By one thread.
__device__ __forceinline__ void clear_next_counter(const HandedMetadata& a) {
  if (a.next_tile_counter != nullptr) *a.next_tile_counter = 0;
}

}  // namespace sonicmoe::cuda
