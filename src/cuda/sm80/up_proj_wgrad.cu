// dW1 = dH^T x[tokens]: M = W, gates, then ups; N = d, K = rows. With transposed weights M = d and
// N = W.
#include "cuda/sm80/matrices.cuh"

namespace sonicmoe::cuda {
namespace sm80 {
namespace {

struct UpProjWgrad {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_matrices(d.dtype, f);
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void*, const Exec& exec) {
    const std::int32_t* const tokens = d.gathers() ? a.row_tokens : nullptr;
    const bool swaps = d.transposed();
    const Parts parts = parts_of(d);
    const Rows x = columns_of(a.x, tokens, d.hidden, 1);
    const Rows dh = columns_of(a.dpreact, nullptr, parts.width, parts.count);
    const W1View view = w1_view(d, d.hidden);
    void* up = a.dw1;
    if (!swaps && parts.count == 2) {
      up = up_base(d, view, a.dw1, a.dw1_up, d.f32_weight_grads ? 4 : 2);
    }
    const Params<Config> p{
        .a = swaps ? x : dh,
        .b = swaps ? dh : x,
        .epilogue = {.out = {a.dw1, up},
                     .expert_stride = swaps ? d.hidden * d.preact_width() : view.expert_stride,
                     .row_stride = swaps ? d.preact_width() : view.row_stride,
                     .part_offset = parts.width}};
    const int m_parts = swaps ? 1 : parts.count, n_parts = swaps ? parts.count : 1;
    return launch_matrices<Config>(p, d, a, m_parts, n_parts, exec, "up_proj_wgrad: launch");
  }
};

}  // namespace
}  // namespace sm80

constinit const Kernel<GroupedGemmDesc> kPortableUpProjWgrad =
    sm80::entry<sm80::UpProjWgrad, GroupedGemmDesc>({.op = "up_proj_wgrad",
                                                     .name = "sm80.up_proj_wgrad.128x128",
                                                     .reject = sm80::reject_gemm<sm80::kNarrow>});

}  // namespace sonicmoe::cuda
