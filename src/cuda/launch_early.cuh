#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace sonicmoe::cuda {

/// Launches a kernel that may start while the one before it in the stream still runs. Every thread
/// block must call wait_for_previous(), before it touches what that one reads or writes, and before
/// let_next_start(): so a kernel knows, even before it waits, that all but the one before, and what
/// that one was promised to run beside, have ended.
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
                  cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  (void)cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);  // launched() sees the error
}

}  // namespace sonicmoe::cuda
