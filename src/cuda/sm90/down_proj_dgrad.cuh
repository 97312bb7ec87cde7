#pragma once

#include "core/backends.h"
#include "cuda/sm90/epilogue/activation_grad.cuh"
#include "cuda/sm90/kernel_file.h"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/transposed.cuh"
#include "cuda/sum_dscores.h"

/// dA' = dO[tokens] W2 stays in registers: M = rows, gathered or contiguous; N = n, K = d. With A
/// recomputed from H: dH = dAct(s dA', H), A' = s A, dS = <dA', A>.
namespace sonicmoe::cuda {

inline constexpr int kWide = 256;  // may be scheduled dynamically; a kernel for each activation

template <class T, RowSource kSource, W1Form kForm, class Activations, int kTileN, int kStages>
struct DownProjDgrad
    : Traits<T, kRowsAlongM<kSource>, kForm == W1Form::rows ? Major::mn : Major::k, kTileN,
             Schedule::cooperative, kStages,
             StoreActivationGrad<Activations, kForm == W1Form::alternating>, kTileN == kWide> {
  static constexpr bool kBPairsRows = kForm == W1Form::alternating;
  static constexpr bool kSpreadsStarts = true;
};

template <RowSource kSource, class T, bool kTransposed, int kTileN, int kStages>
struct DownProjDgradFamily {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_form_and_activations<kTransposed, (kTileN == kWide)>(
        d, [&](auto form, auto activations) {
          constexpr W1Form kForm = decltype(form)::value;
          return f(DownProjDgrad<T, kSource, kForm, decltype(activations), kTileN, kStages>{});
        });
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                    const Exec& exec) {
    if (d.rows == 0) return {};
    const std::int64_t n = d.intermediate;
    const int n_blocks = tiles(n, kTileN), k_blocks = tiles(d.hidden, kTileK);
    // Of a tile, fitted to measurements (docs/findings/archive/epilogue-stages.md).
    const double cycles = kTileN * (4.3 * k_blocks + 78);
    TensorMaps maps(d.dtype);
    TensorView view = w2_view(d, a.w2, kTransposed ? kTileN / 2 : kTileK / 2);
    view.pairs_rows = Config::kBPairsRows;
    const CUtensorMap w2 = maps.encode(view);
    const GemmParams p{.a = rows_along_m<Config>(&maps, d, a.dout, a.row_tokens),
                       .b = {.maps = {w2, w2}, .last_chunk = last_chunk(n)},
                       .extents = {.begins = a.offsets,
                                   .ends = row_ends(a),
                                   .experts = static_cast<int>(d.experts),
                                   .n_blocks = n_blocks,
                                   .k_blocks = k_blocks,
                                   .k_half = k_blocks},
                       .scheduling = spread_starts(d, n_blocks, cycles, exec)};
    float* dscores = n_blocks == 1 ? a.row_dscores : static_cast<float*>(workspace);
    if (!d.scored()) dscores = nullptr;
    typename Config::Epilogue::Params e{.scaled_act_boxes = maps.encode({.base = a.scaled_act,
                                                                         .inner = n,
                                                                         .outer = d.rows,
                                                                         .outer_stride = n,
                                                                         .box = WarpTile::kRows}),
                                        .dpreact = a.dpreact,
                                        .scaled_act = a.scaled_act,
                                        .row_scores = d.scored() ? a.row_scores : nullptr,
                                        .dscores = dscores,
                                        .capacity = d.rows,
                                        .intermediate = static_cast<int>(n),
                                        .activations = decltype(e.activations)::of(d.activation)};
    encode_preact(&maps, d, a.preact, 64, e.preact_boxes);
    encode_preact(&maps, d, a.dpreact, WarpTile::kRows, e.dpreact_boxes);
    if (!maps.status().ok()) return maps.status();
    char* const counter = static_cast<char*>(workspace) + dscores_partials_bytes(d, n_blocks);
    Status status = launch_scheduled<Config>(d, p, e, counter, exec, "down_proj_dgrad: launch");
    if (!status.ok() || n_blocks == 1 || !d.scored()) return status;
    return sum_dscores(d, e.dscores, n_blocks, a, exec);
  }
};

template <int kTileN, int kStages>
struct DownProjDgradTiles {
  template <RowSource kSource, class T, bool kTransposed>
  using Family = DownProjDgradFamily<kSource, T, kTransposed, kTileN, kStages>;

  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_file<Family>(d, f);
  }

  static std::size_t workspace(const GroupedGemmDesc& d, const Exec&) {
    return dscores_partials_bytes(d, tiles(d.intermediate, kTileN)) +
           (kTileN == kWide ? kTileCounterBytes : 0);
  }
};
using WideDownProjDgrad = DownProjDgradTiles<kWide, 4>;
using NarrowDownProjDgrad = DownProjDgradTiles<128, 6>;

}  // namespace sonicmoe::cuda
