#pragma once

#include <cuda.h>  // CUtensorMap

#include <cstdint>

/// Wrappers of PTX, one instruction a function. All shared-memory addresses are 32-bit addresses of
/// the `shared` state space.
namespace sonicmoe::cuda {

/// The architecture that this code is compiled for, such as 90; 0 on the host. For the bodies and
/// launch bounds of kernels alone: host code asks DeviceTraits::arch.
#ifdef __CUDA_ARCH__
inline constexpr int kArch = __CUDA_ARCH__ / 10;
#else
inline constexpr int kArch = 0;
#endif

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Threads and clusters.

__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// All threads of the cluster arrive and wait; then each sees the others' earlier writes.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// True in one lane of a converged warp, the same lane at every call.
__device__ __forceinline__ bool elect_one() {
  std::uint32_t chosen;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(chosen));
  return chosen != 0;
}

/// Lane 0's value. Marks a value that all lanes share as uniform, so that the compiler computes
/// what follows from it once a warp. The copy engine needs a uniform address: without the shuffle
/// the compiler puts a loop over the lanes around each box (docs/findings/machine-code.md).
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(~0u, value, 0);
}

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// `threads` threads, whole warps, arrive at barrier `id` and wait for each other; then each sees
/// the others' earlier writes. `id` is 1 to 15, for __syncthreads() uses barrier zero.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Spins for `cycles` of this multiprocessor's clock.
__device__ __forceinline__ void wait_cycles(int cycles) {
  const auto now = [] { return static_cast<unsigned long long>(clock64()); };
  const unsigned long long begin = now();
  while (now() - begin < static_cast<unsigned>(cycles)) {
  }
}

// Memory barriers in shared memory.

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/// Makes the barriers that this thread initialised visible to the copy engine and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives on the barrier at the same place in CTA `rank` of the cluster, with CTA scope. Cluster
/// scope would fence the whole GPU in every k block (docs/findings/archive/hopper-gemm.md).
///
/// CTA scope suffices because the arrival publishes no data: it only says that a stage is free.
/// - wgmma no longer reads the stage: wgmma.wait_group has waited for that.
/// - The copy engine no longer reads it: store_wait_read() has waited for that.
/// - Threads have used the values that they loaded from it.
/// - Threads fenced their writes to it before the copy engine read them.
__device__ __forceinline__ void mbarrier_arrive_at(std::uint32_t barrier, std::uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/// Arrives. The phase then also waits until `bytes` of bulk copies or store_async() have landed.
__device__ __forceinline__ void mbarrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// Stores `value` at `to` in the shared memory of CTA `rank` of the cluster. Its 4 bytes count on
/// `barrier` of that CTA. Both addresses are given as addresses of this CTA.
__device__ __forceinline__ void store_async(std::uint32_t to, std::uint32_t barrier,
                                            std::uint32_t rank, std::int32_t value) {
  asm volatile(
      "{\n"
      ".reg .b32 there, counted;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 counted, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [there], %3, [counted];\n"
      "}" ::"r"(to),
      "r"(barrier), "r"(rank), "r"(value)
      : "memory");
}

/// Waits until the phase of this parity has completed. A fresh barrier counts as having completed
/// a phase of parity 1.
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies.

/// Loads 16 bytes of shared memory.
__device__ __forceinline__ uint4 load_shared(std::uint32_t from) {
  uint4 bits;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "r"(from)
               : "memory");
  return bits;
}

__device__ __forceinline__ std::int32_t load_shared_word(std::uint32_t from) {
  std::int32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

/// 16 bytes and 4 bytes to shared memory.
__device__ __forceinline__ void store_shared(std::uint32_t to, std::int32_t x, std::int32_t y,
                                             std::int32_t z, std::int32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
__device__ __forceinline__ void store_shared_word(std::uint32_t to, std::int32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

/// Copies 16 bytes from global to shared memory, through the generic proxy.
__device__ __forceinline__ void copy_async_16(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}

/// The same if `valid`; else writes 16 zero bytes and does not read `from`.
__device__ __forceinline__ void copy_async_16(std::uint32_t to, const void* from, bool valid) {
  const std::uint32_t size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(size)
               : "memory");
}

/// The same, with a policy for L2: see l2_policy().
__device__ __forceinline__ void copy_async_16(std::uint32_t to, const void* from, bool valid,
                                              std::uint64_t policy) {
  const std::uint32_t size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(size), "l"(policy)
               : "memory");
}

/// L2's policy for lines that are read: evict_first or evict_normal.
__device__ __forceinline__ std::uint64_t l2_policy(bool leave_first) {
  std::uint64_t first, in_turn;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(in_turn));
  return leave_first ? first : in_turn;
}

/// The same without a policy. Where L2 must ask memory it fetches the 256 bytes around `from`,
/// because a row's gather reads those next (docs/findings/archive/start-spread.md).
__device__ __forceinline__ void copy_async_16_of_256(std::uint32_t to, const void* from,
                                                     bool valid) {
  const std::uint32_t size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(size)
               : "memory");
}

/// Waits until the kernel before this one in the stream has ended, and its writes are visible.
/// Returns at once unless this kernel was launched early, which needs sm_90.
__device__ __forceinline__ void wait_for_previous() {
  if constexpr (kArch >= 90) asm volatile("griddepcontrol.wait;" ::: "memory");
}
/// Lets the next kernel in the stream start, if it is launched early. It starts once every thread
/// block of this kernel has called this or ended.
__device__ __forceinline__ void let_next_start() {
  if constexpr (kArch >= 90) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// This thread arrives on the barrier once all its earlier cp.async have landed. The arrival counts
/// among those that the barrier was initialised for.
__device__ __forceinline__ void copy_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until at most `kPending` of this thread's latest groups are incomplete.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Orders generic accesses to shared memory before accesses through the async proxy (wgmma, TMA).
/// Before it: this thread's earlier generic accesses, and those that it acquired from other
/// threads. After it: later async accesses of this thread and of threads that synchronise with it
/// afterwards.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Orders this warp's accesses to shared memory before the copy engine's later ones, and before
/// those of the warp's other lanes.
__device__ __forceinline__ void order_before_copy_engine() {
  fence_async_proxy();
  __syncwarp();
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Loads one box of a rank-3 tensor map to shared memory. Its bytes count on `barrier`.
__device__ __forceinline__ void load_box(std::uint32_t to, const CUtensorMap* map,
                                         std::uint32_t barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

/// Loads one box to the same place of every CTA in `mask`. Its bytes count on each CTA's `barrier`.
__device__ __forceinline__ void load_box_multicast(std::uint32_t to, const CUtensorMap* map,
                                                   std::uint32_t barrier, std::uint16_t mask,
                                                   int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(mask), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

/// The same for a map of rank 5, at (c0, 0, 0, c3, c4).
__device__ __forceinline__ void load_box5_multicast(std::uint32_t to, const CUtensorMap* map,
                                                    std::uint32_t barrier, std::uint16_t mask,
                                                    int c0, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %5, %6, %7}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(mask), "r"(c0), "r"(0), "r"(c3), "r"(c4)
      : "memory");
}

/// Stores a box from shared memory; elements outside the tensor are not written. The store belongs
/// to the group that this thread commits next.
__device__ __forceinline__ void store_box(const CUtensorMap* map, std::uint32_t from, int c0,
                                          int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until the copy engine has read the shared memory of all of this thread's groups of stores
/// but the latest `kPending`. The memory may then be overwritten.
template <int kPending>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Waits until all of this thread's committed stores are complete.
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace sonicmoe::cuda
