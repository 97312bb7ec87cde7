// up_proj_wgrad with the small tile.
#include "core/backends.h"
#include "cuda/sm90/up_proj_wgrad.cuh"

namespace sonicmoe::cuda {

constinit const Kernel<GroupedGemmDesc> kUpProjWgrad128 =
    kernel_entry<UpProjWgradFamily<128, 6>, GroupedGemmDesc>({.op = "up_proj_wgrad",
                                                              .name = "sm90.up_proj_wgrad.128x128",
                                                              .reject = reject_contraction});

}  // namespace sonicmoe::cuda
