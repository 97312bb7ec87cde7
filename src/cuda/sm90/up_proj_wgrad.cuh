#pragma once

#include "cuda/sm90/epilogue/store_transposed.cuh"
#include "cuda/sm90/wgrad.cuh"

/// dW1 = dH^T x[tokens], computed as its transpose: M = d (x gathered along K), N = n (gate rows,
/// then up rows), K = rows. With transposed weights it is stored as it is computed.
namespace sonicmoe::cuda {

template <class T, ALoad kALoad, bool kTransposed_, bool kPlain, int kTileN, int kStages>
struct UpProjWgrad : Traits<T, kALoad, Major::mn, kTileN, Schedule::cooperative, kStages,
                            std::conditional_t<kTransposed_, StoreTile<AtMByParts<kPlain>, false>,
                                               StoreTransposed<kPlain>>> {
  static constexpr bool kTransposed = kTransposed_;  ///< are the weights
};

/// Where dW1 (E, W, d) goes, or two of (E, n, d).
inline void store_rows(TensorMaps* maps, const GroupedGemmDesc& d, const GroupedGemmArgs& a,
                       StoreParams* e) {
  const bool gated = is_glu(d.activation);
  const W1View dw1 = w1_view(d, d.hidden);
  void* const up = gated ? up_base(d, dw1, a.dw1, a.dw1_up, d.f32_weight_grads ? 4 : 2) : a.dw1;
  e->out[0] = a.dw1;
  e->out[1] = up;
  e->expert_stride = dw1.expert_stride;
  e->row_stride = dw1.row_stride;
  e->rows = static_cast<int>(d.intermediate);
  e->columns = static_cast<int>(d.hidden);
  if (!d.f32_weight_grads) encode_w1_rows(maps, d, a.dw1, up, WarpgroupTile::kRows, e->boxes);
}

/// Where dW1 (E, d, W) goes.
inline void store_columns(TensorMaps* maps, const GroupedGemmDesc& d, const GroupedGemmArgs& a,
                          StoreParams* e) {
  e->out[0] = a.dw1;
  e->expert_stride = d.hidden * d.preact_width();
  e->row_stride = d.preact_width();
  e->rows = static_cast<int>(d.hidden);
  e->columns = static_cast<int>(parts_of(d).width);
  if (!d.f32_weight_grads) encode_w1_columns(maps, d, a.dw1, WarpTile::kRows, e->boxes);
}

template <int kTileN, int kStages>
struct UpProjWgradFamily {
  template <class T, ALoad kALoad, bool kTransposed, bool kPlain>
  using ConfigOf = UpProjWgrad<T, kALoad, kTransposed, kPlain, kTileN, kStages>;

  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_wgrad<ConfigOf>(d, f);
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void*, const Exec& exec) {
    const Parts parts = parts_of(d);
    const int n_half = tiles(parts.width, kTileN);
    TensorMaps maps(d.dtype);
    // N is two maps of n columns each: a tile of gate rows must not reach into the up rows. Without
    // rows nothing is loaded, but the maps must point somewhere.
    GemmParams p{.a = rows_along_k<Config>(&maps, d, a.x, a.row_tokens, a.dw1),
                 .extents = {.begins = a.offsets,
                             .ends = row_ends(a),
                             .expert_order = a.expert_order,
                             .experts = static_cast<int>(d.experts),
                             .n_blocks = parts.count * n_half,
                             .n_half = n_half}};
    encode_preact(&maps, d, d.rows > 0 ? a.dpreact : a.dw1, kTileK / 2, p.b.maps);
    StoreParams e{.f32 = d.f32_weight_grads, .accumulate = d.accumulate_weight_grads};
    if constexpr (Config::kTransposed) {
      store_columns(&maps, d, a, &e);
    } else {
      store_rows(&maps, d, a, &e);
    }
    if (!maps.status().ok()) return maps.status();
    return launch<Config>(p, e, exec, "up_proj_wgrad: launch");
  }
};

}  // namespace sonicmoe::cuda
