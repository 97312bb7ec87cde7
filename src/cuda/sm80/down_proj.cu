// Y = A W2^T + b2, with the scores of contiguous rows: M = rows, N = d, K = n.
#include "cuda/sm80/rows.cuh"

namespace sonicmoe::cuda {
namespace sm80 {
namespace {

struct DownProj {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_configs<RowsConfig>(d.dtype, !d.transposed(), f);
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void*, const Exec& exec) {
    if (d.rows == 0) return {};
    const int n_blocks = tiles(d.hidden, Config::kTileN);
    const bool scored = !d.gathers() && d.scored();  // else they enter in the sum of a token's rows
    const Params<Config> p{.a = {.base = a.act, .stride = stride_of(d.intermediate)},
                           .b = w2_of(d, a.w2, d.hidden),
                           .k = contraction(d.intermediate),
                           .extents = extents_of(d, a, n_blocks),
                           .epilogue = {.out = a.expert_out,
                                        .bias = d.bias ? a.b2 : nullptr,
                                        .row_scores = scored ? a.row_scores : nullptr,
                                        .scores_bias = scored && d.scores_bias(),
                                        .columns = static_cast<int>(d.hidden)}};
    return Compiled<Config>::launch(p, most_tiles(d, n_blocks), exec, "down_proj: launch");
  }
};

}  // namespace
}  // namespace sm80

constinit const Kernel<GroupedGemmDesc> kPortableDownProj =
    sm80::entry<sm80::DownProj, GroupedGemmDesc>({.op = "down_proj",
                                                  .name = "sm80.down_proj.128x128",
                                                  .reject = sm80::reject_gemm<sm80::kNarrow>});

}  // namespace sonicmoe::cuda
