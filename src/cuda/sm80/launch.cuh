#pragma once

#include <string>

#include "core/backends.h"
#include "core/segments.h"
#include "cuda/layouts.h"
#include "cuda/runtime.h"
#include "cuda/sm80/epilogues.cuh"
#include "cuda/sm80/grouped_gemm.cuh"
#include "cuda/storage.cuh"

/// From an entry of the kernel list to a launch: what the operations share on the host.
namespace sonicmoe::cuda::sm80 {

/// Shared memory that a kernel has beside its stages.
inline constexpr int kStaticBytes = 256;
static_assert(sizeof(TileSearch) <= kStaticBytes);

template <int kTileN>
constexpr int kSharedBytes = kStagesOf<kTileN>*(kTileM + kTileN) * kLineBytes + kStaticBytes;

/// Tiles of a width that cover an extent.
inline int tiles(std::int64_t extent, int width) {
  return static_cast<int>((extent + width - 1) / width);
}

/// A compiled kernel as entries see it. compiled.cuh has the definitions; the files that
/// instantiate them compile the kernels, apart from the entries, for several operations share some.
template <class Config>
struct Compiled {
  static Status prepare();
  /// Launches a thread block for each of the `tiles` that there may be.
  static Status launch(const Params<Config>& params, std::int64_t tiles, const Exec& exec,
                       const char* what);
};

/// Most tiles of products whose rows are M.
inline std::int64_t most_tiles(const GroupedGemmDesc& d, int n_blocks) {
  return (d.rows / kTileM + std::min(d.experts, d.rows)) * n_blocks;
}

/// Calls f(ConfigOf<T, flag>{}) for the type T of `dtype`.
template <template <class, bool> class ConfigOf, class F>
Status visit_configs(DType dtype, bool flag, F&& f) {
  return visit_storage(dtype, [&](auto type) {
    using T = decltype(type);
    return flag ? f(ConfigOf<T, true>{}) : f(ConfigOf<T, false>{});
  });
}

/// Completes an entry of the kernel list. `Operation::visit(d, f)` calls f(Config{}) with the
/// kernel of a descriptor, `Operation::run<Config>(d, args, workspace, exec)` launches it.
template <class Operation, class Desc>
constexpr Kernel<Desc> entry(Kernel<Desc> kernel) {
  kernel.arch = 80;
  kernel.and_later = true;
  kernel.dtypes = kStorageTypes;
  kernel.prepare = [](const Desc& d, const Exec&) {
    return Operation::visit(d, [](auto config) { return Compiled<decltype(config)>::prepare(); });
  };
  kernel.run = [](const Desc& d, const typename Desc::Args& args, void* workspace,
                  const Exec& exec) noexcept {
    return Operation::visit(d, [&](auto config) {
      return Operation::template run<decltype(config)>(d, args, workspace, exec);
    });
  };
  return kernel;
}

/// Refuses more rows than 32 bits hold when rounded up to an m block.
inline std::string reject_rows(const char* argument, std::int64_t rows) {
  constexpr std::int64_t kMost = INT32_MAX - kTileM + 1;
  if (rows <= kMost) return {};
  return std::string(argument) + ": got " + std::to_string(rows) + ", allowed: at most " +
         std::to_string(kMost) + " (on CUDA)";
}
/// Refuses devices whose thread blocks cannot have the stages of a tile.
inline std::string reject_shared(const DeviceTraits& device, int bytes) {
  if (device.block_shared_bytes >= bytes) return {};
  return "shared memory of a thread block: got " + std::to_string(device.block_shared_bytes) +
         ", allowed: at least " + std::to_string(bytes) + " (for this tile)";
}
/// Bytes of so many elements from line to line: widths are at most 2^20.
inline int stride_of(std::int64_t elements) { return static_cast<int>(2 * elements); }

template <int kTileN>
std::string reject_gemm(const GroupedGemmDesc& d, const DeviceTraits& device) {
  if (std::string reason = reject_rows("rows", d.rows); !reason.empty()) return reason;
  return reject_shared(device, kSharedBytes<kTileN>);
}

inline Extents extents_of(const GroupedGemmDesc& d, const GroupedGemmArgs& a, int n_blocks) {
  return {.begins = a.offsets,
          .ends = row_ends(a),
          .experts = static_cast<int>(d.experts),
          .n_blocks = n_blocks};
}

/// K in one part, or in the parts of H's columns.
inline Contraction contraction(std::int64_t width, int parts = 1) {
  const int half = tiles(width, kTileK);
  return {.blocks = parts * half, .half = half, .width = static_cast<int>(width)};
}

/// W2: (E, d, n), or (E, n, d) if transposed.
inline Weights w2_of(const GroupedGemmDesc& d, const void* w2, std::int64_t width) {
  return {.base = {w2, w2},
          .expert_stride = d.hidden * d.intermediate,
          .stride = stride_of(d.transposed() ? d.hidden : d.intermediate),
          .width = static_cast<int>(width)};
}
/// W1 with columns as (E, d, W).
inline Weights w1_columns(const GroupedGemmDesc& d, const void* w1, std::int64_t width) {
  return {.base = {w1, w1},
          .expert_stride = d.hidden * d.preact_width(),
          .part_offset = d.intermediate,
          .stride = stride_of(d.preact_width()),
          .width = static_cast<int>(width)};
}
/// W1 with gates and ups as rows; base[0] and base[1] are the two matrices.
inline Weights w1_rows(const GroupedGemmDesc& d, const void* w1, const void* w1_up,
                       std::int64_t width) {
  const W1View view = w1_view(d, d.hidden);
  return {.base = {w1, is_glu(d.activation) ? up_base(d, view, w1, w1_up) : w1},
          .expert_stride = view.expert_stride,
          .stride = stride_of(view.row_stride),
          .width = static_cast<int>(width)};
}

}  // namespace sonicmoe::cuda::sm80
