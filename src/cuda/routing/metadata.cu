// Slots to grouped rows by stable counting sorts: by expert, and for lists by token before that, a
// digit at a time. A sort is three launches: blocks count the keys of their slots; one pass makes
// each count the number of equal keys in the blocks before; blocks place their slots. Positions
// follow from counts alone, so the order in which anything runs does not matter. All three start
// early. The third sorts the slots of its block before it waits: the second waited for the first,
// and that for what is before the sort, before they let the next start. Behind top_k, which counts
// what it chooses, metadata_counted.cu needs one launch.
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
constexpr int kTurns = 4;                   // slots that a thread holds
constexpr int kBatch = kTurns * kThreads;   // slots that a block sorts at a time
constexpr int kWarpBatch = kTurns * kWarp;  // consecutive ones of a warp
constexpr int kSumBins = 8;                 // of a block that sums counters: a sector
constexpr int kSumParts = 64;
constexpr int kDigitBits = 10;                  // of a token id at a time
constexpr std::int64_t kMaxCounters = 4 << 20;  // of one sort

/// How many slots a block sorts; all from sizes.
struct Shape {
  std::int64_t slots;
  int bins;
  int batches;  ///< of a block
  int blocks;

  static Shape of(std::int64_t slots, std::int64_t bins) {
    const std::int64_t most = std::max<std::int64_t>(1, kMaxCounters / bins);
    const std::int64_t all = std::max<std::int64_t>(1, (slots + kBatch - 1) / kBatch);
    const std::int64_t batches = (all + most - 1) / most;
    // One block even without slots: it writes the zeros.
    return {slots, static_cast<int>(bins), static_cast<int>(batches),
            static_cast<int>((all + batches - 1) / batches)};
  }
  __host__ __device__ bool shared() const { return bins <= kSharedBins; }
  std::int64_t counters() const { return std::int64_t{blocks} * bins; }
  __device__ std::int64_t begin() const { return std::int64_t{blockIdx.x} * batches * kBatch; }
  __device__ std::int64_t end() const { return begin() + std::int64_t{batches} * kBatch; }
};

/// The slots to sort: `order` (null: 0, 1, 2, ...), as many as *length (null: all).
struct Source {
  const std::int32_t* order;
  const std::int32_t* length;
  __device__ std::int64_t size(std::int64_t slots) const {
    return length == nullptr ? slots : *length;
  }
  __device__ std::int32_t slot(std::int64_t i) const {
    return order == nullptr ? static_cast<std::int32_t>(i) : order[i];
  }
};

/// Keys of the last sort: a slot's expert, or -1 for sentinels and bad ids.
struct ByExpert {
  const std::int32_t* slot_experts;
  std::int32_t experts;
  std::int32_t* error_word;

  __device__ int key(std::int32_t slot) const {
    const std::int32_t e = slot_experts[slot];
    return e >= 0 && e < experts ? e : -1;
  }
  __device__ void look(std::int32_t slot) const {
    if (slot_experts[slot] < 0) report(error_word, kBadExpertId);
  }
};

/// Keys of the sorts of lists: a digit of the token, or -1 for slots that are no rows.
struct ByToken {
  const std::int32_t* slot_experts;
  const std::int32_t* slot_tokens;
  std::int32_t experts;
  std::int32_t tokens;
  int shift;
  int mask;  ///< 0 if the slots come sorted: then the only thing done is to drop sentinels
  std::int32_t* error_word;

  __device__ int key(std::int32_t slot) const {
    const std::int32_t e = slot_experts[slot];
    const std::int32_t t = slot_tokens[slot];
    return e >= 0 && e < experts && t >= 0 && t < tokens ? t >> shift & mask : -1;
  }
  __device__ void look(std::int32_t slot) const {
    const std::int32_t t = slot_tokens[slot];
    if (slot_experts[slot] < 0) report(error_word, kBadExpertId);
    if (t < 0 || t >= tokens) report(error_word, kBadTokenId);
  }
};

