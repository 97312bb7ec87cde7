// down_proj_wgrad with the large tile.
#include "core/backends.h"
#include "cuda/sm90/down_proj_wgrad.cuh"

namespace sonicmoe::cuda {
namespace {

std::string defer(const GroupedGemmDesc& d, const DeviceTraits&) {
  return defer_to_small(d.usual_rows(), d.experts, d.intermediate);
}

}  // namespace

constinit const Kernel<GroupedGemmDesc> kDownProjWgrad256 =
    kernel_entry<DownProjWgradFamily<256, 4>, GroupedGemmDesc>(
        {.op = "down_proj_wgrad",
         .name = "sm90.down_proj_wgrad.128x256",
         .reject = reject_contraction,
         .defer = defer});

}  // namespace sonicmoe::cuda
