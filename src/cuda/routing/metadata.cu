// Sorts slots into grouped rows by stable counting sorts. The last sort is by expert. For lists,
// sorts by token come before it, a digit at a time, unless the lists come sorted
// (Handoff::token_offsets). A sort is three launches:
//
// 1. count_keys: each block counts the keys of its slots.
// 2. sum_blocks: each count becomes the number of equal keys in the blocks before.
// 3. place_slots: each block places its slots.
//
// Positions follow from counts alone, not from the order in which blocks or warps run.
//
// All three are launched early. place_slots may sort its slots before it waits for sum_blocks,
// because the kernel that wrote the slots has ended by then. count_keys waits for that kernel
// before it triggers sum_blocks, and sum_blocks waits for count_keys before it triggers
// place_slots. With more than kSharedBins keys, make_starts and place_slots_slowly replace
// place_slots; they are not launched early.
//
// Where top_k stored its counts, metadata needs one launch instead, in metadata_counted.cu.
#include <algorithm>
#include <bit>
#include <cinttypes>

#include "core/backends.h"
#include "cuda/routing/metadata.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kSharedBins = 1024;  // more keys than this are counted in global memory
constexpr int kWarps = 4;          // of a block
constexpr int kThreads = kWarps * kWarp;
constexpr int kTurns = 4;                       // slots that a thread holds
constexpr int kBatch = kTurns * kThreads;       // slots that a block sorts at a time
constexpr int kWarpBatch = kTurns * kWarp;      // consecutive slots, of one warp
constexpr int kSumBins = 8;                     // of a block of sum_blocks: one sector of counters
constexpr int kSumParts = 64;                   // into which sum_blocks cuts the counters of a bin
constexpr int kDigitBits = 10;                  // of a token id, at most, in one sort
constexpr std::int64_t kMaxCounters = 4 << 20;  // of one sort

/// How a sort divides its slots among blocks. It depends on sizes alone.
struct Shape {
  std::int64_t slots;
  int bins;     ///< different keys
  int batches;  ///< of a block
  int blocks;   ///< that count and place slots

  static Shape of(std::int64_t slots, std::int64_t bins) {
    const std::int64_t most = std::max<std::int64_t>(1, kMaxCounters / bins);
    const std::int64_t all = std::max<std::int64_t>(1, (slots + kBatch - 1) / kBatch);
    const std::int64_t batches = (all + most - 1) / most;
    // One block even without slots: it writes zero counts and offsets.
    return {slots, static_cast<int>(bins), static_cast<int>(batches),
            static_cast<int>((all + batches - 1) / batches)};
  }
  __host__ __device__ bool shared() const { return bins <= kSharedBins; }
  std::int64_t counters() const { return std::int64_t{blocks} * bins; }
  __device__ std::int64_t begin() const { return std::int64_t{blockIdx.x} * batches * kBatch; }
  __device__ std::int64_t end() const { return begin() + std::int64_t{batches} * kBatch; }
};

/// The slots to sort, in the order of the sort's input. `order` lists them; null means slot i at
/// position i. *length is their number, at most all; null means all.
struct Source {
  const std::int32_t* order;
  const std::int32_t* length;
  __device__ std::int64_t size(std::int64_t slots) const {
    return length == nullptr ? slots : min(std::int64_t{*length}, slots);
  }
  __device__ std::int32_t slot(std::int64_t i) const {
    return order == nullptr ? static_cast<std::int32_t>(i) : order[i];
  }
};

/// Keys of the sort by expert: a slot's expert, or -1 for sentinels. For each slot without a key,
/// count_keys of the first sort calls look(), which reports bad ids; by expert no id is bad.
struct ByExpert {
  const std::int32_t* slot_experts;
  std::int32_t experts;

  __device__ int key(std::int32_t slot) const {
    const std::int32_t e = slot_experts[slot];
    return e >= 0 && e < experts ? e : -1;
  }
  __device__ void look(std::int32_t) const {}
};

/// Keys of the sorts by token, for lists: a digit of the token, or -1 for slots that are no rows
/// (sentinels and bad ids). look() is as in ByExpert.
struct ByToken {
  const std::int32_t* slot_experts;
  const std::int32_t* slot_tokens;
  std::int32_t experts;
  std::int32_t tokens;
  int shift;
  int mask;  ///< 0 with assume_sorted: all keys are equal, and the sort only drops slots
  std::int32_t* error_word;

