// The portable entry of down_proj_dgrad.
#include "cuda/sm80/down_proj_dgrad.cuh"

namespace sonicmoe::cuda {

constinit const Kernel<GroupedGemmDesc> kPortableDownProjDgrad =
    sm80::entry<sm80::DownProjDgrad, GroupedGemmDesc>(
        {.op = "down_proj_dgrad",
         .name = "sm80.down_proj_dgrad.128x128",
         .reject = sm80::reject_gemm<sm80::kNarrow>,
         .workspace = sm80::DownProjDgrad::workspace});

}  // namespace sonicmoe::cuda
