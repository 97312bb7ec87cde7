// The entries of the router's products in the kernel list.
#include "core/backends.h"
#include "cuda/sm90/router_gemm.cuh"

namespace sonicmoe::cuda {
namespace {

std::string reject(const RouterGemmDesc& d, const DeviceTraits&) {
  return d.pass != GemmPass::wgrad ? reject_rows("tokens", d.tokens) : std::string();
}

/// Named by the experts of a tile; they make dx alike, and logits with an fp32 Wr.
constexpr int kWidths[] = {256, 128, 64};

double cost(const RouterGemmDesc& d, const DeviceTraits& device, int width) {
  if (d.pass == GemmPass::wgrad) return split_of(d, device, width).cost;
  return static_cast<double>(logits_cost(device, d.tokens, experts_of(d), width));
}

template <int kWidth>
std::string defer_to_better(const RouterGemmDesc& d, const DeviceTraits& device) {
  if (d.pass == GemmPass::dgrad || (d.pass == GemmPass::forward && d.f32_w)) return {};
  int best = kWidth;
  for (const int width : kWidths) {
    if (cost(d, device, width) < cost(d, device, best)) best = width;
  }
  if (best == kWidth) return {};
  return "tokens " + std::to_string(d.tokens) + ", experts " + std::to_string(experts_of(d)) +
         ": tiles of " + std::to_string(best) + " experts take less time";
}

}  // namespace

constinit const Kernel<RouterGemmDesc> kRouterGemm256 =
    file_entry<RouterTiles<256>, RouterGemmDesc>({.op = "router_gemm",
                                                  .name = "sm90.router_gemm.256",
                                                  .reject = reject,
                                                  .defer = defer_to_better<256>,
                                                  .workspace = RouterTiles<256>::workspace});
constinit const Kernel<RouterGemmDesc> kRouterGemm128 =
    file_entry<RouterTiles<128>, RouterGemmDesc>({.op = "router_gemm",
                                                  .name = "sm90.router_gemm.128",
                                                  .reject = reject,
                                                  .defer = defer_to_better<128>,
                                                  .workspace = RouterTiles<128>::workspace});
constinit const Kernel<RouterGemmDesc> kRouterGemm64 =
    file_entry<RouterTiles<64>, RouterGemmDesc>({.op = "router_gemm",
                                                 .name = "sm90.router_gemm.64",
                                                 .reject = reject,
                                                 .workspace = RouterTiles<64>::workspace});

}  // namespace sonicmoe::cuda
