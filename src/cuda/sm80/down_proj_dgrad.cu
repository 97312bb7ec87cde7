// The portable entries of down_proj_dgrad.
#include "cuda/sm80/down_proj_dgrad.cuh"

namespace sonicmoe::cuda {
namespace sm80 {
namespace {

std::string defer(const GroupedGemmDesc& d, const DeviceTraits& device) {
  return defer_to_narrow(device, m_blocks(d.usual_rows(), d.experts), tiles(d.intermediate, 256),
                         tiles(d.intermediate, 128));
}

}  // namespace
}  // namespace sm80

constinit const Kernel<GroupedGemmDesc> kPortableDownProjDgrad256 =
    sm80::entry<sm80::DownProjDgrad<256>, GroupedGemmDesc>(
        {.op = "down_proj_dgrad",
         .name = "sm80.down_proj_dgrad.128x256",
         .reject = sm80::reject_gemm<256>,
         .defer = sm80::defer,
         .workspace = sm80::DownProjDgrad<256>::workspace});
constinit const Kernel<GroupedGemmDesc> kPortableDownProjDgrad128 =
    sm80::entry<sm80::DownProjDgrad<128>, GroupedGemmDesc>(
        {.op = "down_proj_dgrad",
         .name = "sm80.down_proj_dgrad.128x128",
         .reject = sm80::reject_gemm<128>,
         .workspace = sm80::DownProjDgrad<128>::workspace});

}  // namespace sonicmoe::cuda
