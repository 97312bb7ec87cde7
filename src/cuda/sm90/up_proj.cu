// H = x[tokens] W1^T + b1 and A = act(H): M = rows (gathered), N = gate and up columns, K = d.
#include "core/backends.h"
#include "cuda/sm90/epilogue/activation.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/layouts.h"

namespace sonicmoe::cuda {
namespace {

template <int kTileN>
constexpr bool kWide = kTileN == 256;  // may be scheduled dynamically; a kernel for each activation

template <class T, class Activations, bool kBias, int kTileN, int kStages>
struct UpProj : Traits<T, ALoad::gather_m, Major::k, kTileN, Schedule::cooperative, kStages,
                       StoreActivation<Activations, kBias>, kWide<kTileN>> {};

/// Is there a kernel with a bias? In wide tiles for SwiGLU alone, as models with biases have it.
template <int kTileN, class Activations>
constexpr bool kCompiledWithBias =
    !kWide<kTileN> || std::is_same_v<Activations, OneActivation<SwigluFn>>;

template <int kTileN, int kStages>
struct Family {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      return visit_activations<kWide<kTileN>>(d.activation, [&](auto activations) {
        using T = decltype(type);
        using Activations = decltype(activations);
        using Plain = UpProj<T, Activations, false, kTileN, kStages>;
        using Biased = UpProj<T, Activations, true, kTileN, kStages>;
        if constexpr (kWide<kTileN>) {
          // A look for a bias costs 6 % of the kernel: worth a kernel without.
          if (!d.bias) return f(Plain{});
        }
        // Plain stands for a kernel that is not compiled: reject_wide() refuses its descriptors.
        return f(std::conditional_t<kCompiledWithBias<kTileN, Activations>, Biased, Plain>{});
      });
    });
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                    const Exec& exec) {
    if (d.rows == 0) return {};
    const bool gated = is_glu(d.activation);
    const std::int64_t n = d.intermediate;
    const W1View w1 = w1_view(d, d.hidden), b1 = w1_view(d, 1);
    const int n_blocks = tiles(n, gated ? kTileN / 2 : kTileN), k_blocks = tiles(d.hidden, kTileK);
    // Of a tile, fitted to measurements (docs/findings/epilogue-stages.md).
    const double cycles = kTileN * (4.4 * k_blocks + 20);
    TensorMaps maps(d.dtype);
    const auto encode_w1 = [&](const void* base) {
      return maps.encode({.base = base,
                          .inner = d.hidden,
                          .outer = n,
                          .experts = d.experts,
                          .outer_stride = w1.row_stride,
                          .expert_stride = w1.expert_stride,
                          .box = kTileN / 2});
    };
    const void* const up = gated ? up_base(d, w1, a.w1, a.w1_up) : a.w1;
    const GemmParams p{
        .a = {.rows = a.x, .row_tokens = a.row_tokens, .width = static_cast<int>(d.hidden)},
        .b = {.maps = {encode_w1(a.w1), encode_w1(up)}, .gate_and_up = gated},
        .extents = {.offsets = a.offsets,
                    .experts = static_cast<int>(d.experts),
                    .n_blocks = n_blocks,
                    .k_blocks = k_blocks,
                    .k_half = k_blocks},
        .scheduling = spread_starts(d, n_blocks, cycles, exec)};
    typename Config::Epilogue::Params e{.act_boxes = maps.encode({.base = a.act,
                                                                  .inner = n,
                                                                  .outer = d.rows,
                                                                  .outer_stride = n,
                                                                  .box = WarpTile::kRows}),
                                        .preact = d.inference ? nullptr : a.preact,
                                        .act = a.act,
                                        .bias_stride = b1.row_stride,
                                        .bias_expert_stride = b1.expert_stride,
                                        .intermediate = static_cast<int>(n),
                                        .activations = decltype(e.activations)::of(d.activation)};
    if (!d.inference) encode_preact(&maps, d, a.preact, WarpTile::kRows, e.preact_boxes);
    if (d.bias) {
      e.b1[0] = a.b1;
      e.b1[1] = gated ? up_base(d, b1, a.b1, a.b1_up) : nullptr;
    }
    if (!maps.status().ok()) return maps.status();
    return launch_scheduled<Config>(d, p, e, workspace, exec, "up_proj: launch");
  }
};
using WideTiles = Family<256, 4>;
using NarrowTiles = Family<128, 6>;

std::string reject_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  if (std::string reason = reject_gemm(d, device); !reason.empty() || !d.bias) return reason;
  const bool compiled = visit_activations<true>(
      d.activation, [](auto activations) { return kCompiledWithBias<256, decltype(activations)>; });
  return compiled ? "" : "bias: got true, allowed: false for " + to_string(d.activation);
}

std::string defer_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  const int units = is_glu(d.activation) ? 64 : 128;
  return defer_to_narrow(
      device, d.rows, d.experts, tiles(d.intermediate, 2 * units), tiles(d.intermediate, units),
      narrow_up_proj_percent(device, d.tokens * d.hidden * 2, tiles(d.hidden, kTileK)));
}

}  // namespace

constinit const Kernel<GroupedGemmDesc> kUpProj256 =
    kernel_entry<WideTiles, GroupedGemmDesc>({.op = "up_proj",
                                              .name = "sm90.up_proj.128x256",
                                              .reject = reject_wide,
                                              .defer = defer_wide,
                                              .workspace = tile_counter_workspace});
constinit const Kernel<GroupedGemmDesc> kUpProj128 = kernel_entry<NarrowTiles, GroupedGemmDesc>(
    {.op = "up_proj", .name = "sm90.up_proj.128x128", .reject = reject_gemm});

}  // namespace sonicmoe::cuda
