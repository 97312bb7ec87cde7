#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace sonicmoe::cuda {

/// Launches kernel N so that it may start while kernel N-1, its predecessor in the stream, still
/// runs. Every thread block of kernel N must call wait_for_previous()
///
/// - before it touches memory that kernel N-1 reads or writes, and
/// - before it calls let_next_start().
///
/// So kernel N-2 and all kernels before it have ended when kernel N starts, even before kernel N
/// waits. The exception is a kernel with Handoff::overlap_previous, which lets its successor start
/// first and waits at its end. If kernel N-1 is one, the kernels that it overlaps may still run
/// beside kernel N.
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
