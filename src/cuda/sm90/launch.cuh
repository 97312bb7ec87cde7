#pragma once

#include "core/kernel.h"
#include "cuda/runtime.h"
#include "cuda/sm90/epilogue/dispatch.cuh"
#include "cuda/sm90/grouped_gemm.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/tile_choice.h"
#include "cuda/storage.cuh"

/// From a descriptor to a launch: what the six operations share on the host.
namespace sonicmoe::cuda {

/// W1 or dW1: gate and up as two matrices (E, n, d) with strides, which is all that a layout is.
struct W1View {
  std::int64_t up;  ///< offset of the up matrix from the gate; `separate`: 0, another base
  std::int64_t row_stride, expert_stride;
};

inline W1View w1_view(const GroupedGemmDesc& d, std::int64_t width) {
  const std::int64_t n = d.intermediate;
  if (!is_glu(d.activation)) return {0, width, n * width};
  switch (d.w1_layout) {
    case W1Layout::interleaved:
      return {width, 2 * width, 2 * n * width};
    case W1Layout::concatenated:
      return {n * width, width, 2 * n * width};
    case W1Layout::separate:
      break;
  }
  return {0, width, n * width};
}

/// Base of the up part: in the second tensor or inside the first, whose elements have `size` bytes.
template <class T>
T* up_base(const GroupedGemmDesc& d, const W1View& view, T* first, T* second, int size = 2) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  if (d.w1_layout == W1Layout::separate) return second;
  return static_cast<Byte*>(first) + view.up * size;
}

/// Maps of H or dH: gate and up, or the one there is, as (1, R, n) in boxes of 64 x `box`.
inline void encode_preact(TensorMaps* maps, const GroupedGemmDesc& d, const void* preact, int box,
                          CUtensorMap (&parts)[2]) {
  const std::int64_t n = d.intermediate;
  const int count = is_glu(d.activation) ? 2 : 1;
  for (int part = 0; part < count; ++part) {
    parts[part] = maps->encode(
        {static_cast<const char*>(preact) + part * n * 2, n, d.rows, 1, count * n, 0, box});
  }
}

template <class Traits>
Status prepare() {
  return allow_shared_memory(grouped_gemm<Traits>, Traits::kSharedMemory);
}

template <class Traits>
Status launch(const GemmParams& params, const typename Traits::Epilogue::Params& epilogue,
              const Exec& exec, const char* what) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {Traits::kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim =
      static_cast<unsigned>(exec.traits.multiprocessors / Traits::kCluster * Traits::kCluster);
  config.blockDim = Traits::kThreads;
  config.dynamicSmemBytes = Traits::kSharedMemory;
  config.stream = stream_of(exec);
  config.attrs = attributes;
  config.numAttrs = 2;
  return to_status(cudaLaunchKernelEx(&config, grouped_gemm<Traits>, params, epilogue), what);
}

/// What a TileCounter counts in, as workspace.
inline constexpr std::size_t kTileCounterBytes = sizeof(std::int32_t);
inline std::size_t tile_counter_workspace(const GroupedGemmDesc&, const Exec&) {
  return kTileCounterBytes;
}

/// launch(), with tiles dealt where schedules_dynamically() says so: counted where
/// Handoff::tile_counter says, or if that is null in the workspace.
template <class Traits>
Status launch_scheduled(const GroupedGemmDesc& d, GemmParams params,
                        const typename Traits::Epilogue::Params& epilogue, void* workspace,
                        const Exec& exec, const char* what) {
  std::int32_t* const tile_counter = exec.handoff.tile_counter;
  if constexpr (Traits::kDynamic) {
    static_assert(TileCounter<Traits>::kSendAt < kLeastDynamicBlocks);
    if (schedules_dynamically(rounds(exec.traits, d.rows, d.experts, params.n_blocks),
                              params.k_blocks, Traits::kGathers, tile_counter != nullptr)) {
      params.overlap_previous = false;  // what comes before clears the counter
      params.tile_counter = tile_counter;
      if (tile_counter == nullptr) {
        params.tile_counter = static_cast<std::int32_t*>(workspace);
        const cudaError_t error = cudaMemsetAsync(workspace, 0, kTileCounterBytes, stream_of(exec));
        if (Status status = to_status(error, what); !status.ok()) return status;
      }
    }
  }
  return launch<Traits>(params, epilogue, exec, what);
}

/// Stripes of rows are rounded up to pairs of 128, in 32 bits.
inline std::string reject_rows(const char* argument, std::int64_t rows) {
  constexpr std::int64_t kMost = INT32_MAX - 2 * kTileM + 1;
  if (rows <= kMost) return {};
  return std::string(argument) + ": got " + std::to_string(rows) + ", allowed: at most " +
         std::to_string(kMost) + " (on CUDA)";
}
inline std::string reject_gemm(const GroupedGemmDesc& d, const DeviceTraits&) {
  return reject_rows("rows", d.rows);
}
/// A gather that counts 16-byte pieces in 32 bits: see kNoRow.
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