/// What becomes of the sorts of lists.
struct ToOrder {
  std::int32_t* order;      ///< (S): position -> slot
  std::int32_t* slot_rows;  ///< (S): -1 for slots that are no rows
  std::int32_t* length;     ///< (1): slots that are rows; null once it is known
  bool fill_tail;

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

/// What becomes of the last sort.
struct ToRows {
  HandedMetadata a;
  std::uint32_t top_k;  ///< 0: lists
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
  /// By row: neighbouring threads write neighbouring rows.
  __device__ void place(std::int32_t slot, std::int32_t row, const Payload& payload) const {
    a.row_slots[row] = slot;
    a.row_tokens[row] = payload.token;
    if (a.row_scores != nullptr) a.row_scores[row] = payload.score;
  }
  /// By slot.
  __device__ void placed(std::int32_t slot, std::int32_t row) const { a.slot_rows[slot] = row; }
  __device__ void drop(std::int32_t slot) const { a.slot_rows[slot] = -1; }
  __device__ void past_end(std::int64_t row) const { empty_row(a, row); }
  __device__ void start(int expert, std::int32_t row) const { a.offsets[expert] = row; }
  /// Once, by one thread: the place for what is written once, too.
  __device__ void total(int experts, std::int32_t n) const {
    a.offsets[experts] = n;
    clear_next_counter(a);
  }
  bool ranks() const { return a.expert_order != nullptr; }
  __device__ void rank(const std::int32_t* counts, int experts, int block) const {
    __shared__ std::int32_t others[kThreads];
    rank_experts(counts, experts, load_class, block, others, a.expert_order);
  }
};

/// counters[block][bin] = how many of the block's slots have the key.
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
  __syncthreads();
  const std::int64_t end = min(shape.end(), source.size(shape.slots));
  for (std::int64_t i = shape.begin() + threadIdx.x; i < end; i += kBatch) {
    // All loads before the first count: they do not pass it.
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
  __syncthreads();
  for (int b = threadIdx.x; b < shape.bins; b += kThreads) mine[b] = shared[b];
}

/// Turns counters into the counts of the blocks before; totals[bin] is the count of all. A thread
/// block takes kSumBins bins, its thread p * kSumBins + b the p-th part of the counters of bin b.
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
  constexpr int kTogether = 8;  // loads in flight; more than that are read twice
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
  __syncthreads();
  // Warp w scans the parts of bin w, two a lane.
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
  __syncthreads();
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

/// Many bins: their starts once for all blocks. starts[bins] is the total.
__global__ void __launch_bounds__(1024)
    make_starts(Shape shape, const std::int32_t* totals, std::int32_t* starts) {
  const std::int32_t total = exclusive_sums<1024>(
      shape.bins, [&](int bin) { return totals[bin]; },
      [&](int bin, std::int32_t start) { starts[bin] = start; });
  if (threadIdx.x == 0) starts[shape.bins] = total;
}

/// Where a warp's slots go, 32 in order at a time; next[key] is where the next slot with that key
/// goes. `same`: lanes with this lane's key. -1 for slots without a key.
__device__ std::int32_t take_places(int key, unsigned same, std::int32_t* next) {
  const int before = __popc(same & ((1u << lane_id()) - 1u));
  const std::int32_t at = key >= 0 ? next[key] + before : -1;
  __syncwarp();
  if (key >= 0 && before == 0) next[key] = at + __popc(same);
  __syncwarp();
  return at;
}

/// Places a block's slots, a batch at a time: sorted in shared memory first, so that what goes to
/// neighbouring rows is written together. All of that comes before the wait for the sums.
template <class By, class To>
__global__ void __launch_bounds__(kThreads)
    place_slots(Shape shape, Source source, By by, To to, const std::int32_t* counters,
                const std::int32_t* totals) {
  extern __shared__ std::int32_t memory[];
  std::int32_t* const next = memory;                       // (kWarps, bins): place in the batch
  std::int32_t* const begin = next + kWarps * shape.bins;  // (bins): of the batch, there
  std::int32_t* const base = begin + shape.bins;           // (bins): of the batch, in all
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
    __syncthreads();
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
    __syncthreads();
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
      wait_for_previous();
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
    __syncthreads();
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
    __syncthreads();
    // Where the last warp's slots ended is where the batch did.
    for (int b = threadIdx.x; b < shape.bins; b += kThreads) {
      base[b] += next[(kWarps - 1) * shape.bins + b] - begin[b];
    }
    __syncthreads();
  }
  const std::int64_t tail = min(shape.end(), shape.slots);
  for (std::int64_t i = shape.begin() + threadIdx.x; i < tail; i += kThreads) {
    if (i >= total) to.past_end(i);
  }
}

/// The same with counters in global memory, one warp per block and no batches.
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

/// token_offsets[t] = how many of the sorted slots have a token below t.
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

/// Lowers *first to the first position that would be refused.
__global__ void find_bad_ids(MetadataDesc d, const std::int32_t* slot_experts,
                             const std::int32_t* slot_tokens, std::int64_t slots,
                             unsigned long long* first) {
  const std::int64_t s = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (s >= slots) return;
  bool bad = slot_experts[s] < 0;
  if (d.top_k == 0) {
    const std::int32_t t = slot_tokens[s];
    bad |= t < 0 || t >= d.tokens || (d.assume_sorted && s > 0 && t < slot_tokens[s - 1]);
  }
  if (bad) atomicMin(first, static_cast<unsigned long long>(s));
}

