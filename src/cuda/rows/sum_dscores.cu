// The sums of down_proj_dgrad's dS over its n blocks.
#include "core/segments.h"
#include "cuda/device/warp.cuh"
#include "cuda/runtime.h"
#include "cuda/sum_dscores.h"

namespace sonicmoe::cuda {
namespace {

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
  sum<<<blocks_for(d.rows, kThreads), kThreads, 0, stream_of(exec)>>>(
      partials, n_blocks, d.rows, a.offsets, row_ends(a), static_cast<int>(d.experts),
      a.row_dscores);
  return launched("down_proj_dgrad: sums");
}

}  // namespace sonicmoe::cuda