  __device__ int key(std::int32_t slot) const {
    const std::int32_t e = slot_experts[slot];
    const std::int32_t t = slot_tokens[slot];
    return e >= 0 && e < experts && t >= 0 && t < tokens ? t >> shift & mask : -1;
  }
  __device__ void look(std::int32_t slot) const {
    const std::int32_t t = slot_tokens[slot];
    if (t < 0 || t >= tokens) report(error_word, kBadTokenId);
  }
};

/// Output of a sort by token. Like every output of a sort it has these members:
/// - load(slot) reads the payload of place(slot, at, payload), which writes at position `at`;
///   placed(slot, at) writes at the slot;
/// - drop(slot) handles a slot without a key, past_end(i) a position without a slot;
/// - start(key, at) gets the first position of a key, total(keys, n) the number of slots with keys;
/// - rank() ranks the keys by their counts, if ranks().
struct ToOrder {
  std::int32_t* order;      ///< (S): position -> slot
  std::int32_t* slot_rows;  ///< (S): set to -1 for slots that are no rows
  std::int32_t* length;     ///< (1): slots that are rows; null after the first sort
  bool fill_tail;           ///< set `order` to -1 past *length

  struct Payload {};
  __device__ Payload load(std::int32_t) const { return {}; }
  __device__ void place(std::int32_t slot, std::int32_t at, Payload) const { order[at] = slot; }
  __device__ void placed(std::int32_t, std::int32_t) const {}
  __device__ void drop(std::int32_t slot) const { slot_rows[slot] = -1; }
  __device__ void past_end(std::int64_t i) const {
    if (fill_tail) order[i] = -1;
  }
  __device__ void start(int, std::int32_t) const {}
  __device__ void total(int, std::int32_t n) const {
    if (length != nullptr) *length = n;
  }
  bool ranks() const { return false; }
  __device__ void rank(const std::int32_t*, int, int) const {}
};

/// Output of the sort by expert.
struct ToRows {
  HandedMetadata a;
  std::uint32_t top_k;  ///< 0 for lists
  std::int32_t rows;    ///< the capacity: what is past it has no row
  math::LoadClass load_class;

  struct Payload {
    std::int32_t token;
    float score;
  };
  __device__ Payload load(std::int32_t slot) const {
    return {top_k == 0 ? a.slot_tokens[slot]
                       : static_cast<std::int32_t>(static_cast<std::uint32_t>(slot) / top_k),
            a.row_scores != nullptr ? a.slot_scores[slot] : 0.0f};
  }
  /// Writes by row. place_slots calls it in row order, so neighbouring threads write neighbouring
  /// rows.
  __device__ void place(std::int32_t slot, std::int32_t row, const Payload& payload) const {
    a.row_slots[row] = slot;
    a.row_tokens[row] = payload.token;
    if (a.row_scores != nullptr) a.row_scores[row] = payload.score;
  }
  /// Writes by slot. place_slots calls it in slot order.
  __device__ void placed(std::int32_t slot, std::int32_t row) const {
    a.slot_rows[slot] = row < rows ? row : -1;
    if (a.sorted) a.token_slots[slot] = slot;
  }
  __device__ void drop(std::int32_t slot) const { a.slot_rows[slot] = -1; }
  __device__ void past_end(std::int64_t row) const {
    empty_row(a, row);
    if (!a.sorted) return;
    a.slot_rows[row] = -1;  // as many slots as rows are in use, and the first ones
    a.token_slots[row] = -1;
  }
  __device__ void start(int expert, std::int32_t row) const { a.offsets[expert] = min(row, rows); }
  /// One thread of the grid calls this, once. So it also resets the tile counter.
  __device__ void total(int experts, std::int32_t n) const {
    a.offsets[experts] = min(n, rows);
    clear_next_counter(a);
  }
  bool ranks() const { return a.expert_order != nullptr; }
  __device__ void rank(const std::int32_t* counts, int experts, int block) const {
    __shared__ std::int32_t others[kThreads];
    rank_experts(counts, experts, load_class, block, others, a.expert_order);
  }
};

