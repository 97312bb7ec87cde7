// The entries of up_proj in the kernel list.
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {
namespace {

std::string reject_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  if (std::string reason = reject_gemm(d, device); !reason.empty()) return reason;
  if (std::string reason = reject_wide_transposed(d); !reason.empty() || !d.bias) return reason;
  const bool compiled = visit_activations<true>(
      d.activation, [](auto activations) { return kCompiledWithBias<256, decltype(activations)>; });
  return compiled ? "" : "bias: got true, allowed: false for " + to_string(d.activation);
}

std::string defer_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  const int units = is_glu(d.activation) ? 64 : 128;
  return defer_to_narrow(
      device, d.usual_rows(), d.experts, tiles(d.intermediate, 2 * units),
      tiles(d.intermediate, units),
      narrow_up_proj_percent(device, d.x_rows() * d.hidden * 2, tiles(d.hidden, kTileK)));
}

}  // namespace

constinit const Kernel<GroupedGemmDesc> kUpProj256 =
    file_entry<WideUpProj>({.op = "up_proj",
                            .name = "sm90.up_proj.128x256",
                            .reject = reject_wide,
                            .defer = defer_wide,
                            .workspace = tile_counter_workspace});
constinit const Kernel<GroupedGemmDesc> kUpProj128 = file_entry<NarrowUpProj>(
    {.op = "up_proj", .name = "sm90.up_proj.128x128", .reject = reject_gemm});

}  // namespace sonicmoe::cuda
