// dW2 = dO[tokens]^T (s A): M = d, N = n, K = rows. With transposed weights M and N change places.
#include "cuda/sm80/matrices.cuh"

namespace sonicmoe::cuda {
namespace sm80 {
namespace {

template <int kTileN>
struct DownProjWgrad {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_matrices<kTileN>(d.dtype, f);
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void*, const Exec& exec) {
    const std::int32_t* const tokens = d.gathers() ? a.row_tokens : nullptr;
    const bool swaps = d.transposed();
    const auto of_dout = [&](int tile) { return columns_of(a.dout, tokens, d.hidden, 1, tile); };
    const auto of_act = [&](int tile) {
      return columns_of(a.scaled_act, nullptr, d.intermediate, 1, tile);
    };
    const Params<Config> p{.a = swaps ? of_act(kTileM) : of_dout(kTileM),
                           .b = swaps ? of_dout(kTileN) : of_act(kTileN),
                           .epilogue = {.out = {a.dw2, a.dw2},
                                        .expert_stride = d.hidden * d.intermediate,
                                        .row_stride = swaps ? d.hidden : d.intermediate}};
    return launch_matrices<Config>(p, d, a, 1, 1, exec, "down_proj_wgrad: launch");
  }
};

std::string defer(const GroupedGemmDesc& d, const DeviceTraits& device) {
  const std::int64_t m = d.transposed() ? d.intermediate : d.hidden;
  const std::int64_t n = d.transposed() ? d.hidden : d.intermediate;
  return defer_matrices(d, device, tiles(m, kTileM), n);
}

}  // namespace
}  // namespace sm80

constinit const Kernel<GroupedGemmDesc> kPortableDownProjWgrad256 =
    sm80::entry<sm80::DownProjWgrad<256>, GroupedGemmDesc>({.op = "down_proj_wgrad",
                                                            .name = "sm80.down_proj_wgrad.128x256",
                                                            .reject = sm80::reject_gemm<256>,
                                                            .defer = sm80::defer});
constinit const Kernel<GroupedGemmDesc> kPortableDownProjWgrad128 =
    sm80::entry<sm80::DownProjWgrad<128>, GroupedGemmDesc>({.op = "down_proj_wgrad",
                                                            .name = "sm80.down_proj_wgrad.128x128",
                                                            .reject = sm80::reject_gemm<128>});

}  // namespace sonicmoe::cuda
