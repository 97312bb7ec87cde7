// The selection bias after a step. One thread: a few operations an expert.
#include <numeric>

#include "core/backends.h"

namespace sonicmoe::cpu {
namespace {

Status run(const UpdateSelectionBiasDesc& d, const UpdateSelectionBiasArgs& a, void*,
           const Exec&) noexcept {
  const std::int64_t all = std::accumulate(a.counts, a.counts + d.experts, std::int64_t{0});
  for (std::int64_t e = 0; e < d.experts; ++e) {
    const std::int64_t count = d.experts * a.counts[e];  // beside the sum, not the mean: exact
    if (count != all) a.selection_bias[e] += count < all ? a.rate : -a.rate;
  }
  return {};
}

}  // namespace

const Kernel<UpdateSelectionBiasDesc> kUpdateSelectionBias = {
    .op = "update_selection_bias",
    .name = "cpu.update_selection_bias",
    .run = run,
};

}  // namespace sonicmoe::cpu
