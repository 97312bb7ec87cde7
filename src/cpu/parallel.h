#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

/// Shape and counts alone decide how work is split, never the number of threads. Each piece writes
/// outputs of its own. So any number of threads gives the same bits.
namespace sonicmoe::cpu {

/// Calls f(thread, piece) for pieces 0 .. count-1. Threads take pieces in ascending order.
template <class F>
void parallel_for(int threads, std::int64_t count, F&& f) {
  if (count <= 0) return;
  if (threads == 1 || count == 1) {
    for (std::int64_t i = 0; i < count; ++i) f(0, i);
    return;
  }
  std::atomic<std::int64_t> next{0};
  // Starts all threads, even if some find no piece. With a smaller team libgomp would end the
  // surplus threads; for the next larger team it would allocate and start new ones, 30 us each.
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
    for (std::int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) f(thread, i);
  }
}

/// Tokens, or grouped rows, in a piece of a pass that works token by token.
inline constexpr std::int64_t kTokensPerPiece = 64;

/// Calls f(thread, begin, end) for ranges of at most `step` items.
template <class F>
void parallel_ranges(int threads, std::int64_t count, std::int64_t step, F&& f) {
  parallel_for(threads, (count + step - 1) / step, [&](int thread, std::int64_t piece) {
    f(thread, piece * step, std::min(count, (piece + 1) * step));
  });
}

/// A block of consecutive grouped rows of one expert.
struct RowBlock {
  std::int64_t expert;
  std::int64_t begin;  ///< first grouped row
  std::int64_t rows;
};

/// The block size that cuts one expert's rows into equal blocks of at most `limit` rows. It is a
/// multiple of 8 (so must `limit` be), and only the last block may be smaller. So limit + 8 rows
/// make two halves, not a full block and a sliver.
inline std::int64_t block_rows(std::int64_t rows, std::int64_t limit) {
  const std::int64_t blocks = (rows + limit - 1) / limit;
  return blocks == 0 ? 0 : ((rows + blocks - 1) / blocks + 7) / 8 * 8;
}

/// Calls f(thread, RowBlock, part) for all blocks of all experts, `parts` times for each block.
///
/// Pieces are numbered expert by expert. A thread takes ascending numbers, so it finds a piece's
/// expert by walking on from that of its last piece. No list of blocks is stored.
template <class F>
void for_each_row_block(int threads, const std::int32_t* begins, const std::int32_t* ends,
                        std::int64_t experts, std::int64_t limit, std::int64_t parts, F&& f) {
  if (std::equal(begins, begins + experts, ends)) return;  // no rows
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int thread) {
    std::int64_t expert = 0;
    std::int64_t first = 0;  // number of this expert's first piece
    for (std::int64_t piece = next.fetch_add(1);; piece = next.fetch_add(1)) {
      std::int64_t rows = 0;
      std::int64_t size = 0;
      for (; expert < experts; ++expert) {
        rows = ends[expert] - begins[expert];
        size = block_rows(rows, limit);
        const std::int64_t pieces = size == 0 ? 0 : (rows + size - 1) / size * parts;
        if (piece < first + pieces) break;
        first += pieces;
      }
      if (expert == experts) return;
      const std::int64_t block = (piece - first) / parts;
      const std::int64_t begin = block * size;
      f(thread, RowBlock{expert, begins[expert] + begin, std::min(size, rows - begin)},
        (piece - first) % parts);
    }
  };
  if (threads == 1) return work(0);
#pragma omp parallel num_threads(threads)
  work(omp_get_thread_num());
}

}  // namespace sonicmoe::cpu