Status check_ids(const MetadataDesc& d, const MetadataArgs& a, void* scratch, cudaStream_t stream) {
  const std::int64_t slots = d.slots();
  if (slots == 0) return {};
  std::uint64_t position = 0;
  const auto launch = [&](unsigned long long* first) {
    find_bad_ids<<<blocks_for(slots, 256), 256, 0, stream>>>(d, a.slot_experts, a.slot_tokens,
                                                             slots, first);
  };
  if (Status s = first_bad(scratch, stream, "metadata: check", &position, launch); !s.ok()) {
    return s;
  }
  if (position == ~std::uint64_t{0}) return {};
  const auto s = static_cast<std::int64_t>(position);
  std::int32_t expert = 0;
  std::int32_t token[2] = {};  // at s - 1 and s
  const auto fetch = [&](std::int32_t* to, const std::int32_t* from) {
    return cudaMemcpyAsync(to, from, 4, cudaMemcpyDeviceToHost, stream);
  };
  cudaError_t error = fetch(&expert, a.slot_experts + s);
  const bool lists = d.top_k == 0;
  if (error == cudaSuccess && lists) error = fetch(&token[1], a.slot_tokens + s);
  if (error == cudaSuccess && lists && s > 0) error = fetch(&token[0], a.slot_tokens + s - 1);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return to_status(error, "metadata: check");
  if (expert < 0) {
    return Status::error(StatusCode::invalid_data,
                         "expert ids: got %d at position %" PRId64
                         ", allowed: at least 0 (ids of %" PRId64 " or more are sentinels)",
                         expert, s, d.experts);
  }
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

/// Digits of a token id: as few as may be, of equal size. Sorted lists have one of no bits.
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

struct Memory {
  std::int32_t* counters;
  std::int32_t* totals;  // (bins)
  std::int32_t* starts;  // (bins + 1): many bins only
  std::int32_t* order;   // (S): lists, every other digit
  std::int32_t* length;  // (1): lists

  static std::size_t layout(const MetadataDesc& d, void* base, Memory* out) {
    const Shape experts = Shape::of(d.slots(), d.experts);
    const Shape digits = Shape::of(d.slots(), std::int64_t{1} << Digits(d).bits);
    const bool lists = d.top_k == 0;
    std::int32_t* at = static_cast<std::int32_t*>(base);
    std::int64_t end = 2;  // the check's scratch
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

/// One stable counting sort.
template <class By, class To>
void sort(const Shape& shape, const Source& source, const By& by, const To& to, const Memory& m,
          std::int32_t* totals, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(shape.blocks);
  launch_early(count_keys<By>, blocks, kThreads, 0, stream, shape, source, by, m.counters);
  launch_early(sum_blocks, blocks_for(shape.bins, kSumBins), kSumBins * kSumParts, 0, stream, shape,
               m.counters, totals);
  // Blocks past those that place slots rank the bins, a thread a bin.
  const auto with_ranks = [&](int threads) {
    return blocks + (to.ranks() ? blocks_for(shape.bins, threads) : 0);
  };
  if (shape.shared()) {
    const std::size_t bytes = 4 * static_cast<std::size_t>((kWarps + 2) * shape.bins);
    launch_early(place_slots<By, To>, with_ranks(kThreads), kThreads, bytes, stream, shape, source,
                 by, to, m.counters, totals);
  } else {
    make_starts<<<1, 1024, 0, stream>>>(shape, totals, m.starts);
    place_slots_slowly<<<with_ranks(kWarp), kWarp, 0, stream>>>(shape, source, by, to, m.counters,
                                                                totals, m.starts);
  }
}

/// Lists: token_slots, token_offsets, and -1 for the rows of slots that are dropped.
void sort_by_token(const MetadataDesc& d, const MetadataArgs& a, const Memory& m,
                   cudaStream_t stream) {
  const Digits digits(d);
  const Shape shape = Shape::of(d.slots(), std::int64_t{1} << digits.bits);
  Source source{nullptr, nullptr};
  for (int i = 0; i < digits.count; ++i) {
    const bool last = i + 1 == digits.count;
    // Alternating, so that the last one ends in token_slots.
    std::int32_t* const order = (digits.count - i) % 2 == 1 ? a.token_slots : m.order;
    const ByToken by{a.slot_experts,
                     a.slot_tokens,
                     static_cast<std::int32_t>(d.experts),
                     static_cast<std::int32_t>(d.tokens),
                     d.assume_sorted ? 0 : i * digits.bits,
                     (1 << digits.bits) - 1,
                     a.error_word};
    sort(shape, source, by, ToOrder{order, a.slot_rows, i == 0 ? m.length : nullptr, last}, m,
         m.totals, stream);
    source = {order, m.length};
  }
  find_tokens<<<blocks_for(d.tokens + 1, 256), 256, 0, stream>>>(
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
    if (Status status = check_ids(d, a, memory, stream); !status.ok()) return status;
  }
  const bool lists = d.top_k == 0;
  const math::LoadClass load_class(d.experts, d.slots());
  const BlockCounts counts = BlockCounts::of(d.tokens, d.experts, d.top_k);
  if (a.block_counts != nullptr && counts.bytes() > 0) {
    place_counted(d, a, counts, stream);
    return launched("metadata: launch");
  }
  Memory m;
  Memory::layout(d, memory, &m);
  if (lists) sort_by_token(d, a, m, stream);
  const ByExpert by{a.slot_experts, static_cast<std::int32_t>(d.experts), a.error_word};
  const Source source{lists ? a.token_slots : nullptr, lists ? m.length : nullptr};
  sort(Shape::of(d.slots(), d.experts), source, by,
       ToRows{a, static_cast<std::uint32_t>(d.top_k), load_class}, m, a.counts, stream);
  return launched("metadata: launch");
}

}  // namespace

const Kernel<MetadataDesc> kMetadata = {
    .op = "metadata",
    .name = "sm90.metadata",
    .arch = 90,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cuda
