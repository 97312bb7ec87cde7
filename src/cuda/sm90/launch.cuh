#pragma once

#include <string>

#include "core/kernel.h"
#include "core/segments.h"
#include "cuda/runtime.h"
#include "cuda/sm90/grouped_gemm.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/tile_choice.h"
#include "cuda/storage.cuh"

/// From an entry of the kernel list to a launch: what the operations share on the host.
namespace sonicmoe::cuda {

/// Launches the kernel on all multiprocessors of `exec`, with `params.chain` as its handoff says.
template <class Traits>
Status launch(GemmParams params, const typename Traits::Epilogue::Params& epilogue,
              const Exec& exec, const char* what) {
  // A memset of our own resets the counter, and must have ended.
  const bool resets =
      params.scheduling.tile_counter != nullptr && exec.handoff.tile_counter == nullptr;
  params.chain = {.overlap_previous = exec.handoff.overlap_previous && !resets,
                  .next_tile_counter = exec.handoff.next_tile_counter};
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(exec.traits.multiprocessors / kCluster * kCluster);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = sizeof(SharedStorage<Traits>);
  config.stream = stream_of(exec);
  config.attrs = attributes;
  config.numAttrs = 2;
  return to_status(cudaLaunchKernelEx(&config, grouped_gemm<Traits>, params, epilogue), what);
}

/// Starts one cluster after the other for a product with rows of (T, d) or, contiguous, of (R, d),
/// whose tiles take `cycles` each.
inline Scheduling spread_starts(const GroupedGemmDesc& d, int n_blocks, double cycles,
                                const Exec& exec) {
  const double all_rounds = rounds(exec.traits, d.usual_rows(), d.experts, n_blocks);
  return {.start_spread = start_spread(exec.traits, d.x_rows() * d.hidden * 2, all_rounds, cycles)};
}

/// Workspace for a tile counter.
inline constexpr std::size_t kTileCounterBytes = sizeof(std::int32_t);
inline std::size_t tile_counter_workspace(const GroupedGemmDesc&, const Exec&) {
  return kTileCounterBytes;
}

/// launch(), with dynamic scheduling where schedules_dynamically() says so. The counter is
/// Handoff::tile_counter; if that is null, it is in the workspace, and a memset resets it.
template <class Traits>
Status launch_scheduled(const GroupedGemmDesc& d, GemmParams params,
                        const typename Traits::Epilogue::Params& epilogue, void* workspace,
                        const Exec& exec, const char* what) {
  if constexpr (Traits::kDynamic) {
    static_assert(TileScheduler<Traits>::kSendAt < kLeastDynamicBlocks);
    std::int32_t* counter = exec.handoff.tile_counter;
    if (schedules_dynamically(
            rounds(exec.traits, d.usual_rows(), d.experts, params.extents.n_blocks),
            params.extents.k_blocks, Traits::kGathers, counter != nullptr)) {
      if (counter == nullptr) {
        counter = static_cast<std::int32_t*>(workspace);
        const cudaError_t error = cudaMemsetAsync(counter, 0, kTileCounterBytes, stream_of(exec));
        if (Status status = to_status(error, what); !status.ok()) return status;
      }
      params.scheduling.tile_counter = counter;
    }
  }
  return launch<Traits>(params, epilogue, exec, what);
}

/// What an entry of the kernel list does, for a family of compiled kernels. `Family::visit(d, f)`
/// calls f(Config{}) with the one that is compiled for a descriptor;
/// `Family::run<Config>(d, args, workspace, exec)` launches it.
template <class Family, class Desc>
Status prepare_family(const Desc& d, const Exec&) {
  return Family::visit(d, [](auto config) {
    using Config = decltype(config);
    constexpr int kBytes = sizeof(SharedStorage<Config>);
    static_assert(kBytes <= kMostSharedMemory, "does not fit into 227 KiB of shared memory");
    return allow_shared_memory(grouped_gemm<Config>, kBytes);
  });
}
template <class Family, class Desc>
Status run_family(const Desc& d, const typename Desc::Args& args, void* workspace,
                  const Exec& exec) noexcept {
  return Family::visit(d, [&](auto config) {
    return Family::template run<decltype(config)>(d, args, workspace, exec);
  });
}

/// Completes an entry of the kernel list whose kernels are compiled in the same file.
template <class Family, class Desc>
constexpr Kernel<Desc> kernel_entry(Kernel<Desc> kernel) {
  kernel.arch = 90;
  kernel.dtypes = kStorageTypes;
  kernel.prepare = prepare_family<Family, Desc>;
  kernel.run = run_family<Family, Desc>;
  return kernel;
}

/// How a kernel loads operand A where rows are M.
template <RowSource kSource>
constexpr ALoad kRowsAlongM = kSource == RowSource::gathered ? ALoad::gather_m : ALoad::load_m;

/// Operand A where rows are M: rows of x or dO by token id, or contiguous ones (load_m).
template <class Traits>
OperandA rows_along_m(TensorMaps* maps, const GroupedGemmDesc& d, const void* rows,
                      const std::int32_t* row_tokens) {
  OperandA a{.rows = rows, .row_tokens = row_tokens, .width = static_cast<int>(d.hidden)};
  if constexpr (!Traits::kGathers) {
    a.maps[0] = a.maps[1] = maps->encode({.base = rows,
                                          .inner = d.hidden,
                                          .outer = d.rows,
                                          .outer_stride = d.hidden,
                                          .box = kTileM});
  }
  return a;
}
/// The same where rows are K. Without rows nothing is loaded, but a map must point somewhere.
template <class Traits>
OperandA rows_along_k(TensorMaps* maps, const GroupedGemmDesc& d, const void* rows,
                      const std::int32_t* row_tokens, const void* anywhere) {
  OperandA a{.rows = rows, .row_tokens = row_tokens, .width = static_cast<int>(d.hidden)};
  if constexpr (!Traits::kGathers) {
    a.maps[0] = maps->encode({.base = d.rows > 0 ? rows : anywhere,
                              .inner = d.hidden,
                              .outer = d.rows,
                              .outer_stride = d.hidden,
                              .box = kTileK});
  }
  return a;
}

/// Calls f(constant) with how a weight gradient loads operand A.
template <class F>
Status visit_a_load_k(const GroupedGemmDesc& d, F&& f) {
  if (d.gathers()) return f(std::integral_constant<ALoad, ALoad::gather_k>{});
  return f(std::integral_constant<ALoad, ALoad::load_k>{});
}

/// Refuses more rows than 32 bits hold when rounded up to a pair of m blocks.
inline std::string reject_rows(const char* argument, std::int64_t rows) {
  constexpr std::int64_t kMost = INT32_MAX - 2 * kTileM + 1;
  if (rows <= kMost) return {};
  return std::string(argument) + ": got " + std::to_string(rows) + ", allowed: at most " +
         std::to_string(kMost) + " (on CUDA)";
}
inline std::string reject_gemm(const GroupedGemmDesc& d, const DeviceTraits&) {
  return reject_rows("rows", d.rows);
}
/// Refuses what GatherK cannot reach with 32-bit offsets (kNoRow).
inline std::string reject_tokens(const GroupedGemmDesc& d, const char* what) {
  const std::int64_t most = std::int64_t{kNoRow} / (d.hidden / 8);
  if (d.tokens <= most) return {};
  return "tokens: got " + std::to_string(d.tokens) + ", allowed: at most " + std::to_string(most) +
         " of " + std::to_string(d.hidden) + " elements (" + what + " on CUDA: 64 GiB)";
}
inline std::string reject_contraction(const GroupedGemmDesc& d, const DeviceTraits& device) {
  if (std::string reason = reject_tokens(d, "weight gradients"); !reason.empty()) return reason;
  return reject_gemm(d, device);
}

}  // namespace sonicmoe::cuda
