// down_proj_wgrad with the small tile.
#include "core/backends.h"
#include "cuda/sm90/down_proj_wgrad.cuh"

namespace sonicmoe::cuda {

constinit const Kernel<GroupedGemmDesc> kDownProjWgrad128 =
    kernel_entry<DownProjWgradFamily<128, 6>, GroupedGemmDesc>(
        {.op = "down_proj_wgrad",
         .name = "sm90.down_proj_wgrad.128x128",
         .reject = reject_contraction});

}  // namespace sonicmoe::cuda
