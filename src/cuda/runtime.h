#pragma once

#include <cuda_runtime_api.h>

#include "core/kernel.h"
#include "sonicmoe/status.h"

/// Host-side odds and ends of the CUDA backend.
namespace sonicmoe::cuda {

inline cudaStream_t stream_of(const Exec& exec) {
  return static_cast<cudaStream_t>(exec.stream.handle);
}

/// ok, or the device's error code and what was being done: "up_proj: launch".
inline Status to_status(cudaError_t error, const char* what) noexcept {
  return error == cudaSuccess ? Status{} : Status::device(static_cast<int>(error), what);
}

/// The error of the launch just made. Never synchronises.
inline Status launched(const char* what) noexcept { return to_status(cudaGetLastError(), what); }

/// Bytes that a block may have, on sm_90.
inline constexpr int kMostSharedMemory = 227 << 10;

/// Lets a kernel be launched with more dynamic shared memory than the 48 KiB that need no asking.
template <class Kernel>
Status allow_shared_memory(Kernel* kernel, int bytes) noexcept {
  return to_status(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                   "shared memory of a kernel");
}

}  // namespace sonicmoe::cuda
