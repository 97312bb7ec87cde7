// up_proj_wgrad with the large tile.
#include "core/backends.h"
#include "cuda/sm90/up_proj_wgrad.cuh"

namespace sonicmoe::cuda {
namespace {

std::string defer(const GroupedGemmDesc& d, const DeviceTraits&) {
  return defer_to_small(d.usual_rows(), d.experts, d.intermediate);
}

}  // namespace

// Names give a tile's rows and columns of dW1.
constinit const Kernel<GroupedGemmDesc> kUpProjWgrad256 =
    kernel_entry<UpProjWgradFamily<256, 4>, GroupedGemmDesc>({.op = "up_proj_wgrad",
                                                              .name = "sm90.up_proj_wgrad.256x128",
                                                              .reject = reject_contraction,
                                                              .defer = defer});

}  // namespace sonicmoe::cuda
