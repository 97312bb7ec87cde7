// Y = A W2^T + b2, with the scores of contiguous rows: M = rows, N = d, K = n.
#include "core/backends.h"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/tensor_map.h"

namespace sonicmoe::cuda {
namespace {

template <class T, bool kBias, bool kScores, int kTileN, Schedule kSchedule, int kStages>
struct DownProj : Traits<T, ALoad::load_m, Major::k, kTileN, kSchedule, kStages,
                         StoreTile<AtRows, kBias, kScores>, kTileN == 256> {};

/// Scores of gathered rows enter in the sum of a token's rows.
bool applies_scores(const GroupedGemmDesc& d) { return !d.gathers() && d.scored(); }

template <int kTileN, Schedule kSchedule, int kStages>
struct Family {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      using T = decltype(type);
      if (applies_scores(d)) {
        if (!d.bias) return f(DownProj<T, false, true, kTileN, kSchedule, kStages>{});
        return f(DownProj<T, true, true, kTileN, kSchedule, kStages>{});
      }
      if (!d.bias) return f(DownProj<T, false, false, kTileN, kSchedule, kStages>{});
      return f(DownProj<T, true, false, kTileN, kSchedule, kStages>{});
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
    const CUtensorMap w2 = maps.encode({.base = a.w2,
                                        .inner = n,
                                        .outer = d.hidden,
                                        .experts = d.experts,
                                        .outer_stride = n,
                                        .expert_stride = d.hidden * n,
                                        .box = kTileN / 2});
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
                       .b = {.maps = {w2, w2}},
                       .extents = {.begins = a.offsets,
                                   .ends = row_ends(a),
                                   .experts = static_cast<int>(d.experts),
                                   .n_blocks = tiles(d.hidden, kTileN),
                                   .k_blocks = k_blocks,
                                   .k_half = k_blocks}};
    return launch_scheduled<Config>(d, p, e, workspace, exec, "down_proj: launch");
  }
};
using Wide = Family<256, Schedule::cooperative, 4>;
using Pingpong = Family<192, Schedule::pingpong, 4>;

std::string defer_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  return defer_to_pingpong(device, d.usual_rows(), d.experts, d.hidden,
                           tiles(d.intermediate, kTileK));
}

}  // namespace

constinit const Kernel<GroupedGemmDesc> kDownProj256 =
    kernel_entry<Wide, GroupedGemmDesc>({.op = "down_proj",
                                         .name = "sm90.down_proj.128x256",
                                         .reject = reject_gemm,
                                         .defer = defer_wide,
                                         .workspace = tile_counter_workspace});
constinit const Kernel<GroupedGemmDesc> kDownProj192 = kernel_entry<Pingpong, GroupedGemmDesc>(
    {.op = "down_proj", .name = "sm90.down_proj.128x192", .reject = reject_gemm});

}  // namespace sonicmoe::cuda