/// counters[block][bin] = how many of the block's slots have the key `bin`.
template <class By>
__global__ void __launch_bounds__(kThreads)
    count_keys(Shape shape, Source source, By by, std::int32_t* counters) {
  __shared__ std::int32_t shared[kSharedBins];
  std::int32_t* const mine = counters + std::int64_t{blockIdx.x} * shape.bins;
  std::int32_t* const count = shape.shared() ? shared : mine;
  if (!shape.shared()) wait_for_previous();
  for (int b = threadIdx.x; b < shape.bins; b += kThreads) count[b] = 0;
  wait_for_previous();
  let_next_start();
  __syncthreads();  // all counters are 0
  const std::int64_t end = min(shape.end(), source.size(shape.slots));
  for (std::int64_t i = shape.begin() + threadIdx.x; i < end; i += kBatch) {
    // All loads come before the first atomicAdd, because loads are not moved ahead of an atomic.
    std::int32_t slot[kTurns];
    int key[kTurns];
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      slot[r] = i + r * kThreads < end ? source.slot(i + r * kThreads) : -1;
    }
#pragma unroll
    for (int r = 0; r < kTurns; ++r) key[r] = slot[r] >= 0 ? by.key(slot[r]) : -1;
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      if (key[r] >= 0) atomicAdd(&count[key[r]], 1);
      if (key[r] < 0 && slot[r] >= 0 && source.order == nullptr) by.look(slot[r]);
    }
  }
  if (!shape.shared()) return;
  __syncthreads();  // all counts are complete
  for (int b = threadIdx.x; b < shape.bins; b += kThreads) mine[b] = shared[b];
}

/// Replaces counters[block][bin] by its sum over the blocks before. totals[bin] becomes the sum
/// over all blocks. A thread block takes kSumBins bins; its thread p * kSumBins + b takes part p of
/// the counters of bin b.
__global__ void __launch_bounds__(kSumBins* kSumParts)
    sum_blocks(Shape shape, std::int32_t* counters, std::int32_t* totals) {
  __shared__ std::int32_t sums[kSumBins][kSumParts + 1];
  const int column = static_cast<int>(threadIdx.x) % kSumBins;
  const int row = static_cast<int>(threadIdx.x) / kSumBins;
  const int bin = static_cast<int>(blockIdx.x) * kSumBins + column;
  const int part = (shape.blocks + kSumParts - 1) / kSumParts;
  const int first = row * part;
  const int end = bin < shape.bins ? min(first + part, shape.blocks) : 0;
  const auto counter = [&](int block) -> std::int32_t& {
    return counters[std::int64_t{block} * shape.bins + bin];
  };
  constexpr int kTogether = 8;  // loads in flight; a longer part is read twice
  std::int32_t count[kTogether];
  const auto load = [&](int i) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) count[j] = i + j < end ? counter(i + j) : 0;
  };
  wait_for_previous();
  let_next_start();
  std::int32_t sum = 0;
  for (int i = first; i < end; i += kTogether) {
    load(i);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) sum += count[j];
  }
  sums[column][row] = sum;
  __syncthreads();  // the sums of all parts are complete
  // Warp w scans the parts of bin w, two parts a lane.
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  static_assert(kSumParts == 2 * kWarp && kSumBins * kSumParts / kWarp >= kSumBins);
  if (warp < kSumBins) {
    const std::int32_t low = sums[warp][2 * lane_id()];
    const std::int32_t both = low + sums[warp][2 * lane_id() + 1];
    std::int32_t scan = both;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const std::int32_t before = __shfl_up_sync(kAllLanes, scan, distance);
      if (lane_id() >= distance) scan += before;
    }
    sums[warp][2 * lane_id()] = scan - both;
    sums[warp][2 * lane_id() + 1] = scan - both + low;
    const int scanned = static_cast<int>(blockIdx.x) * kSumBins + warp;
    if (lane_id() == kWarp - 1 && scanned < shape.bins) totals[scanned] = scan;
  }
  __syncthreads();  // the scans of all bins are complete
  std::int32_t before = sums[column][row];
  for (int i = first; i < end; i += kTogether) {
    if (part > kTogether) load(i);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (i + j < end) counter(i + j) = before;
      before += count[j];
    }
  }
}

