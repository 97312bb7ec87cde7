#pragma once

#include "cuda/device/ptx.cuh"

namespace sonicmoe::cuda {

/// An mbarrier in shared memory.
struct Barrier {
  std::uint64_t state;
  __device__ __forceinline__ std::uint32_t address() const { return shared_address(this); }
  __device__ __forceinline__ void init(int arrivals) { mbarrier_init(address(), arrivals); }
  __device__ __forceinline__ void wait(std::uint32_t parity) { mbarrier_wait(address(), parity); }
  __device__ __forceinline__ void arrive() { mbarrier_arrive(address()); }
  __device__ __forceinline__ void arrive_at(int rank) { mbarrier_arrive_at(address(), rank); }
  __device__ __forceinline__ void expect(int bytes) { mbarrier_expect(address(), bytes); }
};

}  // namespace sonicmoe::cuda
