// The entries of down_proj_dgrad in the kernel list, and its sums over n blocks.
#include "cuda/device/warp.cuh"
#include "cuda/sm90/down_proj_dgrad.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kNarrowPercent = 58;  // docs/findings/tile-choice.md

std::string reject_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  if (std::string reason = reject_gemm(d, device); !reason.empty()) return reason;
  return reject_wide_transposed(d);
}

std::string defer_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  return defer_to_narrow(device, d.usual_rows(), d.experts, tiles(d.intermediate, 256),
                         tiles(d.intermediate, 128), kNarrowPercent);
}

/// The sums in order; one thread a row. Only contiguous rows have gaps between experts.
template <bool kGaps>
__global__ void sum_partials(const float* partials, int n_blocks, std::int64_t capacity,
                             const std::int32_t* begins, const std::int32_t* ends, int experts,
                             float* dscores) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= ends[experts - 1]) return;
  if (kGaps && !is_owned(begins, ends, experts, row)) return;
  float sum = 0.0f;
  for (int i = 0; i < n_blocks; ++i) sum += partials[i * capacity + row];
  dscores[row] = sum;
}

}  // namespace

Status sum_dscores(const GroupedGemmDesc& d, const float* partials, int n_blocks,
                   const GroupedGemmArgs& a, const Exec& exec) {
  constexpr int kThreads = 256;
  const auto sum = d.gathers() ? sum_partials<false> : sum_partials<true>;
  sum<<<tiles(d.rows, kThreads), kThreads, 0, stream_of(exec)>>>(
      partials, n_blocks, d.rows, a.offsets, row_ends(a), static_cast<int>(d.experts),
      a.row_dscores);
  return launched("down_proj_dgrad: sums");
}

constinit const Kernel<GroupedGemmDesc> kDownProjDgrad256 =
    file_entry<WideDownProjDgrad>({.op = "down_proj_dgrad",
                                   .name = "sm90.down_proj_dgrad.128x256",
                                   .reject = reject_wide,
                                   .defer = defer_wide,
                                   .workspace = WideDownProjDgrad::workspace});
constinit const Kernel<GroupedGemmDesc> kDownProjDgrad128 =
    file_entry<NarrowDownProjDgrad>({.op = "down_proj_dgrad",
                                     .name = "sm90.down_proj_dgrad.128x128",
                                     .reject = reject_gemm,
                                     .workspace = NarrowDownProjDgrad::workspace});

}  // namespace sonicmoe::cuda