/// With more than kSharedBins bins one block computes where each bin starts, for all blocks of
/// place_slots_slowly. starts[bins] is the total.
__global__ void __launch_bounds__(1024)
    make_starts(Shape shape, const std::int32_t* totals, std::int32_t* starts) {
  const std::int32_t total = exclusive_sums<1024>(
      shape.bins, [&](int bin) { return totals[bin]; },
      [&](int bin, std::int32_t start) { starts[bin] = start; });
  if (threadIdx.x == 0) starts[shape.bins] = total;
}

/// Returns where each lane's slot goes, or -1 for a slot without a key. A warp calls it for 32
/// slots at a time, in their order. next[key] is where the next slot with that key goes. `same` has
/// a bit for each lane with this lane's key.
__device__ std::int32_t take_places(int key, unsigned same, std::int32_t* next) {
  const int before = __popc(same & ((1u << lane_id()) - 1u));
  const std::int32_t at = key >= 0 ? next[key] + before : -1;
  __syncwarp();  // all lanes have read next[] before one lane a key advances it
  if (key >= 0 && before == 0) next[key] = at + __popc(same);
  __syncwarp();  // the warp's next call sees the new next[]
  return at;
}

/// Places a block's slots, a batch at a time. A block first sorts a batch in shared memory, so that
/// neighbouring threads write neighbouring rows. It sorts its first batch before it waits for
/// sum_blocks. Blocks from shape.blocks on rank the experts instead.
template <class By, class To>
__global__ void __launch_bounds__(kThreads)
    place_slots(Shape shape, Source source, By by, To to, const std::int32_t* counters,
                const std::int32_t* totals) {
  extern __shared__ std::int32_t memory[];
  std::int32_t* const next = memory;                       // (kWarps, bins): see take_places
  std::int32_t* const begin = next + kWarps * shape.bins;  // (bins): a key's start in the batch
  std::int32_t* const base = begin + shape.bins;           // (bins): and in the output
  __shared__ std::int32_t sorted_slot[kBatch];
  __shared__ std::int32_t sorted_key[kBatch];
  __shared__ typename To::Payload sorted_payload[kBatch];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int block = static_cast<int>(blockIdx.x);
  if (block >= shape.blocks) {
    wait_for_previous();
    return to.rank(totals, shape.bins, block - shape.blocks);
  }
  const std::int64_t size = source.size(shape.slots);
  std::int32_t total = 0;

  for (int batch = 0; batch < shape.batches; ++batch) {
    for (int b = threadIdx.x; b < kWarps * shape.bins; b += kThreads) next[b] = 0;
    __syncthreads();  // next[] is 0
    const std::int64_t first =
        shape.begin() + std::int64_t{batch} * kBatch + warp * kWarpBatch + lane_id();
    std::int32_t slot[kTurns];
    int key[kTurns];
    typename To::Payload payload[kTurns];
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      const std::int64_t i = first + r * kWarp;
      slot[r] = i < size ? source.slot(i) : -1;
    }
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      if (slot[r] >= 0) payload[r] = to.load(slot[r]);
    }
