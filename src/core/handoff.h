#pragma once

#include <cstdint>

namespace sonicmoe {

/// State that the operations of one call hand to each other besides tensors. The plans of src/core
/// set it, for they know the whole sequence. An operation that runs alone gets an empty Handoff.
struct Handoff {
  /// CUDA: the tile counter of an operation that schedules its tiles dynamically
  /// (docs/findings/dealing.md). An earlier operation must have set it to 0: from another value the
  /// operation leaves tiles out. Its value afterwards is undefined. Null: the operation counts in
  /// its own workspace, which it resets by a memset before its kernel.
  std::int32_t* tile_counter = nullptr;
  /// CUDA: metadata, segments, up_proj and down_proj_dgrad set this word to 0. It is the
  /// tile_counter of a later operation, never their own.
  std::int32_t* next_tile_counter = nullptr;
  /// CUDA: block_counts_bytes() bytes that top_k writes and metadata reads (see BlockCounts). They
  /// save metadata two passes over the expert ids. Counts from other ids leave some `row_tokens`
  /// unwritten; operations that gather by them then read arbitrary addresses.
  std::uint8_t* block_counts = nullptr;
  /// CUDA: (T+1) where token_rounding writes the first entry of each token, and behind them the
  /// number of all. metadata reads them in place of its own sort by token: the lists ascend by
  /// token, sentinels last.
  std::int32_t* token_offsets = nullptr;
  /// CUDA: the caller promises that this operation N and the previous one in the stream, N-1, are
  /// independent. No kernel of N-1 writes memory that N reads or writes, or reads memory that N
  /// writes. If N-1 has overlap_previous, too, the promise also covers N-2, and so on.
  ///
  /// N may then begin on multiprocessors that N-1 leaves free. N's end still implies the end of all
  /// operations before it. N-1 must launch a kernel; ours do unless there are no rows or tokens. A
  /// kernel of N-1 that lets N start early must first wait for N-2, which may have written N's
  /// operands, unless N-1 has overlap_previous itself. Our kernels do. The promise covers
  /// `tile_counter`: an operation before N-1 sets it to 0. Without one, an operation that schedules
  /// its tiles dynamically waits.
  bool overlap_previous = false;
};

}  // namespace sonicmoe
