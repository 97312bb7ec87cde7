// dA' = dO[tokens] W2 stays in registers: M = rows (gathered), N = n, K = d. With A recomputed from
// H: dH = dAct(s dA', H), A' = s A, dS = <dA', A>.
#include "core/backends.h"
#include "cuda/sm90/epilogue/activation_grad.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/layouts.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kWide = 256;  // may be scheduled dynamically; a kernel for each activation

template <class T, class Activations, int kTileN, int kStages>
struct DownProjDgrad : Traits<T, ALoad::gather_m, Major::mn, kTileN, Schedule::cooperative, kStages,
                              StoreActivationGrad<Activations>, kTileN == kWide> {};

/// dscores[r] = sum over the n blocks, in order. One thread a row.
__global__ void sum_partials(const float* partials, int n_blocks, std::int64_t capacity,
                             const std::int32_t* offsets, int experts, float* dscores) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= offsets[experts]) return;
  float sum = 0.0f;
  for (int i = 0; i < n_blocks; ++i) sum += partials[i * capacity + row];
  dscores[row] = sum;
}

/// Bytes of the workspace for each n block's partial dscores, unless there is one n block. The tile
/// counter lies behind them.
std::size_t partials_bytes(const GroupedGemmDesc& d, int n_blocks) {
  if (n_blocks == 1) return 0;
  return static_cast<std::size_t>(n_blocks) * static_cast<std::size_t>(d.rows) * 4;
}

template <int kTileN, int kStages>
struct Family {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      return visit_activations<(kTileN == kWide)>(d.activation, [&](auto activations) {
        return f(DownProjDgrad<decltype(type), decltype(activations), kTileN, kStages>{});
      });
    });
  }

  static std::size_t workspace(const GroupedGemmDesc& d, const Exec&) {
    return partials_bytes(d, tiles(d.intermediate, kTileN)) +
           (kTileN == kWide ? kTileCounterBytes : 0);
  }

  template <class Config>
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                    const Exec& exec) {
    if (d.rows == 0) return {};
    const std::int64_t n = d.intermediate;
    const int n_blocks = tiles(n, kTileN), k_blocks = tiles(d.hidden, kTileK);
    // Of a tile, fitted to measurements (docs/findings/epilogue-stages.md).
    const double cycles = kTileN * (4.3 * k_blocks + 78);
    TensorMaps maps(d.dtype);
    const CUtensorMap w2 = maps.encode({.base = a.w2,
                                        .inner = n,
                                        .outer = d.hidden,
                                        .experts = d.experts,
                                        .outer_stride = n,
                                        .expert_stride = d.hidden * n,
                                        .box = kTileK / 2});
    const GemmParams p{
        .a = {.rows = a.dout, .row_tokens = a.row_tokens, .width = static_cast<int>(d.hidden)},
        .b = {.maps = {w2, w2}, .last_chunk = last_chunk(n)},
        .extents = {.offsets = a.offsets,
                    .experts = static_cast<int>(d.experts),
                    .n_blocks = n_blocks,
                    .k_blocks = k_blocks,
                    .k_half = k_blocks},
        .scheduling = spread_starts(d, n_blocks, cycles, exec)};
    typename Config::Epilogue::Params e{
        .scaled_act_boxes = maps.encode({.base = a.scaled_act,
                                         .inner = n,
                                         .outer = d.rows,
                                         .outer_stride = n,
                                         .box = WarpTile::kRows}),
        .dpreact = a.dpreact,
        .scaled_act = a.scaled_act,
        .row_scores = a.row_scores,
        .dscores = n_blocks == 1 ? a.row_dscores : static_cast<float*>(workspace),
        .capacity = d.rows,
        .intermediate = static_cast<int>(n),
        .activations = decltype(e.activations)::of(d.activation)};
    encode_preact(&maps, d, a.preact, 64, e.preact_boxes);
    encode_preact(&maps, d, a.dpreact, WarpTile::kRows, e.dpreact_boxes);
    if (!maps.status().ok()) return maps.status();
    char* const counter = static_cast<char*>(workspace) + partials_bytes(d, n_blocks);
    Status status = launch_scheduled<Config>(d, p, e, counter, exec, "down_proj_dgrad: launch");
    if (!status.ok() || n_blocks == 1) return status;
    constexpr int kSumThreads = 256;
    sum_partials<<<tiles(d.rows, kSumThreads), kSumThreads, 0, stream_of(exec)>>>(
        e.dscores, n_blocks, d.rows, a.offsets, static_cast<int>(d.experts), a.row_dscores);
    return launched("down_proj_dgrad: sums");
  }
};
using Wide = Family<kWide, 4>;
using Narrow = Family<128, 6>;

constexpr int kNarrowPercent = 58;  // docs/findings/tile-choice.md

std::string defer_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  return defer_to_narrow(device, d.rows, d.experts, tiles(d.intermediate, 256),
                         tiles(d.intermediate, 128), kNarrowPercent);
}

}  // namespace

constinit const Kernel<GroupedGemmDesc> kDownProjDgrad256 =
    kernel_entry<Wide, GroupedGemmDesc>({.op = "down_proj_dgrad",
                                         .name = "sm90.down_proj_dgrad.128x256",
                                         .reject = reject_gemm,
                                         .defer = defer_wide,
                                         .workspace = Wide::workspace});
constinit const Kernel<GroupedGemmDesc> kDownProjDgrad128 =
    kernel_entry<Narrow, GroupedGemmDesc>({.op = "down_proj_dgrad",
                                           .name = "sm90.down_proj_dgrad.128x128",
                                           .reject = reject_gemm,
                                           .workspace = Narrow::workspace});

}  // namespace sonicmoe::cuda
