#pragma once

#include "core/backends.h"
#include "cuda/sm90/epilogue/activation.cuh"
#include "cuda/sm90/kernel_file.h"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/transposed.cuh"

/// H = x[tokens] W1^T + b1 and A = act(H): M = rows, gathered or contiguous; N = gate and up
/// columns; K = d.
namespace sonicmoe::cuda {

template <int kTileN>
constexpr bool kWide = kTileN == 256;  // may be scheduled dynamically; a kernel for each activation

template <class T, RowSource kSource, W1Form kForm, class Activations, bool kBias, int kTileN,
          int kStages>
struct UpProj
    : Traits<T, kRowsAlongM<kSource>, kForm == W1Form::rows ? Major::k : Major::mn, kTileN,
             Schedule::cooperative, kStages,
             StoreActivation<Activations, kBias, kForm == W1Form::alternating>, kWide<kTileN>> {
  static constexpr BMaps kBMaps =
      kForm == W1Form::rows || (kForm == W1Form::columns && Activations::kGated) ? BMaps::of_tile
                                                                                 : BMaps::of_k;
};

/// Is there a kernel with a bias? In wide tiles for the activations of models with biases: SwiGLU
/// and those with members.
template <int kTileN, class Activations>
constexpr bool kCompiledWithBias = !kWide<kTileN> || Activations::kHasMembers ||
                                   std::is_same_v<Activations, OneActivation<SwigluFn>>;

template <RowSource kSource, class T, bool kTransposed, int kTileN, int kStages>
struct UpProjFamily {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_form_and_activations<kTransposed, kWide<kTileN>>(
        d, [&](auto form, auto activations) {
          constexpr W1Form kForm = decltype(form)::value;
          using Activations = decltype(activations);
          using Plain = UpProj<T, kSource, kForm, Activations, false, kTileN, kStages>;
          using Biased = UpProj<T, kSource, kForm, Activations, true, kTileN, kStages>;
          if constexpr (kWide<kTileN>) {
            // A look for a bias costs 6 % of the kernel: worth a kernel without.
            if (!d.bias) return f(Plain{});
          }
          // Plain stands for a kernel that is not compiled: the entry rejects its descriptors.
          return f(std::conditional_t<kCompiledWithBias<kTileN, Activations>, Biased, Plain>{});
        });
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                    const Exec& exec) {
    if (d.rows == 0) return {};
    const bool gated = is_glu(d.activation);
    const std::int64_t n = d.intermediate;
    const W1View b1 = w1_view(d, 1);
    const int n_blocks = tiles(n, gated ? kTileN / 2 : kTileN), k_blocks = tiles(d.hidden, kTileK);
    // Of a tile, fitted to measurements (docs/findings/archive/epilogue-stages.md).
    const double cycles = kTileN * (4.4 * k_blocks + 20);
    TensorMaps maps(d.dtype);
    OperandB b{.gate_and_up = gated, .last_chunk = last_chunk(parts_of(d).width)};
    if constexpr (kTransposed) {
      encode_w1_columns(&maps, d, a.w1, kTileK / 2, b.maps);
    } else {
      encode_w1_rows(&maps, d, a.w1, a.w1_up, kTileN / 2, b.maps);
    }
    const GemmParams p{.a = rows_along_m<Config>(&maps, d, a.x, a.row_tokens),
                       .b = b,
                       .extents = {.begins = a.offsets,
                                   .ends = row_ends(a),
                                   .experts = static_cast<int>(d.experts),
                                   .n_blocks = n_blocks,
                                   .k_blocks = k_blocks,
                                   .k_half = k_blocks},
                       .scheduling = spread_starts(d, n_blocks, cycles, exec)};
    typename Config::Epilogue::Params e{.act_boxes = maps.encode({.base = a.act,
                                                                  .inner = n,
                                                                  .outer = d.rows,
                                                                  .outer_stride = n,
                                                                  .box = WarpTile::kRows}),
                                        .preact = d.inference ? nullptr : a.preact,
                                        .act = a.act,
                                        .bias_stride = d.alternates() ? 1 : b1.row_stride,
                                        .bias_expert_stride = b1.expert_stride,
                                        .intermediate = static_cast<int>(n),
                                        .activations = decltype(e.activations)::of(d.activation)};
    if (!d.inference) encode_preact(&maps, d, a.preact, WarpTile::kRows, e.preact_boxes);
    if (d.bias) {
      e.b1[0] = a.b1;
      e.b1[1] = gated ? up_base(d, b1, a.b1, a.b1_up) : nullptr;
    }
    if (!maps.status().ok()) return maps.status();
    return launch_scheduled<Config>(d, p, e, workspace, exec, "up_proj: launch");
  }
};

template <int kTileN, int kStages>
struct UpProjTiles {
  template <RowSource kSource, class T, bool kTransposed>
  using Family = UpProjFamily<kSource, T, kTransposed, kTileN, kStages>;

  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_file<Family>(d, f);
  }
};
using WideUpProj = UpProjTiles<256, 4>;
using NarrowUpProj = UpProjTiles<128, 6>;

}  // namespace sonicmoe::cuda