#pragma unroll
    for (int r = 0; r < kTurns; ++r) key[r] = slot[r] >= 0 ? by.key(slot[r]) : -1;
    unsigned same[kTurns];
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      if (key[r] >= 0) atomicAdd(&next[warp * shape.bins + key[r]], 1);
      same[r] = __match_any_sync(kAllLanes, key[r]);
    }
    __syncthreads();  // the counts of all warps are complete
    const int placed = exclusive_sums<kThreads>(
        shape.bins,
        [&](int b) {
          std::int32_t sum = 0;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) sum += next[w * shape.bins + b];
          return sum;
        },
        [&](int b, std::int32_t start) {
          begin[b] = start;
          std::int32_t at = start;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            const std::int32_t count = next[w * shape.bins + b];
            next[w * shape.bins + b] = at;
            at += count;
          }
        });
    std::int32_t at[kTurns];
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      at[r] = take_places(key[r], same[r], next + warp * shape.bins);
      if (at[r] < 0) continue;
      sorted_slot[at[r]] = slot[r];
      sorted_key[at[r]] = key[r];
      sorted_payload[at[r]] = payload[r];
    }
    if (batch == 0) {
      wait_for_previous();  // for sum_blocks: counters and totals are complete
#pragma unroll 8
      for (int b = threadIdx.x; b < shape.bins; b += kThreads) {
        base[b] = counters[std::int64_t{blockIdx.x} * shape.bins + b];
      }
      total = exclusive_sums<kThreads>(
          shape.bins, [&](int b) { return totals[b]; },
          [&](int b, std::int32_t start) {
            base[b] += start;
            if (blockIdx.x == 0) to.start(b, start);
          });
      if (blockIdx.x == 0 && threadIdx.x == 0) to.total(shape.bins, total);
    }
    __syncthreads();  // the sorted batch and base[] are complete
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      if (at[r] >= 0) {
        to.placed(slot[r], base[key[r]] + at[r] - begin[key[r]]);
      } else if (slot[r] >= 0) {
        to.drop(slot[r]);
      }
    }
    for (int i = threadIdx.x; i < placed; i += kThreads) {
      const int k = sorted_key[i];
      to.place(sorted_slot[i], base[k] + i - begin[k], sorted_payload[i]);
    }
    if (batch + 1 == shape.batches) break;
    __syncthreads();  // all threads have read the batch and base[]
    // The slots of a key come warp by warp, so the last warp's `next` is the end of all of them.
    for (int b = threadIdx.x; b < shape.bins; b += kThreads) {
      base[b] += next[(kWarps - 1) * shape.bins + b] - begin[b];
    }
    __syncthreads();  // base[] is complete; all threads have read next[] and begin[]
  }
  const std::int64_t tail = min(shape.end(), shape.slots);
  for (std::int64_t i = shape.begin() + threadIdx.x; i < tail; i += kThreads) {
    if (i >= total) to.past_end(i);
  }
}

/// place_slots for more than kSharedBins bins: counters in global memory, one warp per block, and
/// no sort before the writes. It is not launched early, so it does not wait.
template <class By, class To>
__global__ void __launch_bounds__(kWarp)
    place_slots_slowly(Shape shape, Source source, By by, To to, std::int32_t* counters,
                       const std::int32_t* totals, const std::int32_t* starts) {
  const int block = static_cast<int>(blockIdx.x);
  if (block >= shape.blocks) return to.rank(totals, shape.bins, block - shape.blocks);
  std::int32_t* const next = counters + std::int64_t{blockIdx.x} * shape.bins;
  for (int b = threadIdx.x; b < shape.bins; b += kWarp) {
    next[b] += starts[b];
    if (blockIdx.x == 0) to.start(b, starts[b]);
  }
  const std::int32_t total = starts[shape.bins];
  if (blockIdx.x == 0 && threadIdx.x == 0) to.total(shape.bins, total);
  __syncwarp();
  const std::int64_t end = min(shape.end(), source.size(shape.slots));
  for (std::int64_t first = shape.begin(); first < end; first += kWarp) {
    const std::int64_t i = first + lane_id();
    const std::int32_t slot = i < end ? source.slot(i) : -1;
    const int key = slot >= 0 ? by.key(slot) : -1;
    const std::int32_t at = take_places(key, __match_any_sync(kAllLanes, key), next);
    if (at >= 0) {
      to.place(slot, at, to.load(slot));
      to.placed(slot, at);
    } else if (slot >= 0) {
      to.drop(slot);
    }
  }
  const std::int64_t tail = min(shape.end(), shape.slots);
  for (std::int64_t i = shape.begin() + threadIdx.x; i < tail; i += kWarp) {
    if (i >= total) to.past_end(i);
  }
}

/// token_offsets[t] = how many of the sorted slots have a token below t, for t from 0 to T. A
/// thread finds one by binary search.
__global__ void find_tokens(const std::int32_t* order, const std::int32_t* length,
                            const std::int32_t* slot_tokens, std::int64_t tokens,
                            std::int32_t* token_offsets) {
  const std::int64_t t = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t > tokens) return;
  std::int32_t low = 0;
  std::int32_t high = *length;
  while (low < high) {
    const std::int32_t middle = low + (high - low) / 2;
    if (slot_tokens[order[middle]] < t) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  token_offsets[t] = low;
}

