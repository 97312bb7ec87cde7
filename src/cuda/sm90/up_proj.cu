// H = x[tokens] W1^T + b1 and A = act(H): M = rows (gathered), N = gate and up columns, K = d.
#include "core/backends.h"
#include "cuda/sm90/epilogue/activation.cuh"
#include "cuda/sm90/launch.cuh"

namespace sonicmoe::cuda {
namespace {

template <class T, class Activations, bool kBias, int kTileN, Schedule kSchedule, int kStages>
struct UpProj : Traits<T, ALoad::gather_m, Major::k, kTileN, kSchedule, kStages,
                       StoreActivation<Activations, kBias>, (kTileN == 256)> {};

template <class Config>
Status run_as(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
              const Exec& exec) {
  constexpr int kTileN = Config::kTileN;
  const bool gated = is_glu(d.activation);
  const W1View w1 = w1_view(d, d.hidden);
  TensorMaps maps(d.dtype);
  TensorView view{a.w1,          d.hidden,         d.intermediate, d.experts,
                  w1.row_stride, w1.expert_stride, kTileN / 2};
  GemmParams p{};
  p.b_maps[0] = maps.encode(view);
  if (gated) view.base = up_base(d, w1, a.w1, a.w1_up);
  p.b_maps[1] = maps.encode(view);
  typename Config::Epilogue::Params e{};
  const std::int64_t n = d.intermediate;
  if (!d.inference) encode_preact(&maps, d, a.preact, WarpTile::kRows, e.preact_boxes);
  e.act_boxes = maps.encode({a.act, n, d.rows, 1, n, 0, WarpTile::kRows});
  if (!maps.status().ok()) return maps.status();
  p.gathered = a.x;
  p.offsets = a.offsets;
  p.overlap_previous = exec.handoff.overlap_previous;
  p.next_tile_counter = exec.handoff.next_tile_counter;
  p.row_tokens = a.row_tokens;
  p.gathered_width = static_cast<int>(d.hidden);
  p.experts = static_cast<int>(d.experts);
  p.n_blocks = tiles(d.intermediate, gated ? kTileN / 2 : kTileN);
  p.k_blocks = p.k_half = tiles(d.hidden, kTileK);
  p.paired = gated;
  // About the cycles of a tile, by those in docs/findings/epilogue-stages.md.
  p.start_spread = start_spread(exec.traits, d.tokens * d.hidden * 2,
                                rounds(exec.traits, d.rows, d.experts, p.n_blocks),
                                kTileN * (4.4 * p.k_blocks + 20));

  const W1View b1 = w1_view(d, 1);
  e.preact = d.inference ? nullptr : a.preact;
  e.act = a.act;
  e.biased = d.bias;
  if (d.bias) {
    e.b1[0] = a.b1;
    e.b1[1] = gated ? up_base(d, b1, a.b1, a.b1_up) : nullptr;
  }
  e.bias_stride = b1.row_stride;
  e.bias_expert_stride = b1.expert_stride;
  e.intermediate = static_cast<int>(d.intermediate);
  e.activations = decltype(e.activations)::of(d.activation);
  return launch_scheduled<Config>(d, p, e, workspace, exec, "up_proj: launch");
}

/// Whether there is a kernel with a bias. Wide tiles have it for SwiGLU alone, which is what models
/// with biases have: another kernel for each of the other activations would be compiled for nobody.
template <int kTileN, class Activations>
constexpr bool kCompiledWithBias =
    kTileN <= 128 || std::is_same_v<Activations, OneActivation<SwigluFn>>;

/// What is compiled: visit(desc, f) calls f(Config{}).
template <int kTileN, int kStages>
struct Tiles {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      return visit_activations<(kTileN > 128)>(d.activation, [&](auto activations) {
        using T = decltype(type);
        using Activations = decltype(activations);
        using Plain = UpProj<T, Activations, false, kTileN, Schedule::cooperative, kStages>;
        using Biased = UpProj<T, Activations, true, kTileN, Schedule::cooperative, kStages>;
        if constexpr (kTileN > 128) {
          // Looking for a bias costs 6 % of the whole time: worth a kernel without.
          if (!d.bias) return f(Plain{});
        }
        return f(std::conditional_t<kCompiledWithBias<kTileN, Activations>, Biased, Plain>{});
      });
    });
  }
};
using Wide = Tiles<256, 4>;
using Narrow = Tiles<128, 6>;

template <class Compiled>
Status prepare_as(const GroupedGemmDesc& d, const Exec&) {
  return Compiled::visit(d, [](auto config) { return cuda::prepare<decltype(config)>(); });
}
template <class Compiled>
Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
           const Exec& exec) noexcept {
  if (d.rows == 0) return {};
  return Compiled::visit(
      d, [&](auto config) { return run_as<decltype(config)>(d, a, workspace, exec); });
}

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

const Kernel<GroupedGemmDesc> kUpProj256 = {
    .op = "up_proj",
    .name = "sm90.up_proj.128x256",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_wide,
    .defer = defer_wide,
    .workspace = tile_counter_workspace,
    .prepare = prepare_as<Wide>,
    .run = run<Wide>,
};
const Kernel<GroupedGemmDesc> kUpProj128 = {
    .op = "up_proj",
    .name = "sm90.up_proj.128x128",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_gemm,
    .prepare = prepare_as<Narrow>,
    .run = run<Narrow>,
};

}  // namespace sonicmoe::cuda
