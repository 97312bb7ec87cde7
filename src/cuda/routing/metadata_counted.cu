// Sorts the slots of top_k into grouped rows in one launch. For every 64 tokens top_k has counted
// how many have each expert. Each block sums those counts for itself: all of them, and those before
// its own tokens. Within a block no sort is needed. top_k chooses no expert twice for a token, so a
// block sets a bit for each of its (expert, token) pairs. The expert's bits below a slot's bit
// count the slots before it. Positions follow from counts and bits alone.
#include "cuda/routing/metadata.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kSlots = static_cast<int>(BlockCounts::kSlots);
constexpr int kBins = static_cast<int>(BlockCounts::kBins);
constexpr int kExperts = static_cast<int>(BlockCounts::kExperts);

/// Divides numbers up to 2048 by a divisor up to 32, exactly, without a division.
struct SmallDivisor {
  std::uint32_t factor;
  explicit SmallDivisor(std::int64_t by)
      : factor(static_cast<std::uint32_t>((65536 + by - 1) / by)) {}
  __device__ int operator()(int n) const {
    return static_cast<int>(static_cast<std::uint32_t>(n) * factor >> 16);
  }
};

/// Parameters of the kernel.
struct Counted {
  BlockCounts counts;
  HandedMetadata a;
  std::int32_t slots;
  std::int32_t top_k;
  std::int32_t experts;
  SmallDivisor by_top_k;
  SmallDivisor by_columns;  ///< a column of counts has 16 experts
  math::LoadClass load_class;
};

/// Shared memory of the kernel. `sums` is dead once sum_parts() has read it; then `sorted` takes
/// its place.
union Memory {
  /// Sums of counts over a part of the rows: [part][rows before the block's, all rows][expert].
  alignas(16) std::uint16_t sums[kThreads * 2 * 16];
  struct {
    std::int32_t row[kSlots];
    std::int32_t slot[kSlots];
    float score[kSlots];
    std::uint8_t earlier[2 * kBins];  ///< [expert][word]: bits set in the words before
  } sorted;
};

/// Fills Memory::sums: for each part and expert the counts in rows before `first_row`, and in all
/// rows. Part p has rows p, p + parts, ...; a thread takes 16 experts of a part.
__device__ __forceinline__ void sum_counts(const Counted& p, int first_row, std::uint16_t* sums) {
  constexpr int kTogether = 6;  // loads in flight
  const auto* const from = reinterpret_cast<const uint4*>(p.a.block_counts);
  const int thread = static_cast<int>(threadIdx.x);
  const int columns = static_cast<int>(p.counts.stride) / 16;
  const int rows = static_cast<int>(p.counts.rows);
  const int parts = p.by_columns(kThreads);
  const int part = p.by_columns(thread);
  if (part < parts) {
    const int column = thread - part * columns;
    // [which][word][odd]: a word has the counts of four experts. Its even or its odd ones are
    // summed as two 16-bit halves. They do not overflow: a thread sees fewer than 2^16 tokens.
    std::uint32_t sum[2][4][2] = {};
    for (int first = part; first < rows; first += kTogether * parts) {
      uint4 sixteen[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = first + i * parts;
        sixteen[i] = row < rows ? from[row * columns + column] : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const bool early = first + i * parts < first_row;
        const std::uint32_t word[4] = {sixteen[i].x, sixteen[i].y, sixteen[i].z, sixteen[i].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const std::uint32_t two = word[w] >> 8 * odd & 0x00ff00ffu;
            sum[1][w][odd] += two;
            if (early) sum[0][w][odd] += two;
          }
        }
      }
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      auto* const to =
          reinterpret_cast<uint2*>(sums + ((part * 2 + which) * columns + column) * 16);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const std::uint32_t even = sum[which][w][0], odd = sum[which][w][1];
        to[w] = {__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632)};
      }
    }
  }
}

/// Sums the parts: before[e] over the rows before the block's, all[e] over all rows.
__device__ __forceinline__ void sum_parts(const Counted& p, const std::uint16_t* sums,
                                          std::int32_t* before, std::int32_t* all) {
  const int thread = static_cast<int>(threadIdx.x);
  const int columns = static_cast<int>(p.counts.stride) / 16;
  const int parts = p.by_columns(kThreads);
  const int pairs = columns * 8;
  for (int i = thread; i < 2 * pairs; i += kThreads) {
    const auto* const mine = reinterpret_cast<const std::uint32_t*>(sums) + i;
    std::int32_t low = 0;
    std::int32_t high = 0;
#pragma unroll 16
    for (int q = 0; q < parts; ++q) {
      const std::uint32_t both = mine[q * 2 * pairs];
      low += static_cast<std::int32_t>(both & 0xffffu);
      high += static_cast<std::int32_t>(both >> 16);
    }
    std::int32_t* const to = i < pairs ? before + 2 * i : all + 2 * (i - pairs);
    to[0] = low;
    to[1] = high;
  }
}

struct Sums {
  std::int32_t one;
  std::int32_t other;
};
/// Two exclusive sums over the threads of a block. *before gets the thread's own two; all threads
/// get the two totals. The whole block calls it, once: of_warp is not guarded for a second call.
__device__ __forceinline__ Sums exclusive_sums_of_two(Sums own, Sums* before) {
  __shared__ Sums of_warp[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  Sums sum = own;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const std::int32_t one = __shfl_up_sync(kAllLanes, sum.one, distance);
    const std::int32_t other = __shfl_up_sync(kAllLanes, sum.other, distance);
    if (lane_id() >= distance) sum.one += one, sum.other += other;
  }
  if (lane_id() == kWarp - 1) of_warp[warp] = sum;
  __syncthreads();  // of_warp is complete
  const Sums theirs = lane_id() < kWarps ? of_warp[lane_id()] : Sums{};
  const bool earlier = lane_id() < warp;
  before->one = sum.one - own.one + __reduce_add_sync(kAllLanes, earlier ? theirs.one : 0);
  before->other = sum.other - own.other + __reduce_add_sync(kAllLanes, earlier ? theirs.other : 0);
  return {__reduce_add_sync(kAllLanes, theirs.one), __reduce_add_sync(kAllLanes, theirs.other)};
}

