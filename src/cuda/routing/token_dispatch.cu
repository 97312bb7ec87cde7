// Which tokens a rank sends to which ranks. Two launches, in which a thread has a token:
//
// 1. count_rows: each block counts the rows and pairs of its tokens for each rank.
// 2. place_rows: each block sums the counts of the blocks before and places its tokens' rows.
//
// Positions follow from counts alone, not from the order in which blocks or warps run.
#include "core/backends.h"
#include "cuda/device/warp.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 256;  // tokens of a block
constexpr int kWarps = kThreads / kWarp;

struct Parameters {
  TokenDispatchArgs a;
  std::int64_t tokens, rows;
  int experts, ranks, top_k, columns;
  bool packed;
  std::int32_t* counters;  ///< (2P, blocks): rows for each rank, pairs for each rank

  __device__ std::int64_t token() const {
    return std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  }
  /// A choice among the rank's own experts, or a number from `experts` on.
  __device__ unsigned local(std::int64_t choice, int rank) const {
    return static_cast<unsigned>(a.ids[choice]) - static_cast<unsigned>(rank * experts);
  }
  /// How many choices of this thread's token the rank takes.
  __device__ int taken(int rank) const {
    if (token() >= tokens) return 0;
    const std::int64_t first = token() * top_k;
    int n = 0;
    for (int k = 0; k < top_k; ++k) n += local(first + k, rank) < static_cast<unsigned>(experts);
    return min(n, columns);
  }
  __device__ std::int32_t* counters_of(int i) const {
    return counters + std::int64_t{gridDim.x} * i;
  }
};

/// Two numbers for each rank in shared memory, both 0.
__device__ std::int32_t* zeros(int ranks) {
  extern __shared__ std::int32_t shared[];
  for (int i = threadIdx.x; i < 2 * ranks; i += kThreads) shared[i] = 0;
  __syncthreads();
  return shared;
}

__global__ void __launch_bounds__(kThreads) count_rows(Parameters p) {
  std::int32_t* const counts = zeros(p.ranks);
  wait_for_previous();
  let_next_start();
  for (int rank = 0; rank < p.ranks; ++rank) {
    const int taken = p.taken(rank);
    const int rows = __popc(__ballot_sync(kAllLanes, taken > 0));
    const int pairs = __reduce_add_sync(kAllLanes, taken);
    if (lane_id() != 0 || rows == 0) continue;
    atomicAdd(&counts[rank], rows);
    atomicAdd(&counts[p.ranks + rank], pairs);
  }
  __syncthreads();  // all counts are complete
  for (int i = threadIdx.x; i < 2 * p.ranks; i += kThreads) {
    p.counters_of(i)[blockIdx.x] = counts[i];
  }
}

/// Clears a row's choices from number n on.
__device__ __forceinline__ void clear_choices(const Parameters& p, std::int32_t* choices, int n) {
  for (; n < p.columns; ++n) {
    choices[n] = -1;
    choices[p.columns + n] = 0;
  }
}

/// Writes what goes along with this thread's token to a rank.
__device__ void write_row(const Parameters& p, int rank, std::int32_t row) {
  const std::int64_t first = p.token() * p.top_k;
  const std::int64_t place = std::int64_t{row} * p.columns;
  std::int32_t* const choices = p.a.choices + 2 * place;
  p.a.row_tokens[row] = static_cast<std::int32_t>(p.token());
  int n = 0;
  for (int k = 0; k < p.top_k && n < p.columns; ++k) {
    const unsigned id = p.local(first + k, rank);
    if (id >= static_cast<unsigned>(p.experts)) continue;
    choices[n] = static_cast<std::int32_t>(id);
    choices[p.columns + n] = __float_as_int(p.a.scores[first + k]);
    p.a.score_places[first + k] = static_cast<std::int32_t>(1 + place + n);
    ++n;
  }
  clear_choices(p, choices, n);
}

/// Clears a place that no token has.
__device__ void clear_row(const Parameters& p, std::int64_t row) {
  p.a.row_tokens[row] = 0;
  if (!p.packed) clear_choices(p, p.a.choices + 2 * row * p.columns, 0);
}

