// dW1 = dH^T x[tokens], computed as its transpose: M = d (x gathered along K), N = n (gate rows,
// then up rows), K = rows.
#include "core/backends.h"
#include "cuda/sm90/epilogue/store_transposed.cuh"
#include "cuda/sm90/launch.cuh"

namespace sonicmoe::cuda {
namespace {

template <class T, bool kPlain, int kTileN, int kStages>
struct UpProjWgrad : Traits<T, ALoad::gather_k, Major::mn, kTileN, Schedule::cooperative, kStages,
                            StoreTransposed<kPlain>> {};

template <class Config>
Status run_as(const GroupedGemmDesc& d, const GroupedGemmArgs& a, const Exec& exec) {
  const std::int64_t n = d.intermediate;
  const bool gated = is_glu(d.activation);
  const W1View dw1 = w1_view(d, d.hidden);
  TensorMaps maps(d.dtype);
  // Two maps of n columns each: a tile of gate rows must not reach into the up rows. Without rows
  // nothing is loaded, but the map must point somewhere.
  const bool empty = d.rows == 0;
  TensorView dpreact{empty ? a.dw1 : a.dpreact, n, d.rows, 1, gated ? 2 * n : n, 0, kTileK / 2};
  GemmParams p{};
  p.b_maps[0] = maps.encode(dpreact);
  if (gated && !empty) dpreact.base = static_cast<const char*>(a.dpreact) + n * 2;
  p.b_maps[1] = maps.encode(dpreact);
  StoreParams e{};
  e.out[0] = a.dw1;
  e.out[1] = gated ? up_base(d, dw1, a.dw1, a.dw1_up, d.f32_weight_grads ? 4 : 2) : nullptr;
  for (int half = 0; half < (gated ? 2 : 1) && !d.f32_weight_grads; ++half) {
    e.boxes[half] = maps.encode({e.out[half], d.hidden, n, d.experts, dw1.row_stride,
                                 dw1.expert_stride, WarpgroupTile::kRows});
  }
  if (!maps.status().ok()) return maps.status();
  p.gathered = a.x;
  p.offsets = a.offsets;
  p.overlap_previous = exec.handoff.overlap_previous;
  p.row_tokens = a.row_tokens;
  p.expert_order = a.expert_order;
  p.gathered_width = static_cast<int>(d.hidden);
  p.experts = static_cast<int>(d.experts);
  p.n_half = tiles(n, Config::kTileN);
  p.n_blocks = (gated ? 2 : 1) * p.n_half;

  e.expert_stride = dw1.expert_stride;
  e.row_stride = dw1.row_stride;
  e.rows = static_cast<int>(n);
  e.columns = static_cast<int>(d.hidden);
  e.f32 = d.f32_weight_grads;
  e.accumulate = d.accumulate_weight_grads;
  return launch<Config>(p, e, exec, "up_proj_wgrad: launch");
}

template <int kTileN, int kStages>
struct Entry {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      using T = decltype(type);
      if (d.f32_weight_grads || d.accumulate_weight_grads) {
        return f(UpProjWgrad<T, false, kTileN, kStages>{});
      }
      return f(UpProjWgrad<T, true, kTileN, kStages>{});
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

/// Tiles are named by rows and columns of dW1.
std::string defer_large(const GroupedGemmDesc& d, const DeviceTraits&) {
  return defer_to_small(d.rows, d.experts, d.intermediate);
}

}  // namespace

const Kernel<GroupedGemmDesc> kUpProjWgrad256 = {
    .op = "up_proj_wgrad",
    .name = "sm90.up_proj_wgrad.256x128",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_contraction,
    .defer = defer_large,
    .prepare = Wide::prepare,
    .run = Wide::run,
};
const Kernel<GroupedGemmDesc> kUpProjWgrad128 = {
    .op = "up_proj_wgrad",
    .name = "sm90.up_proj_wgrad.128x128",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_contraction,
    .prepare = Small::prepare,
    .run = Small::run,
};

}  // namespace sonicmoe::cuda
