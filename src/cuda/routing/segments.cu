// Which contiguous rows each expert owns, from the caller's counts, offsets or both.
//
// One block scans the experts twice. Without offsets the first scan sums the counts. The second one
// finds the furthest end of the segments before, so that no two segments share a row.
#include <new>
#include <vector>

#include "core/backends.h"
#include "core/segments.h"
#include "cuda/device/warp.cuh"
#include "cuda/routing/metadata.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;

/// combine(...combine(0, value of thread 0)..., value of the thread before), and in *all that of
/// all threads. All threads of the block call it.
template <class Combine>
__device__ std::int32_t exclusive_scan(std::int32_t own, Combine combine, std::int32_t* all) {
  __shared__ std::int32_t of_warp[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  std::int32_t through = own;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const std::int32_t before = __shfl_up_sync(kAllLanes, through, distance);
    if (lane_id() >= distance) through = combine(before, through);
  }
  __syncthreads();  // all warps have read of_warp of the scan before
  if (lane_id() == kWarp - 1) of_warp[warp] = through;
  __syncthreads();  // of_warp is complete
  std::int32_t before = __shfl_up_sync(kAllLanes, through, 1);
  if (lane_id() == 0) before = 0;
  *all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = combine(*all, before);
    *all = combine(*all, of_warp[w]);
  }
  return before;
}

struct Parameters {
  SegmentsArgs a;
  std::int32_t rows;
  int experts;
  std::int32_t* counts;  ///< (E), for rank_experts()
  math::LoadClass load_class;
  std::int32_t* next_tile_counter;  ///< set to 0, or null
};

/// A number of the caller's in [0, rows]. *fits becomes false if it was changed.
template <class Index>
__device__ std::int32_t within(Index value, std::int32_t rows, bool* fits) {
  if (value >= 0 && value <= rows) return static_cast<std::int32_t>(value);
  *fits = false;
  return value < 0 ? 0 : rows;
}

template <class Index>
__global__ void __launch_bounds__(kThreads) find_segments(Parameters p) {
  wait_for_previous();
  let_next_start();
  const auto* const counts = static_cast<const Index*>(p.a.counts);
  const auto* const offsets = static_cast<const Index*>(p.a.row_offsets);
  // Sums that stop at R keep the scan inside 32 bits.
  const auto add = [&](std::int32_t x, std::int32_t y) {
    return static_cast<std::int32_t>(
        min(static_cast<std::uint32_t>(x) + static_cast<std::uint32_t>(y),
            static_cast<std::uint32_t>(p.rows)));
  };
  const auto furthest = [](std::int32_t x, std::int32_t y) { return max(x, y); };
  if (threadIdx.x == 0 && p.next_tile_counter != nullptr) *p.next_tile_counter = 0;
  std::int32_t summed = 0;   // rows of the experts before this thread's group
  std::int32_t reached = 0;  // the furthest end of their segments
  for (int first = 0; first < p.experts; first += kThreads) {
    const int e = first + static_cast<int>(threadIdx.x);
    const bool exists = e < p.experts;
    bool fits = true;
    std::int32_t begin = 0, count = 0, all = 0;
    if (exists && counts != nullptr) count = within(counts[e], p.rows, &fits);
    if (offsets == nullptr) {
      const std::int32_t before = exclusive_scan(count, add, &all);
      begin = add(summed, before);
      summed = add(summed, all);
    } else if (exists) {
      begin = within(offsets[e], p.rows, &fits);
      if (counts == nullptr) count = max(within(offsets[e + 1], p.rows, &fits) - begin, 0);
      // Descending offsets overlap: the scan below finds the second of them.
    }
    if (count > p.rows - begin) fits = false, count = p.rows - begin;
    const std::int32_t end = begin + count;
    const std::int32_t before = max(reached, exclusive_scan(exists ? end : 0, furthest, &all));
    reached = max(reached, all);
    if (!exists) continue;
    if (begin < before) fits = false, begin = before;
    if (!fits) report(p.a.error_word, kBadCounts);
    p.a.begins[e] = begin;
    p.a.ends[e] = max(begin, end);
    p.counts[e] = max(end - begin, 0);
  }
  if (p.experts > kThreads) return;  // rank_by_load() does it
  __shared__ std::int32_t others[kThreads];
  __syncthreads();  // the block sees p.counts
  rank_experts(p.counts, p.experts, p.load_class, 0, others, p.a.expert_order);
}

/// Ranks more experts than one block has threads.
__global__ void __launch_bounds__(kThreads) rank_by_load(Parameters p) {
  __shared__ std::int32_t others[kThreads];
  wait_for_previous();
  let_next_start();
  rank_experts(p.counts, p.experts, p.load_class, static_cast<int>(blockIdx.x), others,
               p.a.expert_order);
}

/// Checked mode: the CPU's check, on a copy of the caller's numbers. It waits for the stream.
Status check(const SegmentsDesc& d, const SegmentsArgs& a, cudaStream_t stream) try {
  const std::size_t size = d.index_type == IndexType::i64 ? 8 : 4;
  const auto experts = static_cast<std::size_t>(d.experts);
  std::vector<std::int64_t> counts(experts), offsets(experts + 1);  // aligned for either type
  SegmentsArgs host = a;
  const auto copy = [&](const void** array, std::vector<std::int64_t>& to, std::size_t count) {
    if (*array == nullptr) return cudaSuccess;
    const cudaError_t error =
        cudaMemcpyAsync(to.data(), *array, count * size, cudaMemcpyDeviceToHost, stream);
    *array = to.data();
    return error;
  };
  for (const cudaError_t error :
       {copy(&host.counts, counts, experts), copy(&host.row_offsets, offsets, experts + 1),
        cudaStreamSynchronize(stream)}) {
    if (error != cudaSuccess) return to_status(error, "segments: check");
  }
  return for_each_segment(d, host, [](std::int64_t, std::int64_t, std::int64_t) {});
} catch (const std::bad_alloc&) {
  return Status::error(StatusCode::out_of_memory, "segments: out of host memory");
}

std::size_t workspace(const SegmentsDesc& d, const Exec&) {
  return 4 * static_cast<std::size_t>(d.experts);
}

Status run(const SegmentsDesc& d, const SegmentsArgs& a, void* memory, const Exec& exec) noexcept {
  const cudaStream_t stream = stream_of(exec);
  if (exec.checked) {
    if (Status status = check(d, a, stream); !status.ok()) return status;
  }
  const std::int64_t usual = d.expected_rows > 0 ? d.expected_rows : d.rows;
  const Parameters p{.a = a,
                     .rows = static_cast<std::int32_t>(d.rows),
                     .experts = static_cast<int>(d.experts),
                     .counts = static_cast<std::int32_t*>(memory),
                     .load_class = math::LoadClass(d.experts, usual),
                     .next_tile_counter = exec.handoff.next_tile_counter};
  const auto find =
      d.index_type == IndexType::i64 ? find_segments<std::int64_t> : find_segments<std::int32_t>;
  launch_early(find, 1, kThreads, 0, exec, p);
  if (d.experts > kThreads) {
    launch_early(rank_by_load, blocks_for(d.experts, kThreads), kThreads, 0, exec, p);
  }
  return launched("segments: launch");
}

}  // namespace

const Kernel<SegmentsDesc> kSegments = {
    .op = "segments",
    .name = "cuda.segments",
    .arch = 80,
    .and_later = true,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cuda
