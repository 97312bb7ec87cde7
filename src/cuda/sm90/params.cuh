#pragma once

#include <cuda.h>  // CUtensorMap

#include <cstdint>

/// Arguments of the grouped GEMM kernel, grouped by what they serve.
namespace sonicmoe::cuda {

/// Operand A. A gather reads `rows`; the copy engine reads through `maps`.
struct OperandA {
  CUtensorMap maps[2];             ///< load_m: A by half of K. load_k: maps[0] alone
  const void* rows;                ///< gathers: the (T, width) tensor
  const std::int32_t* row_tokens;  ///< gathers: (R), the token of each row
  int width;                       ///< elements; gather_k, load_k: the extent of M
};

/// Operand B, always through tensor maps.
struct OperandB {
  CUtensorMap maps[2];  ///< K contiguous: for both boxes of a tile. Else by half of K or of N
  bool paired;          ///< K contiguous: both boxes start at the same row (gate and up)
  int last_chunk;       ///< N contiguous, rows are M: where the last chunk of 64 columns begins
};

/// How many tiles and k blocks there are.
struct Extents {
  const std::int32_t* offsets;       ///< (E+1) first rows of experts, or null: equal parts
  const std::int32_t* expert_order;  ///< rows are K: (E) order of tiles, or null: by id
  int experts;
  int rows, part_rows;   ///< equal parts: rows of all experts, and of each
  int n_blocks, n_half;  ///< along N; n_half: in the first map of B, where N has two
  int k_blocks, k_half;  ///< rows are M: along K, and in the first maps of A and B
};

/// When tiles begin.
struct Scheduling {
  int start_spread;            ///< gather_m: cycles from the first cluster's start to the last's
  std::int32_t* tile_counter;  ///< dynamic scheduling: (1) indices drawn so far; null: static
};

/// What this kernel does for its neighbours in the stream (core/handoff.h).
struct Chain {
  bool overlap_previous;            ///< this kernel needs nothing of the one before it
  std::int32_t* next_tile_counter;  ///< gather_m: (1) reset to 0 for a later kernel, or null
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
