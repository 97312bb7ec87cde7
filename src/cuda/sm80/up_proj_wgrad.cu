// dW1 = dH^T x[tokens]: M = W, gates, then ups; N = d, K = rows. With transposed weights M = d and
// N = W.
#include "cuda/sm80/matrices.cuh"

namespace sonicmoe::cuda {
namespace sm80 {
namespace {

template <int kTileN>
struct UpProjWgrad {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_matrices<kTileN>(d.dtype, f);
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void*, const Exec& exec) {
    const std::int32_t* const tokens = d.gathers() ? a.row_tokens : nullptr;
    const bool swaps = d.transposed();
    const Parts parts = parts_of(d);
    const auto of_x = [&](int tile) { return columns_of(a.x, tokens, d.hidden, 1, tile); };
    const auto of_dh = [&](int tile) {
      return columns_of(a.dpreact, nullptr, parts.width, parts.count, tile);
    };
    const W1View view = w1_view(d, d.hidden);
    void* up = a.dw1;
    if (!swaps && parts.count == 2) {
      up = up_base(d, view, a.dw1, a.dw1_up, d.f32_weight_grads ? 4 : 2);
    }
    const Params<Config> p{
        .a = swaps ? of_x(kTileM) : of_dh(kTileM),
        .b = swaps ? of_dh(kTileN) : of_x(kTileN),
        .epilogue = {.out = {a.dw1, up},
                     .expert_stride = swaps ? d.hidden * d.preact_width() : view.expert_stride,
                     .row_stride = swaps ? d.preact_width() : view.row_stride,
                     .part_offset = parts.width}};
    const int m_parts = swaps ? 1 : parts.count, n_parts = swaps ? parts.count : 1;
    return launch_matrices<Config>(p, d, a, m_parts, n_parts, exec, "up_proj_wgrad: launch");
  }
};

std::string defer(const GroupedGemmDesc& d, const DeviceTraits& device) {
  const Parts parts = parts_of(d);
  if (d.transposed()) {
    return defer_matrices(d, device, std::int64_t{tiles(d.hidden, kTileM)} * parts.count,
                          parts.width);
  }
  return defer_matrices(d, device, std::int64_t{tiles(parts.width, kTileM)} * parts.count,
                        d.hidden);
}

}  // namespace
}  // namespace sm80

constinit const Kernel<GroupedGemmDesc> kPortableUpProjWgrad256 =
    sm80::entry<sm80::UpProjWgrad<256>, GroupedGemmDesc>({.op = "up_proj_wgrad",
                                                          .name = "sm80.up_proj_wgrad.128x256",
                                                          .reject = sm80::reject_gemm<256>,
                                                          .defer = sm80::defer});
constinit const Kernel<GroupedGemmDesc> kPortableUpProjWgrad128 =
    sm80::entry<sm80::UpProjWgrad<128>, GroupedGemmDesc>({.op = "up_proj_wgrad",
                                                          .name = "sm80.up_proj_wgrad.128x128",
                                                          .reject = sm80::reject_gemm<128>});

}  // namespace sonicmoe::cuda
