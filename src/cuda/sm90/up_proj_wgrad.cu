// dW1 = dH^T x[tokens], computed as its transpose: M = d (x gathered along K), N = n (gate rows,
// then up rows), K = rows.
#include "core/backends.h"
#include "cuda/sm90/epilogue/store_transposed.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/layouts.h"

namespace sonicmoe::cuda {
namespace {

template <class T, ALoad kALoad, bool kPlain, int kTileN, int kStages>
struct UpProjWgrad : Traits<T, kALoad, Major::mn, kTileN, Schedule::cooperative, kStages,
                            StoreTransposed<kPlain>> {};

template <int kTileN, int kStages>
struct Family {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      using T = decltype(type);
      const bool plain = !d.f32_weight_grads && !d.accumulate_weight_grads;
      return visit_a_load_k(d, [&](auto a_load) {
        constexpr ALoad kALoad = decltype(a_load)::value;
        if (plain) return f(UpProjWgrad<T, kALoad, true, kTileN, kStages>{});
        return f(UpProjWgrad<T, kALoad, false, kTileN, kStages>{});
      });
    });
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void*, const Exec& exec) {
    const std::int64_t n = d.intermediate;
    const bool gated = is_glu(d.activation);
    const W1View dw1 = w1_view(d, d.hidden);
    const int n_half = tiles(n, kTileN);
    TensorMaps maps(d.dtype);
    // N is two maps of n columns each: a tile of gate rows must not reach into the up rows. Without
    // rows nothing is loaded, but the maps must point somewhere.
    GemmParams p{.a = rows_along_k<Config>(&maps, d, a.x, a.row_tokens, a.dw1),
                 .extents = {.begins = a.offsets,
                             .ends = row_ends(a),
                             .expert_order = a.expert_order,
                             .experts = static_cast<int>(d.experts),
                             .n_blocks = (gated ? 2 : 1) * n_half,
                             .n_half = n_half}};
    encode_preact(&maps, d, d.rows > 0 ? a.dpreact : a.dw1, kTileK / 2, p.b.maps);
    StoreParams e{
        .out = {a.dw1,
                gated ? up_base(d, dw1, a.dw1, a.dw1_up, d.f32_weight_grads ? 4 : 2) : nullptr},
        .expert_stride = dw1.expert_stride,
        .row_stride = dw1.row_stride,
        .rows = static_cast<int>(n),
        .columns = static_cast<int>(d.hidden),
        .f32 = d.f32_weight_grads,
        .accumulate = d.accumulate_weight_grads};
    for (int half = 0; half < (gated ? 2 : 1) && !d.f32_weight_grads; ++half) {
      e.boxes[half] = maps.encode({.base = e.out[half],
                                   .inner = d.hidden,
                                   .outer = n,
                                   .experts = d.experts,
                                   .outer_stride = dw1.row_stride,
                                   .expert_stride = dw1.expert_stride,
                                   .box = WarpgroupTile::kRows});
    }
    if (!maps.status().ok()) return maps.status();
    return launch<Config>(p, e, exec, "up_proj_wgrad: launch");
  }
};
using Wide = Family<256, 4>;
using Small = Family<128, 6>;

std::string defer_wide(const GroupedGemmDesc& d, const DeviceTraits&) {
  return defer_to_small(d.usual_rows(), d.experts, d.intermediate);
}

}  // namespace

// Names give a tile's rows and columns of dW1.
constinit const Kernel<GroupedGemmDesc> kUpProjWgrad256 =
    kernel_entry<Wide, GroupedGemmDesc>({.op = "up_proj_wgrad",
                                         .name = "sm90.up_proj_wgrad.256x128",
                                         .reject = reject_contraction,
                                         .defer = defer_wide});
constinit const Kernel<GroupedGemmDesc> kUpProjWgrad128 = kernel_entry<Small, GroupedGemmDesc>(
    {.op = "up_proj_wgrad", .name = "sm90.up_proj_wgrad.128x128", .reject = reject_contraction});

}  // namespace sonicmoe::cuda
