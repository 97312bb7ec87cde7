// dX~ = dH W1: M = rows, N = d, K = 2n as gate columns, then up columns (n without a gate).
#include "core/backends.h"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/launch.cuh"

namespace sonicmoe::cuda {
namespace {

template <class T, int kTileN, Schedule kSchedule, int kStages>
struct UpProjDgrad : Traits<T, ALoad::load_m, Major::mn, kTileN, kSchedule, kStages,
                            StoreTile<AtRows, false>, (kTileN == 256)> {};

template <class Config>
Status run_as(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
              const Exec& exec) {
  const std::int64_t n = d.intermediate;
  const bool gated = is_glu(d.activation);
  const std::int64_t width = gated ? 2 * n : n;
  const W1View w1 = w1_view(d, d.hidden);
  TensorMaps maps(d.dtype);
  // Two maps of n columns each, never one of 2n: a block of K must not reach into the other half.
  TensorView dpreact{a.dpreact, n, d.rows, 1, width, 0, kTileM};
  TensorView weights{a.w1, d.hidden, n, d.experts, w1.row_stride, w1.expert_stride, kTileK / 2};
  GemmParams p{};
  p.a_maps[0] = maps.encode(dpreact);
  p.b_maps[0] = maps.encode(weights);
  if (gated) {
    dpreact.base = static_cast<const char*>(a.dpreact) + n * 2;
    weights.base = up_base(d, w1, a.w1, a.w1_up);
  }
  p.a_maps[1] = maps.encode(dpreact);
  p.b_maps[1] = maps.encode(weights);
  StoreParams e{};
  e.boxes[0] = maps.encode({a.dx_rows, d.hidden, d.rows, 1, d.hidden, 0, WarpTile::kRows});
  e.boxed = true;
  if (!maps.status().ok()) return maps.status();
  p.offsets = a.offsets;
  p.overlap_previous = exec.handoff.overlap_previous;
  p.experts = static_cast<int>(d.experts);
  p.n_blocks = tiles(d.hidden, Config::kTileN);
  p.n_last_chunk = last_chunk(d.hidden);
  p.k_half = tiles(n, kTileK);
  p.k_blocks = (gated ? 2 : 1) * p.k_half;

  e.out[0] = a.dx_rows;
  e.row_stride = d.hidden;
  e.columns = static_cast<int>(d.hidden);
  return launch_scheduled<Config>(d, p, e, workspace, exec, "up_proj_dgrad: launch");
}

template <int kTileN, Schedule kSchedule, int kStages>
struct Entry {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      return f(UpProjDgrad<decltype(type), kTileN, kSchedule, kStages>{});
    });
  }
  static Status prepare(const GroupedGemmDesc& d, const Exec&) {
    return visit(d, [](auto config) { return cuda::prepare<decltype(config)>(); });
  }
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                    const Exec& exec) noexcept {
    if (d.rows == 0) return {};
    return visit(d, [&](auto config) { return run_as<decltype(config)>(d, a, workspace, exec); });
  }
};

using Wide = Entry<256, Schedule::cooperative, 4>;
using Pingpong = Entry<192, Schedule::pingpong, 4>;

std::string defer_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  return defer_to_pingpong(device, d.rows, d.experts, d.hidden,
                           (is_glu(d.activation) ? 2 : 1) * tiles(d.intermediate, kTileK));
}

}  // namespace

const Kernel<GroupedGemmDesc> kUpProjDgrad256 = {
    .op = "up_proj_dgrad",
    .name = "sm90.up_proj_dgrad.128x256",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_gemm,
    .defer = defer_wide,
    .workspace = tile_counter_workspace,
    .prepare = Wide::prepare,
    .run = Wide::run,
};
const Kernel<GroupedGemmDesc> kUpProjDgrad192 = {
    .op = "up_proj_dgrad",
    .name = "sm90.up_proj_dgrad.128x192",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_gemm,
    .prepare = Pingpong::prepare,
    .run = Pingpong::run,
};

}  // namespace sonicmoe::cuda
