// dX~ = dH W1: M = rows, N = d, K = 2n as gate columns, then up columns; in one part where they
// alternate (n without a gate).
#include "core/backends.h"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/layouts.h"

namespace sonicmoe::cuda {
namespace {

template <class T, Major kBMajor, int kTileN, Schedule kSchedule, int kStages>
struct UpProjDgrad : Traits<T, ALoad::load_m, kBMajor, kTileN, kSchedule, kStages,
                            StoreTile<AtRows, false>, kTileN == 256> {
  static constexpr BMaps kBMaps = BMaps::of_k;
};

template <int kTileN, Schedule kSchedule, int kStages>
struct Family {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      return visit_transposed(d, [&](auto transposed) {
        constexpr Major kMajor = decltype(transposed)::value ? Major::k : Major::mn;
        return f(UpProjDgrad<decltype(type), kMajor, kTileN, kSchedule, kStages>{});
      });
    });
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                    const Exec& exec) {
    if (d.rows == 0) return {};
    const Parts parts = parts_of(d);
    TensorMaps maps(d.dtype);
    // K is two maps of n columns each, never one of 2n: a block of K must not reach into the other.
    GemmParams p{.b = {.last_chunk = last_chunk(d.hidden)},
                 .extents = {.begins = a.offsets,
                             .ends = row_ends(a),
                             .experts = static_cast<int>(d.experts),
                             .n_blocks = tiles(d.hidden, kTileN),
                             .k_blocks = parts.count * tiles(parts.width, kTileK),
                             .k_half = tiles(parts.width, kTileK)}};
    encode_preact(&maps, d, a.dpreact, kTileM, p.a.maps);
    if constexpr (Config::kBMajor == Major::k) {
      encode_w1_columns(&maps, d, a.w1, kTileN / 2, p.b.maps);
    } else {
      encode_w1_rows(&maps, d, a.w1, a.w1_up, kTileK / 2, p.b.maps);
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
