// The portable entries of up_proj.
#include "cuda/sm80/up_proj.cuh"

namespace sonicmoe::cuda {
namespace sm80 {
namespace {

std::string defer(const GroupedGemmDesc& d, const DeviceTraits& device) {
  if (d.hidden < 2048) return "hidden is below 2048: a wide tile waits longer than it saves";
  const int units = is_glu(d.activation) ? 128 : 256;
  return defer_to_narrow(device, m_blocks(d.usual_rows(), d.experts), tiles(d.intermediate, units),
                         tiles(d.intermediate, units / 2));
}

}  // namespace
}  // namespace sm80

constinit const Kernel<GroupedGemmDesc> kPortableUpProj256 =
    sm80::entry<sm80::UpProj<256>, GroupedGemmDesc>({.op = "up_proj",
                                                     .name = "sm80.up_proj.128x256",
                                                     .reject = sm80::reject_gemm<256>,
                                                     .defer = sm80::defer});
constinit const Kernel<GroupedGemmDesc> kPortableUpProj128 =
    sm80::entry<sm80::UpProj<128>, GroupedGemmDesc>(
        {.op = "up_proj", .name = "sm80.up_proj.128x128", .reject = sm80::reject_gemm<128>});

}  // namespace sonicmoe::cuda
