// dA' = dO[tokens] W2 stays in registers: M = rows (gathered), N = n, K = d. With A recomputed from
// H: dH = dAct(s dA', H), A' = s A, dS = <dA', A>.
#include "core/backends.h"
#include "cuda/sm90/epilogue/activation_grad.cuh"
#include "cuda/sm90/launch.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kWide = 256;  // tiles that may be dealt

template <class T, class Activations, int kTileN, Schedule kSchedule, int kStages>
struct DownProjDgrad : Traits<T, ALoad::gather_m, Major::mn, kTileN, kSchedule, kStages,
                              StoreActivationGrad<Activations>, kTileN == kWide> {};

/// dscores[r] = sum over the tiles along n, in order. One thread a row.
__global__ void sum_partials(const float* partials, int tiles_n, std::int64_t capacity,
                             const std::int32_t* offsets, int experts, float* dscores) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= offsets[experts]) return;
  float sum = 0.0f;
  for (int i = 0; i < tiles_n; ++i) sum += partials[i * capacity + row];
  dscores[row] = sum;
}

/// Of the workspace, where dscores of each tile along n are, unless there is one; then comes what
/// the tiles are counted in.
std::size_t partials_bytes(const GroupedGemmDesc& d, int along_n) {
  return along_n == 1 ? 0
                      : static_cast<std::size_t>(along_n) * static_cast<std::size_t>(d.rows) * 4;
}

template <class Config>
Status run_as(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
              const Exec& exec) {
  const std::int64_t n = d.intermediate;
  TensorMaps maps(d.dtype);
  GemmParams p{};
  p.b_maps[0] = p.b_maps[1] =
      maps.encode({a.w2, n, d.hidden, d.experts, n, d.hidden * n, kTileK / 2});
  typename Config::Epilogue::Params e{};
  encode_preact(&maps, d, a.preact, 64, e.preact_boxes);
  encode_preact(&maps, d, a.dpreact, WarpTile::kRows, e.dpreact_boxes);
  e.scaled_act_boxes = maps.encode({a.scaled_act, n, d.rows, 1, n, 0, WarpTile::kRows});
  if (!maps.status().ok()) return maps.status();
  p.gathered = a.dout;
  p.offsets = a.offsets;
  p.overlap_previous = exec.handoff.overlap_previous;
  p.next_tile_counter = exec.handoff.next_tile_counter;
  p.row_tokens = a.row_tokens;
  p.gathered_width = static_cast<int>(d.hidden);
  p.experts = static_cast<int>(d.experts);
  p.n_blocks = tiles(n, Config::kTileN);
  p.n_last_chunk = last_chunk(n);
  p.k_blocks = p.k_half = tiles(d.hidden, kTileK);
  // About the cycles of a tile, by those in docs/findings/epilogue-stages.md.
  p.start_spread = start_spread(exec.traits, d.tokens * d.hidden * 2,
                                rounds(exec.traits, d.rows, d.experts, p.n_blocks),
                                Config::kTileN * (4.3 * p.k_blocks + 78));

  e.dpreact = a.dpreact;
  e.scaled_act = a.scaled_act;
  e.row_scores = a.row_scores;
  e.dscores = p.n_blocks == 1 ? a.row_dscores : static_cast<float*>(workspace);
  e.capacity = d.rows;
  e.intermediate = static_cast<int>(n);
  e.activations = decltype(e.activations)::of(d.activation);
  char* const counter = static_cast<char*>(workspace) + partials_bytes(d, p.n_blocks);
  Status status = launch_scheduled<Config>(d, p, e, counter, exec, "down_proj_dgrad: launch");
  if (!status.ok() || p.n_blocks == 1) return status;
  constexpr int kThreads = 256;
  sum_partials<<<tiles(d.rows, kThreads), kThreads, 0, stream_of(exec)>>>(
      e.dscores, p.n_blocks, d.rows, a.offsets, p.experts, a.row_dscores);
  return launched("down_proj_dgrad: sums");
}

template <int kTileN, Schedule kSchedule, int kStages>
struct Entry {
  template <class F>
  static Status visit(const GroupedGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      return visit_activations<(kTileN > 128)>(d.activation, [&](auto activations) {
        return f(
            DownProjDgrad<decltype(type), decltype(activations), kTileN, kSchedule, kStages>{});
      });
    });
  }
  static Status prepare(const GroupedGemmDesc& d, const Exec&) {
    return visit(d, [](auto config) { return cuda::prepare<decltype(config)>(); });
  }
  static std::size_t workspace(const GroupedGemmDesc& d, const Exec&) {
    return partials_bytes(d, tiles(d.intermediate, kTileN)) +
           (kTileN == kWide ? kTileCounterBytes : 0);
  }
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* memory,
                    const Exec& exec) noexcept {
    if (d.rows == 0) return {};
    return visit(d, [&](auto config) { return run_as<decltype(config)>(d, a, memory, exec); });
  }
};

using Narrow = Entry<128, Schedule::cooperative, 6>;
using Wide = Entry<kWide, Schedule::cooperative, 4>;

constexpr int kNarrowPercent = 58;  // docs/findings/tile-choice.md

std::string defer_wide(const GroupedGemmDesc& d, const DeviceTraits& device) {
  return defer_to_narrow(device, d.rows, d.experts, tiles(d.intermediate, 256),
                         tiles(d.intermediate, 128), kNarrowPercent);
}

}  // namespace

const Kernel<GroupedGemmDesc> kDownProjDgrad256 = {
    .op = "down_proj_dgrad",
    .name = "sm90.down_proj_dgrad.128x256",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_gemm,
    .defer = defer_wide,
    .workspace = Wide::workspace,
    .prepare = Wide::prepare,
    .run = Wide::run,
};
const Kernel<GroupedGemmDesc> kDownProjDgrad128 = {
    .op = "down_proj_dgrad",
    .name = "sm90.down_proj_dgrad.128x128",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject_gemm,
    .workspace = Narrow::workspace,
    .prepare = Narrow::prepare,
    .run = Narrow::run,
};

}  // namespace sonicmoe::cuda
