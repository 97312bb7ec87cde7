// Y = A W2^T + b2: M = rows, N = d, K = n.
#include "core/backends.h"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/launch.cuh"

namespace sonicmoe::cuda {
namespace {

template <class T, bool kBias, int kN, Schedule kSchedule, int kStages>
struct DownProj : Traits<T, Own::load_rows, Major::k, kN, kSchedule, kStages,
                         StoreTile<AtRows, kBias>, (kN == 256)> {};

template <class Config>
Status run_as(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
              const Exec& exec) {
  constexpr int kN = Config::kN;
  const std::int64_t n = d.intermediate;
  TensorMaps maps(d.dtype);
  GemmParams p{};
  p.own[0] = p.own[1] = maps.encode({a.act, n, d.rows, 1, n, 0, kOwn});
  p.shared[0] = p.shared[1] = maps.encode({a.w2, n, d.hidden, d.experts, n, d.hidden * n, kN / 2});
  StoreParams e{};
  e.boxes[0] = maps.encode({a.expert_out, d.hidden, d.rows, 1, d.hidden, 0, WarpTile::kRows});
  e.boxed = true;
  if (!maps.status().ok()) return maps.status();
  p.offsets = a.offsets;
  p.beside_previous = exec.handoff.overlap_previous;
  p.experts = static_cast<int>(d.experts);
  p.shared_tiles = tiles(d.hidden, kN);
  p.k_blocks = p.k_half = tiles(n, kK);

  e.out[0] = a.expert_out;
  e.row_stride = d.hidden;
  e.columns = static_cast<int>(d.hidden);
  e.biased = d.bias;
  e.bias = a.b2;
  return launch_dealt<Config>(d, p, e, workspace, exec, "down_proj: launch");
}

template <int kN, Schedule kSchedule, int kStages>
struct Entry {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      using T = decltype(type);
      if (!d.bias) return f(DownProj<T, false, kN, kSchedule, kStages>{});
      return f(DownProj<T, true, kN, kSchedule, kStages>{});
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
  return defer_to_pingpong(device, d.rows, d.experts, d.hidden, tiles(d.intermediate, kK));
}

}  // namespace

const Kernel<GroupedGemmDesc> kDownProj256 = {
    .op = "down_proj",
    .name = "sm90.down_proj.128x256",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_gemm,
    .defer = defer_wide,
    .workspace = dealer_workspace,
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