__global__ void __launch_bounds__(kThreads) place_rows(Parameters p) {
  // Rows for each rank: (P) in all blocks, (P) in the blocks before, (warps, P) in each warp. The
  // last become each warp's first row.
  extern __shared__ std::int32_t shared[];
  std::int32_t *const all = shared, *const first = all + p.ranks, *const of_warp = first + p.ranks;
  const int blocks = static_cast<int>(gridDim.x), warp = static_cast<int>(threadIdx.x) / kWarp;
  wait_for_previous();
  let_next_start();
  for (int i = warp; i < 2 * p.ranks; i += kWarps) {
    if (i >= p.ranks && blockIdx.x > 0) break;  // one block writes the numbers of pairs
    int before = 0, total = 0;
    for (int block = lane_id(); block < blocks; block += kWarp) {
      const std::int32_t count = p.counters_of(i)[block];
      total += count;
      if (block < static_cast<int>(blockIdx.x)) before += count;
    }
    before = __reduce_add_sync(kAllLanes, before);
    total = __reduce_add_sync(kAllLanes, total);
    if (lane_id() != 0) continue;
    if (i < p.ranks) all[i] = total, first[i] = before;
    if (blockIdx.x == 0) p.a.numbers[i] = total;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    p.a.numbers[2 * p.ranks] = p.experts;
    p.a.numbers[2 * p.ranks + 1] = p.tokens;
  }
  for (int rank = 0; rank < p.ranks; ++rank) {
    const unsigned rows = __ballot_sync(kAllLanes, p.taken(rank) > 0);
    if (lane_id() == 0) of_warp[warp * p.ranks + rank] = __popc(rows);
  }
  __syncthreads();  // `all`, `first` and `of_warp` are complete
  const std::int32_t packed = exclusive_sums<kThreads>(
      p.ranks, [&](int rank) { return all[rank]; },
      [&](int rank, std::int32_t before) {
        const std::int64_t start = p.packed ? before : rank * p.tokens;
        auto row = static_cast<std::int32_t>(start + first[rank]);
        for (int w = 0; w < kWarps; ++w) {
          std::int32_t& rows = of_warp[w * p.ranks + rank];
          const std::int32_t next = row + rows;
          rows = row;
          row = next;
        }
      });
  // exclusive_sums() ends with a barrier: `of_warp` has each warp's first row.
  const bool exists = p.token() < p.tokens;
  if (exists) {
    for (int k = 0; k < p.top_k; ++k) p.a.score_places[p.token() * p.top_k + k] = 0;
  }
  for (int rank = 0; rank < p.ranks; ++rank) {
    const bool goes = p.taken(rank) > 0;
    const unsigned rows = __ballot_sync(kAllLanes, goes);
    const int before = __popc(rows & ((1u << lane_id()) - 1));
    const std::int32_t row = goes ? of_warp[warp * p.ranks + rank] + before : -1;
    if (exists) p.a.token_rows[p.token() * p.ranks + rank] = row;
    if (goes) write_row(p, rank, row);
  }
  for (std::int64_t row = p.token(); row < p.rows; row += std::int64_t{blocks} * kThreads) {
    const auto place = static_cast<std::uint32_t>(row),
               tokens = static_cast<std::uint32_t>(p.tokens);
    const bool empty =
        p.packed ? row >= packed : static_cast<std::int32_t>(place % tokens) >= all[place / tokens];
    if (empty) clear_row(p, row);
  }
}

unsigned blocks_of(const TokenDispatchDesc& d) {
  return std::max(1u, blocks_for(d.tokens, kThreads));  // one without tokens: it writes numbers
}

std::size_t workspace(const TokenDispatchDesc& d, const Exec&) {
  return std::size_t{4} * 2 * static_cast<std::size_t>(d.ranks) * blocks_of(d);
}

Status run(const TokenDispatchDesc& d, const TokenDispatchArgs& a, void* memory,
           const Exec& exec) noexcept {
  const Parameters p{.a = a,
                     .tokens = d.tokens,
                     .rows = d.rows(),
                     .experts = static_cast<int>(d.experts),
                     .ranks = static_cast<int>(d.ranks),
                     .top_k = static_cast<int>(d.top_k),
                     .columns = static_cast<int>(d.columns()),
                     .packed = d.packed,
                     .counters = static_cast<std::int32_t*>(memory)};
  const std::size_t of_ranks = std::size_t{4} * static_cast<std::size_t>(d.ranks);
  launch_early(count_rows, blocks_of(d), kThreads, 2 * of_ranks, exec, p);
  launch_early(place_rows, blocks_of(d), kThreads, (2 + kWarps) * of_ranks, exec, p);
  return launched("token_dispatch: launch");
}

}  // namespace

const Kernel<TokenDispatchDesc> kTokenDispatch = {
    .op = "token_dispatch",
    .name = "cuda.token_dispatch",
    .arch = 80,
    .and_later = true,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cuda