/// A block places the slots of counts.each rows of counts, which are 64 tokens each. The last block
/// has no slots. It writes offsets, counts and the rows that no expert owns, ranks the experts, and
/// resets the next tile counter.
__global__ void __launch_bounds__(kThreads) place_counted_slots(Counted p) {
  __shared__ Memory memory;
  __shared__ std::uint32_t has[2 * kBins];  // [expert][word]: a bit for each of 32 tokens
  __shared__ std::int32_t base[kExperts];   // row of the expert's first slot in the block
  __shared__ std::int32_t begin[kExperts];  // place of that slot in `sorted`
  __shared__ std::int32_t all[kExperts];    // rows of the expert
  const HandedMetadata& a = p.a;
  const int thread = static_cast<int>(threadIdx.x);
  const int words = 2 * static_cast<int>(p.counts.each);
  const int first_row = static_cast<int>(blockIdx.x * p.counts.each);
  const int first_token = first_row * static_cast<int>(BlockCounts::kTokens);
  const int first = min(first_token, p.slots / p.top_k) * p.top_k;
  const int count = min(words * kWarp * p.top_k, p.slots - first);
  for (int i = thread; i < p.experts * words; i += kThreads) has[i] = 0;
  wait_for_previous();
  let_next_start();
  __syncthreads();  // has[] is 0

  // All loads are issued before the first use of one, so that their latencies overlap.
  constexpr int kEach = kSlots / kThreads;
  int expert[kEach];
  float score[kEach] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread + i * kThreads;
    expert[i] = at < count ? a.slot_experts[first + at] : -1;
    if (at < count && a.row_scores != nullptr) score[i] = a.slot_scores[first + at];
  }
  sum_counts(p, first_row, memory.sums);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread + i * kThreads;
    if (expert[i] >= p.experts) expert[i] = -1;
    if (expert[i] < 0) continue;
    const int token = p.by_top_k(at);
    atomicOr(&has[expert[i] * words + token / kWarp], 1u << token % kWarp);
  }
  __syncthreads();  // has[] and memory.sums are complete
  sum_parts(p, memory.sums, base, all);
  __syncthreads();  // base[] and all[] are complete; all threads have read memory.sums

  const bool last = blockIdx.x + 1 == gridDim.x;
  Sums own{};
  if (thread < p.experts) {
    own.one = all[thread];
    for (int w = 0; w < words; ++w) {
      memory.sorted.earlier[thread * words + w] = static_cast<std::uint8_t>(own.other);
      own.other += __popc(has[thread * words + w]);
    }
  }
  Sums start;
  const Sums total = exclusive_sums_of_two(own, &start);
  if (thread < p.experts) {
    base[thread] += start.one;
    begin[thread] = start.other;
    if (last) a.offsets[thread] = start.one, a.counts[thread] = own.one;
  }
  __syncthreads();  // base[], begin[] and memory.sorted.earlier are complete
  if (last) {
    if (thread == 0) a.offsets[p.experts] = total.one, clear_next_counter(a);
    if (a.expert_order != nullptr) {
      rank_experts(all, p.experts, p.load_class, 0, begin, a.expert_order);
    }
    for (int row = total.one + thread; row < p.slots; row += kThreads) {
      empty_row(a, row);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread + i * kThreads;
    if (at >= count) break;
    std::int32_t row = -1;
    if (expert[i] >= 0) {
      const int token = p.by_top_k(at);
      const int word = expert[i] * words + token / kWarp;
      const int before =
          memory.sorted.earlier[word] + __popc(has[word] & ((1u << token % kWarp) - 1u));
      row = base[expert[i]] + before;
      // With counts of other slots `row` may lie past the arrays. Such a slot gets no row.
      if (row >= p.slots) row = -1;
      const int to = begin[expert[i]] + before;
      memory.sorted.row[to] = row;
      memory.sorted.slot[to] = at;
      memory.sorted.score[to] = score[i];
    }
    a.slot_rows[first + at] = row;
  }
  __syncthreads();  // the slots in memory.sorted are complete
  for (int i = thread; i < total.other; i += kThreads) {
    const std::int32_t row = memory.sorted.row[i];
    const std::int32_t at = memory.sorted.slot[i];
    if (row < 0) continue;
    a.row_slots[row] = first + at;
    a.row_tokens[row] = first_token + p.by_top_k(at);
    if (a.row_scores != nullptr) a.row_scores[row] = memory.sorted.score[i];
  }
}

}  // namespace

void place_counted(const MetadataDesc& d, const HandedMetadata& a, const BlockCounts& counts,
                   const Exec& exec) {
  const Counted counted{counts,
                        a,
                        static_cast<std::int32_t>(d.slots()),
                        static_cast<std::int32_t>(d.top_k),
                        static_cast<std::int32_t>(d.experts),
                        SmallDivisor(d.top_k),
                        SmallDivisor(counts.stride / 16),
                        math::LoadClass(d.experts, d.slots())};
  launch_early(place_counted_slots, blocks_for(counts.rows, counts.each) + 1, kThreads, 0, exec,
               counted);
}

}  // namespace sonicmoe::cuda
