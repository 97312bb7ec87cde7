// The entries of down_proj_dgrad in the kernel list.
#include "cuda/sm90/down_proj_dgrad.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kNarrowPercent = 58;  // docs/findings/tile-choice.md

std::string reject_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  if (std::string reason = reject_gemm(d, device); !reason.empty()) return reason;
  return reject_wide_transposed(d);
}

std::string defer_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  return defer_to_narrow(device, d.usual_rows(), d.experts, tiles(d.intermediate, 256),
                         tiles(d.intermediate, 128), kNarrowPercent);
}

}  // namespace

constinit const Kernel<GroupedGemmDesc> kDownProjDgrad256 =
    file_entry<WideDownProjDgrad>({.op = "down_proj_dgrad",
                                   .name = "sm90.down_proj_dgrad.128x256",
                                   .reject = reject_wide,
                                   .defer = defer_wide,
                                   .workspace = WideDownProjDgrad::workspace});
constinit const Kernel<GroupedGemmDesc> kDownProjDgrad128 =
    file_entry<NarrowDownProjDgrad>({.op = "down_proj_dgrad",
                                     .name = "sm90.down_proj_dgrad.128x128",
                                     .reject = reject_gemm,
                                     .workspace = NarrowDownProjDgrad::workspace});

}  // namespace sonicmoe::cuda
