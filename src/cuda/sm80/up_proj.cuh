#pragma once

#include "cuda/sm80/launch.cuh"

/// H = x[tokens] W1^T + b1 and A = act(H): M = rows, gathered or contiguous; N = gate and up
/// columns in eights; K = d.
namespace sonicmoe::cuda::sm80 {

template <int kTileN>
struct UpProj {
  template <class T, bool kTransposed>
  using ConfigOf =
      Config<T, RowsAlongM<T, kThreadsOf<kTileN>>,
             std::conditional_t<kTransposed, WeightsAlongN<T, kTileN>, WeightsAlongK<T, kTileN>>,
             kTileN, StoreActivation>;

  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_configs<ConfigOf>(d.dtype, d.transposed(), f);
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void*, const Exec& exec) {
    if (d.rows == 0) return {};
    const bool gated = is_glu(d.activation);
    const std::int64_t n = d.intermediate;
    const int n_blocks = tiles(n, gated ? kTileN / 2 : kTileN);
    const W1View b1 = w1_view(d, 1);
    Params<Config> p{.a = {.base = a.x,
                           .row_tokens = d.gathers() ? a.row_tokens : nullptr,
                           .stride = stride_of(d.hidden)},
                     .b = d.transposed() ? w1_columns(d, a.w1, d.alternates() ? 2 * n : n)
                                         : w1_rows(d, a.w1, a.w1_up, n),
                     .k = contraction(d.hidden),
                     .extents = extents_of(d, a, n_blocks),
                     .epilogue = {.preact = d.inference ? nullptr : a.preact,
                                  .act = a.act,
                                  .bias_stride = b1.row_stride,
                                  .bias_expert_stride = b1.expert_stride,
                                  .reset = exec.handoff.next_tile_counter,
                                  .units = static_cast<int>(n),
                                  .alternates = d.alternates(),
                                  .activation = d.activation}};
    p.b.pairs = gated && !d.alternates();
    if (d.bias) {
      p.epilogue.bias[0] = a.b1;
      p.epilogue.bias[1] = gated ? up_base(d, b1, a.b1, a.b1_up) : nullptr;
    }
    return Compiled<Config>::launch(p, most_tiles(d, n_blocks), exec, "up_proj: launch");
  }
};

}  // namespace sonicmoe::cuda::sm80
