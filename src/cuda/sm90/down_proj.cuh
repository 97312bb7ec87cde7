#pragma once

#include "core/backends.h"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/kernel_file.h"
#include "cuda/sm90/launch.cuh"

/// Y = A W2^T + b2, with the scores of contiguous rows: M = rows, N = d, K = n.
namespace sonicmoe::cuda {

template <class T, Major kBMajor, bool kBias, bool kScores, int kTileN, Schedule kSchedule,
          int kStages>
struct DownProj : Traits<T, ALoad::load_m, kBMajor, kTileN, kSchedule, kStages,
                         StoreTile<AtRows, kBias, kScores>, kTileN == 256> {};

/// Scores of gathered rows enter in the sum of a token's rows.
inline bool applies_scores(const GroupedGemmDesc& d) { return !d.gathers() && d.scored(); }

template <bool kTransposed, int kTileN, Schedule kSchedule, int kStages>
struct DownProjFamily {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      using T = decltype(type);
      constexpr Major kMajor = kTransposed ? Major::mn : Major::k;
      if (applies_scores(d)) {
        if (!d.bias) return f(DownProj<T, kMajor, false, true, kTileN, kSchedule, kStages>{});
        return f(DownProj<T, kMajor, true, true, kTileN, kSchedule, kStages>{});
      }
      if (!d.bias) return f(DownProj<T, kMajor, false, false, kTileN, kSchedule, kStages>{});
      return f(DownProj<T, kMajor, true, false, kTileN, kSchedule, kStages>{});
    });
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                    const Exec& exec) {
    if (d.rows == 0) return {};
    const std::int64_t n = d.intermediate;
    TensorMaps maps(d.dtype);
    const CUtensorMap act =
        maps.encode({.base = a.act, .inner = n, .outer = d.rows, .outer_stride = n, .box = kTileM});
    const CUtensorMap w2 = maps.encode(w2_view(d, a.w2, kTransposed ? kTileK / 2 : kTileN / 2));
    const StoreParams e{.boxes = {maps.encode({.base = a.expert_out,
                                               .inner = d.hidden,
                                               .outer = d.rows,
                                               .outer_stride = d.hidden,
                                               .box = WarpTile::kRows})},
                        .out = {a.expert_out},
                        .row_stride = d.hidden,
                        .columns = static_cast<int>(d.hidden),
                        .bias = d.bias ? a.b2 : nullptr,
                        .row_scores = applies_scores(d) ? a.row_scores : nullptr,
                        .scores_bias = d.scores_bias()};
    if (!maps.status().ok()) return maps.status();
    const int k_blocks = tiles(n, kTileK);
    const GemmParams p{.a = {.maps = {act, act}},
                       .b = {.maps = {w2, w2}, .last_chunk = last_chunk(d.hidden)},
                       .extents = {.begins = a.offsets,
                                   .ends = row_ends(a),
                                   .experts = static_cast<int>(d.experts),
                                   .n_blocks = tiles(d.hidden, kTileN),
                                   .k_blocks = k_blocks,
                                   .k_half = k_blocks}};
    return launch_scheduled<Config>(d, p, e, workspace, exec, "down_proj: launch");
  }
};
template <int kTileN, Schedule kSchedule, int kStages>
struct DownProjTiles {
  template <bool kTransposed>
  using Family = DownProjFamily<kTransposed, kTileN, kSchedule, kStages>;

  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_transposed(
        d, [&](auto transposed) { return f(KernelFile<Family<decltype(transposed)::value>>{}); });
  }
};
using WideDownProj = DownProjTiles<256, Schedule::cooperative, 4>;
using PingpongDownProj = DownProjTiles<192, Schedule::pingpong, 4>;

}  // namespace sonicmoe::cuda
