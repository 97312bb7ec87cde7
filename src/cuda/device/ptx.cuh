#pragma once

#include <cuda.h>  // CUtensorMap

#include <cstdint>

/// The PTX that Hopper kernels are made of, one instruction a function. Shared-memory addresses are
/// 32-bit `shared` addresses throughout.
namespace sonicmoe::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Threads and clusters.

__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// All threads of the cluster; writes before it are visible after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// One lane of a converged warp.
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

/// The first lane's value. Where all have the same, the compiler sees so only now, and computes
/// once for the warp what follows from it: an address for the copy engine, for one, without which
/// it stores each box in a loop over the lanes.
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

/// Barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// By this multiprocessor's clock.
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

/// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// On the barrier at the same place in CTA `rank` of the cluster. At CTA scope on purpose: cluster
/// scope costs a fence of the whole GPU, and nothing is passed on but that the memory is free:
/// reads by wgmma are over, which wgmma.wait_group has seen to, those of the copy engine too, and
/// what threads read themselves has been used; their writes were fenced before the copy engine read
/// them.
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

/// Arrives, and makes the phase wait for `bytes` of bulk copies or store_async(), too.
__device__ __forceinline__ void mbarrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// `value` to shared memory of CTA `rank` of the cluster; its 4 bytes count on the barrier there.
/// Both addresses as in this CTA.
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

/// 16 bytes of shared memory.
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

/// 16 bytes from global to shared memory, through the generic proxy.
__device__ __forceinline__ void copy_async_16(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}

/// The same, or zeros when `valid` is false (`from` is then not read).
__device__ __forceinline__ void copy_async_16(std::uint32_t to, const void* from, bool valid) {
  const std::uint32_t size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(size)
               : "memory");
}

/// The same, by a policy of L2.
__device__ __forceinline__ void copy_async_16(std::uint32_t to, const void* from, bool valid,
                                              std::uint64_t policy) {
  const std::uint32_t size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(size), "l"(policy)
               : "memory");
}

/// What L2 does with lines that are read: they leave it first, or in turn.
__device__ __forceinline__ std::uint64_t l2_policy(bool leave_first) {
  std::uint64_t first, in_turn;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(in_turn));
  return leave_first ? first : in_turn;
}

/// 16 bytes if valid; if they must come from memory, the 256 bytes around them come to L2.
__device__ __forceinline__ void copy_async_16_of_256(std::uint32_t to, const void* from,
                                                     bool valid) {
  const std::uint32_t size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(size)
               : "memory");
}

/// Until the kernel before this one in the stream has ended. Returns at once unless this one was
/// launched early.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
/// From here on the next kernel may start, if it was launched early.
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// This thread arrives on the barrier once all its earlier cp.async have landed. The arrival is one
/// of those that the barrier was initialised for.
__device__ __forceinline__ void copy_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Orders this thread's earlier (or acquired) generic accesses to shared memory before its later
/// accesses, and those of threads it synchronises with, through the async proxy (wgmma, TMA).
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// One box of a rank-3 tensor map to shared memory; its bytes count on `barrier`.
__device__ __forceinline__ void load_box(std::uint32_t to, const CUtensorMap* map,
                                         std::uint32_t barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

/// The same box to the same place of every CTA in `mask`, counted on the barrier of each.
__device__ __forceinline__ void load_box_multicast(std::uint32_t to, const CUtensorMap* map,
                                                   std::uint32_t barrier, std::uint16_t mask,
                                                   int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(mask), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

/// Shared memory to a box; what lies outside the tensor is not written. Belongs to the calling
/// thread's next group.
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
/// Until the copy engine has read the shared memory of all but this thread's `kPending` latest
/// groups of stores.
template <int kPending>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Until all of this thread's stores are done.
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace sonicmoe::cuda
