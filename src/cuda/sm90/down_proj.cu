// The entries of down_proj in the kernel list, and its kernels in wide tiles.
#include "cuda/sm90/down_proj.cuh"
#include "cuda/sm90/kernel_file.cuh"

namespace sonicmoe::cuda {

// In files of their own.
extern template struct KernelFile<WideDownProj::Family<true>>;
extern template struct KernelFile<PingpongDownProj::Family<false>>;
extern template struct KernelFile<PingpongDownProj::Family<true>>;

namespace {

std::string defer_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  return defer_to_pingpong(device, d.usual_rows(), d.experts, d.hidden,
                           tiles(d.intermediate, kTileK));
}

}  // namespace

constinit const Kernel<GroupedGemmDesc> kDownProj256 =
    file_entry<WideDownProj>({.op = "down_proj",
                              .name = "sm90.down_proj.128x256",
                              .reject = reject_gemm,
                              .defer = defer_wide,
                              .workspace = tile_counter_workspace});
constinit const Kernel<GroupedGemmDesc> kDownProj192 = file_entry<PingpongDownProj>(
    {.op = "down_proj", .name = "sm90.down_proj.128x192", .reject = reject_gemm});

template struct KernelFile<WideDownProj::Family<false>>;

}  // namespace sonicmoe::cuda
