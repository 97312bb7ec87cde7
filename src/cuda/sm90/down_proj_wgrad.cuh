#pragma once

#include "cuda/sm90/epilogue/store_transposed.cuh"
#include "cuda/sm90/wgrad.cuh"

/// dW2 = dO[tokens]^T (s A): M = d (dO gathered along K), N = n, K = rows. With transposed weights
/// the transpose is stored.
namespace sonicmoe::cuda {

template <class T, ALoad kALoad, bool kTransposed_, bool kPlain, int kTileN, int kStages>
struct DownProjWgrad : Traits<T, kALoad, Major::mn, kTileN, Schedule::cooperative, kStages,
                              std::conditional_t<kTransposed_, StoreTransposed<kPlain>,
                                                 StoreTile<AtMByN<kPlain>, false>>> {
  static constexpr bool kTransposed = kTransposed_;  ///< are the weights
};

template <int kTileN, int kStages>
struct DownProjWgradFamily {
  template <class T, ALoad kALoad, bool kTransposed, bool kPlain>
  using ConfigOf = DownProjWgrad<T, kALoad, kTransposed, kPlain, kTileN, kStages>;

  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_wgrad<ConfigOf>(d, f);
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void*, const Exec& exec) {
    const std::int64_t n = d.intermediate;
    TensorMaps maps(d.dtype);
    // Without rows nothing is loaded, but the map must point somewhere: every expert still gets its
    // zeros.
    const CUtensorMap scaled_act = maps.encode({.base = d.rows > 0 ? a.scaled_act : a.dw2,
                                                .inner = n,
                                                .outer = d.rows,
                                                .outer_stride = n,
                                                .box = kTileK / 2});
    const OperandA rows = rows_along_k<Config>(&maps, d, a.dout, a.row_tokens, a.dw2);
    const int box = Config::kTransposed ? WarpgroupTile::kRows : WarpTile::kRows;
    const TensorView dw2 = w2_view(d, a.dw2, box);
    StoreParams e{.out = {a.dw2},
                  .expert_stride = dw2.expert_stride,
                  .row_stride = dw2.outer_stride,
                  .rows = static_cast<int>(dw2.outer),
                  .columns = static_cast<int>(dw2.inner),
                  .f32 = d.f32_weight_grads,
                  .accumulate = d.accumulate_weight_grads};
    if (!d.f32_weight_grads) e.boxes[0] = maps.encode(dw2);
    if (!maps.status().ok()) return maps.status();
    const int n_blocks = tiles(n, kTileN);
    const GemmParams p{.a = rows,
                       .b = {.maps = {scaled_act, scaled_act}},
                       .extents = {.begins = a.offsets,
                                   .ends = row_ends(a),
                                   .expert_order = a.expert_order,
                                   .experts = static_cast<int>(d.experts),
                                   .n_blocks = n_blocks,
                                   .n_half = n_blocks}};
    return launch<Config>(p, e, exec, "down_proj_wgrad: launch");
  }
};

}  // namespace sonicmoe::cuda
