#pragma once

#include "cuda/sm80/launch.cuh"
#include "cuda/sum_dscores.h"

/// dA' = dO[tokens] W2 stays on the chip: M = rows, gathered or contiguous; N = n, K = d. With A
/// recomputed from H: dH = dAct(s dA', H), A' = s A, dS = <dA', A>.
namespace sonicmoe::cuda::sm80 {

struct DownProjDgrad {
  static constexpr int kTileN = kNarrow;

  template <class T, bool kTransposed>
  using ConfigOf =
      Config<T, RowsAlongM<T, kThreadsOf<kTileN>>,
             std::conditional_t<kTransposed, WeightsAlongK<T, kTileN>, WeightsAlongN<T, kTileN>>,
             kTileN, StoreActivationGrad>;

  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_configs<ConfigOf>(d.dtype, d.transposed(), f);
  }

  static std::size_t workspace(const GroupedGemmDesc& d, const Exec&) {
    return dscores_partials_bytes(d, tiles(d.intermediate, kTileN));
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                    const Exec& exec) {
    if (d.rows == 0) return {};
    const int n_blocks = tiles(d.intermediate, kTileN);
    float* const dscores = n_blocks == 1 ? a.row_dscores : static_cast<float*>(workspace);
    const Params<Config> p{.a = {.base = a.dout,
                                 .row_tokens = d.gathers() ? a.row_tokens : nullptr,
                                 .stride = stride_of(d.hidden)},
                           .b = w2_of(d, a.w2, d.intermediate),
                           .k = contraction(d.hidden),
                           .extents = extents_of(d, a, n_blocks),
                           .epilogue = {.preact = a.preact,
                                        .dpreact = a.dpreact,
                                        .scaled_act = a.scaled_act,
                                        .row_scores = d.scored() ? a.row_scores : nullptr,
                                        .dscores = d.scored() ? dscores : nullptr,
                                        .capacity = d.rows,
                                        .reset = exec.handoff.next_tile_counter,
                                        .units = static_cast<int>(d.intermediate),
                                        .alternates = d.alternates(),
                                        .activation = d.activation}};
    const Status status =
        Compiled<Config>::launch(p, most_tiles(d, n_blocks), exec, "down_proj_dgrad: launch");
    if (!status.ok() || n_blocks == 1 || !d.scored()) return status;
    return sum_dscores(d, dscores, n_blocks, a, exec);
  }
};

}  // namespace sonicmoe::cuda::sm80
