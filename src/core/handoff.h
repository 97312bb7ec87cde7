#pragma once

#include <cstdint>

namespace sonicmoe {

/// What the operations of one call hand to each other besides tensors. The plans of src/core set
/// it, for they know the whole sequence; an operation that runs alone gets an empty one.
struct Handoff {
  /// CUDA: the word in which an operation that schedules its tiles dynamically counts them
  /// (docs/findings/dealing.md). It is 0 when the operation begins and anything when it ends; with
  /// another value tiles are left out. Null: the operation counts in its workspace, which it resets
  /// by a launch of its own.
  std::int32_t* tile_counter = nullptr;
  /// CUDA: metadata, up_proj and down_proj_dgrad set this word to 0, for the tile_counter of an
  /// operation after them. Not their own tile_counter.
  std::int32_t* next_tile_counter = nullptr;
  /// CUDA: block_counts_bytes() that top_k writes and metadata reads: how many of each 64 tokens
  /// have each expert. It saves metadata two passes over the experts' ids. With counts of other ids
  /// some rows get no token, and operations that gather by them read arbitrary addresses.
  std::uint8_t* block_counts = nullptr;
  /// CUDA: a promise about the operation before this one in the stream, with all its kernels. It
  /// writes nothing that this one reads or writes, and reads nothing that this one writes. If the
  /// same was promised of it, the promise covers the operation before it, too, and so on.
  ///
  /// This operation may then begin where they leave multiprocessors free. Its own end still implies
  /// the end of all before it. The operation before must launch a kernel (ours do unless there are
  /// no rows or tokens). If that kernel lets its successor start early, it must have waited for its
  /// own predecessor by then, as ours do, or have been promised the same. Without effect where
  /// tiles are scheduled dynamically.
  bool overlap_previous = false;
};

}  // namespace sonicmoe