/// Lowers *first to the first position of the lists that checked mode refuses: a token id outside
/// [0, T) or, with assume_sorted, one below the id before it.
__global__ void find_bad_ids(MetadataDesc d, const std::int32_t* slot_tokens,
                             unsigned long long* first) {
  const std::int64_t s = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (s >= d.list_length) return;
  const std::int32_t t = slot_tokens[s];
  if (t < 0 || t >= d.tokens || (d.assume_sorted && s > 0 && t < slot_tokens[s - 1])) {
    atomicMin(first, static_cast<unsigned long long>(s));
  }
}

Status check_lists(const MetadataDesc& d, const MetadataArgs& a, void* scratch,
                   cudaStream_t stream) {
  if (d.list_length == 0) return {};
  std::uint64_t position = 0;
  const auto launch = [&](unsigned long long* first) {
    find_bad_ids<<<blocks_for(d.list_length, 256), 256, 0, stream>>>(d, a.slot_tokens, first);
  };
  if (Status s = first_bad(scratch, stream, "metadata: check", &position, launch); !s.ok()) {
    return s;
  }
  if (position == ~std::uint64_t{0}) return {};
  const auto s = static_cast<std::int64_t>(position);
  std::int32_t token[2] = {};  // at s - 1 and s
  const auto fetch = [&](std::int32_t* to, const std::int32_t* from) {
    return cudaMemcpyAsync(to, from, 4, cudaMemcpyDeviceToHost, stream);
  };
  cudaError_t error = fetch(&token[1], a.slot_tokens + s);
  if (error == cudaSuccess && s > 0) error = fetch(&token[0], a.slot_tokens + s - 1);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return to_status(error, "metadata: check");
  if (token[1] < 0 || token[1] >= d.tokens) {
    return Status::error(StatusCode::invalid_data,
                         "token ids: got %d at position %" PRId64 ", allowed: 0 to %" PRId64,
                         token[1], s, d.tokens - 1);
  }
  return Status::error(StatusCode::invalid_data,
                       "token ids: got %d after %d at position %" PRId64
                       ", allowed: ascending ids with assume_sorted",
                       token[1], token[0], s);
}

/// The digits of a token id: as few as kDigitBits allows, all of one width. With assume_sorted
/// there is one digit of 0 bits.
struct Digits {
  int count;
  int bits;
  explicit Digits(const MetadataDesc& d) {
    const auto last = static_cast<std::uint64_t>(std::max<std::int64_t>(d.tokens, 1) - 1);
    const int width = d.assume_sorted ? 0 : std::bit_width(last);
    count = std::max(1, (width + kDigitBits - 1) / kDigitBits);
    bits = (width + count - 1) / count;
  }
};

/// The workspace. The check's scratch comes first, then these arrays.
struct Memory {
  std::int32_t* counters;  // of one sort; all sorts share them
  std::int32_t* totals;    // (bins): of the sorts by token
  std::int32_t* starts;    // (E + 1): only with more than kSharedBins experts
  std::int32_t* order;     // (S): lists with more than one digit, output of every other sort
  std::int32_t* length;    // (1): lists, slots that are rows

  static std::size_t layout(const MetadataDesc& d, void* base, Memory* out) {
    const Shape experts = Shape::of(d.slots(), d.experts);
    const Shape digits = Shape::of(d.slots(), std::int64_t{1} << Digits(d).bits);
    const bool lists = d.top_k == 0;
    std::int32_t* at = static_cast<std::int32_t*>(base);
    std::int64_t end = 2;  // in words of 4 bytes; the check's scratch takes kCheckBytes
    const auto take = [&](std::int32_t** array, std::int64_t count) {
      if (out != nullptr) *array = at + end;
      end += count;
    };
    Memory unused;
    Memory& m = out == nullptr ? unused : *out;
    take(&m.counters, std::max(experts.counters(), lists ? digits.counters() : 0));
    take(&m.totals, digits.bins);
    take(&m.starts, experts.shared() ? 0 : experts.bins + 1);
    take(&m.order, lists && Digits(d).count > 1 ? d.slots() : 0);
    take(&m.length, 1);
    return 4 * static_cast<std::size_t>(end);
  }
};

