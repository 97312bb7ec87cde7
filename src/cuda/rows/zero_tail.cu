// Zeros in the rows that no expert owns: before, between and behind the experts' segments.
#include "core/backends.h"
#include "cuda/device/warp.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStaged = 1024;  // segments that a block copies, to search them in shared memory

/// A lane looks up one row; the warp clears the rows that it found, one after the other. With
/// `overlap_previous` the first block waits at its end, so this kernel's end implies that of the
/// one before.
__global__ void __launch_bounds__(kThreads)
    clear_rows(ZeroTailArgs a, std::int32_t rows, int experts, std::int64_t row_pieces,
               bool overlap_previous) {
  __shared__ std::int32_t begins[kStaged], ends[kStaged];
  if (!overlap_previous) wait_for_previous();
  let_next_start();
  const bool staged = experts <= kStaged;
  for (int e = static_cast<int>(threadIdx.x); staged && e < experts; e += kThreads) {
    begins[e] = a.begins[e];
    ends[e] = a.ends[e];
  }
  __syncthreads();  // begins and ends are complete
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool owned =
      staged ? is_owned(begins, ends, experts, row) : is_owned(a.begins, a.ends, experts, row);
  const bool clears = row < rows && !owned;
  if (clears && a.values != nullptr) a.values[row] = 0.0f;
  const std::int64_t first = row - lane_id();
  unsigned left = a.rows == nullptr ? 0 : __ballot_sync(kAllLanes, clears);
  for (; left != 0; left &= left - 1) {
    uint4* const to =
        static_cast<uint4*>(a.rows) + (first + __ffs(static_cast<int>(left)) - 1) * row_pieces;
    for (std::int64_t i = lane_id(); i < row_pieces; i += kWarp) to[i] = uint4{};
  }
  if (overlap_previous && blockIdx.x == 0) wait_for_previous();
}

Status run(const ZeroTailDesc& d, const ZeroTailArgs& a, void*, const Exec& exec) noexcept {
  if (d.rows == 0 || (a.rows == nullptr && a.values == nullptr)) return {};
  // A piece has 16 bytes, eight elements: d is a multiple of 8.
  launch_early(clear_rows, blocks_for(d.rows, kThreads), kThreads, 0, exec, a,
               static_cast<std::int32_t>(d.rows), static_cast<int>(d.experts), d.hidden / 8,
               exec.handoff.overlap_previous);
  return launched("zero_tail: launch");
}

}  // namespace

const Kernel<ZeroTailDesc> kZeroTail = {
    .op = "zero_tail",
    .name = "cuda.zero_tail",
    .arch = 80,
    .and_later = true,
    .dtypes = kStorageTypes,
    .run = run,
};

}  // namespace sonicmoe::cuda
