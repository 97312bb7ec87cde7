// dX~ = dH W1: M = rows, N = d, K = 2n as gate columns, then up columns (n without a gate).
#include "core/backends.h"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/layouts.h"

namespace sonicmoe::cuda {
namespace {

template <class T, int kTileN, Schedule kSchedule, int kStages>
struct UpProjDgrad : Traits<T, ALoad::load_m, Major::mn, kTileN, kSchedule, kStages,
                            StoreTile<AtRows, false>, kTileN == 256> {};

template <int kTileN, Schedule kSchedule, int kStages>
struct Family {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      return f(UpProjDgrad<decltype(type), kTileN, kSchedule, kStages>{});
    });
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                    const Exec& exec) {
    if (d.rows == 0) return {};
    const std::int64_t n = d.intermediate;
    const bool gated = is_glu(d.activation);
    const W1View w1 = w1_view(d, d.hidden);
    TensorMaps maps(d.dtype);
    // K is two maps of n columns each, never one of 2n: a block of K must not reach into the other.
    GemmParams p{.b = {.last_chunk = last_chunk(d.hidden)},
                 .extents = {.begins = a.offsets,
                             .ends = row_ends(a),
                             .experts = static_cast<int>(d.experts),
                             .n_blocks = tiles(d.hidden, kTileN),
                             .k_blocks = (gated ? 2 : 1) * tiles(n, kTileK),
                             .k_half = tiles(n, kTileK)}};
    encode_preact(&maps, d, a.dpreact, kTileM, p.a.maps);
    const void* const bases[2] = {a.w1, gated ? up_base(d, w1, a.w1, a.w1_up) : a.w1};
    for (int half = 0; half < 2; ++half) {
      p.b.maps[half] = maps.encode({.base = bases[half],
                                    .inner = d.hidden,
                                    .outer = n,
                                    .experts = d.experts,
                                    .outer_stride = w1.row_stride,
                                    .expert_stride = w1.expert_stride,
                                    .box = kTileK / 2});
    }
    const StoreParams e{.boxes = {maps.encode({.base = a.dx_rows,
                                               .inner = d.hidden,
                                               .outer = d.rows,
                                               .outer_stride = d.hidden,
                                               .box = WarpTile::kRows})},
                        .out = {a.dx_rows},
                        .row_stride = d.hidden,
                        .columns = static_cast<int>(d.hidden)};
    if (!maps.status().ok()) return maps.status();
    return launch_scheduled<Config>(d, p, e, workspace, exec, "up_proj_dgrad: launch");
  }
};
using Wide = Family<256, Schedule::cooperative, 4>;
using Pingpong = Family<192, Schedule::pingpong, 4>;

std::string defer_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  return defer_to_pingpong(device, d.usual_rows(), d.experts, d.hidden,
                           (is_glu(d.activation) ? 2 : 1) * tiles(d.intermediate, kTileK));
}

}  // namespace

constinit const Kernel<GroupedGemmDesc> kUpProjDgrad256 =
    kernel_entry<Wide, GroupedGemmDesc>({.op = "up_proj_dgrad",
                                         .name = "sm90.up_proj_dgrad.128x256",
                                         .reject = reject_gemm,
                                         .defer = defer_wide,
                                         .workspace = tile_counter_workspace});
constinit const Kernel<GroupedGemmDesc> kUpProjDgrad192 = kernel_entry<Pingpong, GroupedGemmDesc>(
    {.op = "up_proj_dgrad", .name = "sm90.up_proj_dgrad.128x192", .reject = reject_gemm});

}  // namespace sonicmoe::cuda
