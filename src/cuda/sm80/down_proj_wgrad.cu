// dW2 = dO[tokens]^T (s A): M = d, N = n, K = rows. With transposed weights M and N change places.
#include "cuda/sm80/matrices.cuh"

namespace sonicmoe::cuda {
namespace sm80 {
namespace {

struct DownProjWgrad {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_matrices(d.dtype, f);
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void*, const Exec& exec) {
    const std::int32_t* const tokens = d.gathers() ? a.row_tokens : nullptr;
    const bool swaps = d.transposed();
    const Rows dout = columns_of(a.dout, tokens, d.hidden, 1);
    const Rows act = columns_of(a.scaled_act, nullptr, d.intermediate, 1);
    const Params<Config> p{.a = swaps ? act : dout,
                           .b = swaps ? dout : act,
                           .epilogue = {.out = {a.dw2, a.dw2},
                                        .expert_stride = d.hidden * d.intermediate,
                                        .row_stride = swaps ? d.hidden : d.intermediate}};
    return launch_matrices<Config>(p, d, a, 1, 1, exec, "down_proj_wgrad: launch");
  }
};

}  // namespace
}  // namespace sm80

constinit const Kernel<GroupedGemmDesc> kPortableDownProjWgrad =
    sm80::entry<sm80::DownProjWgrad, GroupedGemmDesc>({.op = "down_proj_wgrad",
                                                       .name = "sm80.down_proj_wgrad.128x128",
                                                       .reject = sm80::reject_gemm<sm80::kNarrow>});

}  // namespace sonicmoe::cuda
