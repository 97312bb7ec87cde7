#pragma once

#include "core/block_counts.h"
#include "cuda/routing/routing.cuh"
#include "math/load_class.h"

/// Shared by the two implementations of metadata: the sorts of metadata.cu, and the one launch of
/// metadata_counted.cu that uses top_k's counts.
namespace sonicmoe::cuda {

/// The arguments, and the fields of Handoff that metadata uses.
struct HandedMetadata : MetadataArgs {
  const std::uint8_t* block_counts;  ///< from top_k, or null
  std::int32_t* next_tile_counter;   ///< metadata sets it to 0; or null
  bool sorted;                       ///< token_offsets is given: see Handoff

  HandedMetadata(const MetadataArgs& args, const Handoff& handoff)
      : MetadataArgs(args),
        block_counts(handoff.block_counts),
        next_tile_counter(handoff.next_tile_counter),
        sorted(handoff.token_offsets != nullptr) {}
};

/// Makes all of metadata for the slots of top_k in one launch, from the counts that top_k stored.
/// `counts` is their layout; a.block_counts must be the counts of these very slots.
void place_counted(const MetadataDesc& d, const HandedMetadata& a, const BlockCounts& counts,
                   const Exec& exec);

/// Writes order[i] = the expert with exactly i experts before it. An expert comes before another if
/// its load class is higher, or equal and its id is lower. A thread ranks one expert. `block` is
/// the block's index among the blocks that rank. `others` is shared memory, one number a thread.
/// All threads of the block call it.
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
    __syncthreads();  // all threads have read the group before
    if (thread < some) others[thread] = load_class(counts[first + thread]);
    __syncthreads();  // others[] is complete
    if (mine >= experts) continue;
#pragma unroll 8
    for (int i = 0; i < some; ++i) {
      before += others[i] > own || (others[i] == own && first + i < mine);
    }
  }
  if (mine < experts) order[before] = mine;
}

/// Writes the values of a row that no expert owns.
__device__ __forceinline__ void empty_row(const MetadataArgs& a, std::int64_t row) {
  a.row_slots[row] = -1;
  a.row_tokens[row] = 0;
  if (a.row_scores != nullptr) a.row_scores[row] = 0.0f;
}

/// Resets the next operation's tile counter, if there is one. One thread of the grid calls it.
__device__ __forceinline__ void clear_next_counter(const HandedMetadata& a) {
  if (a.next_tile_counter != nullptr) *a.next_tile_counter = 0;
}

}  // namespace sonicmoe::cuda
