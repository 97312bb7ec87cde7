#pragma once

#include <cuda_runtime_api.h>

#include "core/kernel.h"
#include "sonicmoe/status.h"

/// Host-side helpers of the CUDA backend.
namespace sonicmoe::cuda {

inline cudaStream_t stream_of(const Exec& exec) {
  return static_cast<cudaStream_t>(exec.stream.handle);
}

/// Ok, or a device error with its code and the step that failed: "up_proj: launch".
inline Status to_status(cudaError_t error, const char* what) noexcept {
  return error == cudaSuccess ? Status{} : Status::device(static_cast<int>(error), what);
}

/// The status of the launch just made. Never synchronises.
inline Status launched(const char* what) noexcept { return to_status(cudaGetLastError(), what); }

/// The most bytes of shared memory that a thread block may have on sm_90.
inline constexpr int kMostSharedMemory = 227 << 10;

/// Allows launches of `kernel` with up to `bytes` of dynamic shared memory. Without this call the
/// limit is 48 KiB.
template <class Kernel>
Status allow_shared_memory(Kernel* kernel, int bytes) noexcept {
  return to_status(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                   "shared memory of a kernel");
}

}  // namespace sonicmoe::cuda
