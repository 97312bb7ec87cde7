// The selection bias after a step. One block: sums of integers, so that no order matters.
#include "core/backends.h"
#include "cuda/device/warp.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) update_bias(UpdateSelectionBiasArgs a, int experts) {
  __shared__ unsigned long long all;  // of int64, in two's complement
  if (threadIdx.x == 0) all = 0;
  __syncthreads();  // before the first addition
  wait_for_previous();
  let_next_start();
  std::int64_t own = 0;
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) own += a.counts[e];
  atomicAdd(&all, static_cast<unsigned long long>(own));
  __syncthreads();  // after the last addition
  const auto sum = static_cast<std::int64_t>(all);
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    const std::int64_t count = std::int64_t{experts} * a.counts[e];  // beside the sum: exact
    if (count != sum) a.selection_bias[e] += count < sum ? a.rate : -a.rate;
  }
}

Status run(const UpdateSelectionBiasDesc& d, const UpdateSelectionBiasArgs& a, void*,
           const Exec& exec) noexcept {
  launch_early(update_bias, 1, kThreads, 0, exec, a, static_cast<int>(d.experts));
  return launched("update_selection_bias: launch");
}

}  // namespace

const Kernel<UpdateSelectionBiasDesc> kUpdateSelectionBias = {
    .op = "update_selection_bias",
    .name = "cuda.update_selection_bias",
    .arch = 80,
    .and_later = true,
    .run = run,
};

}  // namespace sonicmoe::cuda
