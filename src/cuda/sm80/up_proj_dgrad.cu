// dX~ = dH W1: M = rows, N = d, K = 2n as gate columns, then up columns; in one part where they
// alternate (n without a gate).
#include "cuda/sm80/rows.cuh"

namespace sonicmoe::cuda {
namespace sm80 {
namespace {

struct UpProjDgrad {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_configs<RowsConfig>(d.dtype, d.transposed(), f);
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void*, const Exec& exec) {
    if (d.rows == 0) return {};
    const Parts parts = parts_of(d);
    const int n_blocks = tiles(d.hidden, Config::kTileN);
    const Params<Config> p{
        .a = {.base = a.dpreact, .part_offset = parts.width, .stride = stride_of(d.preact_width())},
        .b = d.transposed() ? w1_columns(d, a.w1, d.hidden) : w1_rows(d, a.w1, a.w1_up, d.hidden),
        .k = contraction(parts.width, parts.count),
        .extents = extents_of(d, a, n_blocks),
        .epilogue = {.out = a.dx_rows, .columns = static_cast<int>(d.hidden)}};
    return Compiled<Config>::launch(p, most_tiles(d, n_blocks), exec, "up_proj_dgrad: launch");
  }
};

}  // namespace
}  // namespace sm80

constinit const Kernel<GroupedGemmDesc> kPortableUpProjDgrad =
    sm80::entry<sm80::UpProjDgrad, GroupedGemmDesc>({.op = "up_proj_dgrad",
                                                     .name = "sm80.up_proj_dgrad.128x128",
                                                     .reject = sm80::reject_gemm<sm80::kNarrow>});

}  // namespace sonicmoe::cuda