/// Launches one stable counting sort. The count of key b goes to totals[b].
template <class By, class To>
void sort(const Shape& shape, const Source& source, const By& by, const To& to, const Memory& m,
          std::int32_t* totals, const Exec& exec) {
  const unsigned blocks = static_cast<unsigned>(shape.blocks);
  launch_early(count_keys<By>, blocks, kThreads, 0, exec, shape, source, by, m.counters);
  launch_early(sum_blocks, blocks_for(shape.bins, kSumBins), kSumBins * kSumParts, 0, exec, shape,
               m.counters, totals);
  // Blocks past those that place slots rank the experts, a thread an expert.
  const auto with_ranks = [&](int threads) {
    return blocks + (to.ranks() ? blocks_for(shape.bins, threads) : 0);
  };
  if (shape.shared()) {
    const std::size_t bytes = 4 * static_cast<std::size_t>((kWarps + 2) * shape.bins);
    launch_early(place_slots<By, To>, with_ranks(kThreads), kThreads, bytes, exec, shape, source,
                 by, to, m.counters, totals);
  } else {
    const cudaStream_t stream = stream_of(exec);
    make_starts<<<1, 1024, 0, stream>>>(shape, totals, m.starts);
    place_slots_slowly<<<with_ranks(kWarp), kWarp, 0, stream>>>(shape, source, by, to, m.counters,
                                                                totals, m.starts);
  }
}

/// For lists: writes token_slots, token_offsets and, for slots that are no rows, slot_rows = -1.
void sort_by_token(const MetadataDesc& d, const MetadataArgs& a, const Memory& m,
                   const Exec& exec) {
  const Digits digits(d);
  const Shape shape = Shape::of(d.slots(), std::int64_t{1} << digits.bits);
  Source source{nullptr, nullptr};
  for (int i = 0; i < digits.count; ++i) {
    const bool last = i + 1 == digits.count;
    // The sorts write to the two arrays alternately, so that the last one writes token_slots.
    std::int32_t* const order = (digits.count - i) % 2 == 1 ? a.token_slots : m.order;
    const ByToken by{a.slot_experts,
                     a.slot_tokens,
                     static_cast<std::int32_t>(d.experts),
                     static_cast<std::int32_t>(d.tokens),
                     d.assume_sorted ? 0 : i * digits.bits,
                     (1 << digits.bits) - 1,
                     a.error_word};
    sort(shape, source, by, ToOrder{order, a.slot_rows, i == 0 ? m.length : nullptr, last}, m,
         m.totals, exec);
    source = {order, m.length};
  }
  find_tokens<<<blocks_for(d.tokens + 1, 256), 256, 0, stream_of(exec)>>>(
      a.token_slots, m.length, a.slot_tokens, d.tokens, a.token_offsets);
}

std::size_t workspace(const MetadataDesc& desc, const Exec&) {
  return Memory::layout(desc, nullptr, nullptr);
}

Status run(const MetadataDesc& d, const MetadataArgs& args, void* memory,
           const Exec& exec) noexcept {
  const HandedMetadata a(args, exec.handoff);
  const cudaStream_t stream = stream_of(exec);
  if (exec.checked) {
    if (Status status = check_lists(d, a, memory, stream); !status.ok()) return status;
  }
  const bool lists = d.top_k == 0;
  const math::LoadClass load_class(d.experts, d.rows());
  const BlockCounts counts = BlockCounts::of(d.tokens, d.experts, d.top_k);
  if (a.block_counts != nullptr && counts.bytes() > 0) {
    place_counted(d, a, counts, exec);
    return launched("metadata: launch");
  }
  Memory m;
  Memory::layout(d, memory, &m);
  Source source{nullptr, nullptr};
  if (a.sorted) {
    source.length = a.token_offsets + d.tokens;
  } else if (lists) {
    sort_by_token(d, a, m, exec);
    source = {a.token_slots, m.length};
  }
  const ByExpert by{a.slot_experts, static_cast<std::int32_t>(d.experts)};
  sort(Shape::of(d.slots(), d.experts), source, by,
       ToRows{a, static_cast<std::uint32_t>(d.top_k), static_cast<std::int32_t>(d.rows()),
              load_class},
       m, a.counts, exec);
  return launched("metadata: launch");
}

}  // namespace

const Kernel<MetadataDesc> kMetadata = {
    .op = "metadata",
    .name = "cuda.metadata",
    .arch = 80,
    .and_later = true,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cuda
