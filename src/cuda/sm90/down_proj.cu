// Y = A W2^T + b2: M = rows, N = d, K = n.
#include "core/backends.h"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/launch.cuh"

namespace sonicmoe::cuda {
namespace {

template <class T, bool kBias, int kTileN, Schedule kSchedule, int kStages>
struct DownProj : Traits<T, ALoad::load_m, Major::k, kTileN, kSchedule, kStages,
                         StoreTile<AtRows, kBias>, (kTileN == 256)> {};

template <class Config>
Status run_as(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
              const Exec& exec) {
  constexpr int kTileN = Config::kTileN;
  const std::int64_t n = d.intermediate;
  TensorMaps maps(d.dtype);
  GemmParams p{};
  p.a_maps[0] = p.a_maps[1] = maps.encode({a.act, n, d.rows, 1, n, 0, kTileM});
  p.b_maps[0] = p.b_maps[1] =
      maps.encode({a.w2, n, d.hidden, d.experts, n, d.hidden * n, kTileN / 2});
  StoreParams e{};
  e.boxes[0] = maps.encode({a.expert_out, d.hidden, d.rows, 1, d.hidden, 0, WarpTile::kRows});
  e.boxed = true;
  if (!maps.status().ok()) return maps.status();
  p.offsets = a.offsets;
  p.overlap_previous = exec.handoff.overlap_previous;
  p.experts = static_cast<int>(d.experts);
  p.n_blocks = tiles(d.hidden, kTileN);
  p.k_blocks = p.k_half = tiles(n, kTileK);

  e.out[0] = a.expert_out;
  e.row_stride = d.hidden;
  e.columns = static_cast<int>(d.hidden);
  e.biased = d.bias;
  e.bias = a.b2;
  return launch_scheduled<Config>(d, p, e, workspace, exec, "down_proj: launch");
}

template <int kTileN, Schedule kSchedule, int kStages>
struct Entry {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      using T = decltype(type);
      if (!d.bias) return f(DownProj<T, false, kTileN, kSchedule, kStages>{});
      return f(DownProj<T, true, kTileN, kSchedule, kStages>{});
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
  return defer_to_pingpong(device, d.rows, d.experts, d.hidden, tiles(d.intermediate, kTileK));
}

}  // namespace

const Kernel<GroupedGemmDesc> kDownProj256 = {
    .op = "down_proj",
    .name = "sm90.down_proj.128x256",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_gemm,
    .defer = defer_wide,
    .workspace = tile_counter_workspace,
    .prepare = Wide::prepare,
    .run = Wide::run,
};
const Kernel<GroupedGemmDesc> kDownProj192 = {
    .op = "down_proj",
    .name = "sm90.down_proj.128x192",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_gemm,
    .prepare = Pingpong::prepare,
    .run = Pingpong::run,
};

}  // namespace sonicmoe::cuda
