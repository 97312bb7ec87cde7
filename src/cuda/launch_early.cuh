#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/runtime.h"

namespace sonicmoe::cuda {

/// Whether the code that `arch` runs here has wait_for_previous() as an instruction. sm_90 was the
/// first to have it. A device may also compile PTX of another generation for itself; that PTX does
/// not count, for it may be too old. Static, like what calls it: files are compiled for different
/// architectures.
static constexpr bool waits_for_previous(int arch) {
  constexpr int kCompiled[] = {__CUDA_ARCH_LIST__};
  for (const int compiled : kCompiled) {
    const bool runs = compiled / 100 == arch / 10 && compiled <= 10 * arch;
    if (runs && compiled >= 900) return true;
  }
  return false;
}

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

/// The same for a kernel that older devices run as well. There it starts when kernel N-1 has ended.
template <class... Parameters, class... Arguments>
static void launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                         std::size_t shared_bytes, const Exec& exec,
                         const Arguments&... arguments) {
  if (waits_for_previous(exec.traits.arch)) {
    launch_early(kernel, grid, block, shared_bytes, stream_of(exec), arguments...);
  } else {
    kernel<<<grid, block, shared_bytes, stream_of(exec)>>>(Parameters(arguments)...);
  }
}

}  // namespace sonicmoe::cuda
