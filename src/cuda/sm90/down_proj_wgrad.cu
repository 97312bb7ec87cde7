// dW2 = dO[tokens]^T (s A): M = d (dO gathered along K), N = n, K = rows.
#include "core/backends.h"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/launch.cuh"

namespace sonicmoe::cuda {
namespace {

template <class T, bool kPlain, int kTileN, int kStages>
struct DownProjWgrad : Traits<T, ALoad::gather_k, Major::mn, kTileN, Schedule::cooperative, kStages,
                              StoreTile<AtMByN<kPlain>, false>> {};

template <class Config>
Status run_as(const GroupedGemmDesc& d, const GroupedGemmArgs& a, const Exec& exec) {
  const std::int64_t n = d.intermediate;
  TensorMaps maps(d.dtype);
  GemmParams p{};
  // Without rows nothing is loaded, but the map must point somewhere: every expert still gets its
  // zeros.
  const void* const scaled_act = d.rows > 0 ? a.scaled_act : a.dw2;
  p.b_maps[0] = p.b_maps[1] = maps.encode({scaled_act, n, d.rows, 1, n, 0, kTileK / 2});
  StoreParams e{};
  if (!d.f32_weight_grads) {
    e.boxes[0] = maps.encode({a.dw2, n, d.hidden, d.experts, n, d.hidden * n, WarpTile::kRows});
  }
  if (!maps.status().ok()) return maps.status();
  p.gathered = a.dout;
  p.offsets = a.offsets;
  p.overlap_previous = exec.handoff.overlap_previous;
  p.row_tokens = a.row_tokens;
  p.expert_order = a.expert_order;
  p.gathered_width = static_cast<int>(d.hidden);
  p.experts = static_cast<int>(d.experts);
  p.n_blocks = p.n_half = tiles(n, Config::kTileN);

  e.out[0] = a.dw2;
  e.expert_stride = d.hidden * n;
  e.row_stride = n;
  e.rows = static_cast<int>(d.hidden);
  e.columns = static_cast<int>(n);
  e.f32 = d.f32_weight_grads;
  e.accumulate = d.accumulate_weight_grads;
  return launch<Config>(p, e, exec, "down_proj_wgrad: launch");
}

template <int kTileN, int kStages>
struct Entry {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      using T = decltype(type);
      if (d.f32_weight_grads || d.accumulate_weight_grads) {
        return f(DownProjWgrad<T, false, kTileN, kStages>{});
      }
      return f(DownProjWgrad<T, true, kTileN, kStages>{});
    });
  }
  static Status prepare(const GroupedGemmDesc& d, const Exec&) {
    return visit(d, [](auto config) { return cuda::prepare<decltype(config)>(); });
  }
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void*,
                    const Exec& exec) noexcept {
    return visit(d, [&](auto config) { return run_as<decltype(config)>(d, a, exec); });
  }
};

using Wide = Entry<256, 4>;
using Small = Entry<128, 6>;

std::string defer_large(const GroupedGemmDesc& d, const DeviceTraits&) {
  return defer_to_small(d.rows, d.experts, d.intermediate);
}

}  // namespace

const Kernel<GroupedGemmDesc> kDownProjWgrad256 = {
    .op = "down_proj_wgrad",
    .name = "sm90.down_proj_wgrad.128x256",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_contraction,
    .defer = defer_large,
    .prepare = Wide::prepare,
    .run = Wide::run,
};
const Kernel<GroupedGemmDesc> kDownProjWgrad128 = {
    .op = "down_proj_wgrad",
    .name = "sm90.down_proj_wgrad.128x128",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_contraction,
    .prepare = Small::prepare,
    .run = Small::run,
};

}  // namespace sonicmoe::cuda
