#pragma once

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "wgmma is code for sm_90a"
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

/// Warpgroup matrix multiply-accumulate on 16-bit operands in shared memory, fp32 accumulators.
namespace sonicmoe::cuda {

/// Which axis of an operand tile is contiguous in shared memory: K, or M of A and N of B.
enum class Major : int { k = 0, mn = 1 };

/// Orders register accesses before the next wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `kPending` of this warpgroup's groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving accesses to accumulators across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Bytes of a block, which descriptors step by. Every tile consists of blocks of 8 lines of 128
/// bytes in the 128-byte swizzle, aligned to 1024 bytes.
///  - Major::k: a line holds 64 k of one row; 8 rows a block, blocks follow each other.
///  - Major::mn: a line holds 64 rows of one k; 8 k a block, blocks along k follow each other,
///    and chunks of 64 rows are `kChunk` bytes apart.
inline constexpr std::uint32_t kBlockBytes = 1024;

/// The lower half of a descriptor; the upper half is the same for all. Its fields count 16 bytes:
/// the start in bits 0 to 13, and the leading offset in 16 to 29. That is the distance of chunks
/// along MN, unused where K is contiguous.
template <Major kMajor>
__device__ __forceinline__ std::uint32_t descriptor(std::uint32_t address, std::uint32_t chunk) {
  const std::uint32_t leading = kMajor == Major::mn ? chunk >> 4 : 1;
  return (address & 0x3ffff) >> 4 | leading << 16;
}
/// The upper half: stride offset (the distance of blocks) and the 128-byte swizzle.
inline constexpr std::uint32_t kDescriptorUpper = kBlockBytes >> 4 | 1u << 30;

/// What the next 16 k add to a descriptor, in units of 16 bytes.
template <Major kMajor>
inline constexpr std::uint32_t kStepK16 = kMajor == Major::k ? 32 >> 4 : 2 * kBlockBytes >> 4;

// Accumulator registers by operand number; the later lists go on where the first ends.
#define SONICMOE_REGISTERS_32                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SONICMOE_REGISTERS_64                                                          \
  SONICMOE_REGISTERS_32                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SONICMOE_REGISTERS_96                                                          \
  SONICMOE_REGISTERS_64                                                                \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SONICMOE_REGISTERS_128                                                           \
  SONICMOE_REGISTERS_96                                                                  \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "   \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"

#define SONICMOE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SONICMOE_D16(i) SONICMOE_D4(i), SONICMOE_D4(i + 4), SONICMOE_D4(i + 8), SONICMOE_D4(i + 12)
#define SONICMOE_D32(i) SONICMOE_D16(i), SONICMOE_D16(i + 16)
#define SONICMOE_D64(i) SONICMOE_D32(i), SONICMOE_D32(i + 32)

// The operands a, b, major a, major b, add, upper half of descriptors follow the accumulators.
#define SONICMOE_WGMMA(n, type, registers, a, b, ma, mb, add, upper, ...)                         \
  asm volatile(                                                                                   \
      "{\n"                                                                                       \
      ".reg .pred keep;\n"                                                                        \
      ".reg .b64 da, db;\n"                                                                       \
      "mov.b64 da, {%" #a ", %" #upper                                                            \
      "};\n"                                                                                      \
      "mov.b64 db, {%" #b ", %" #upper                                                            \
      "};\n"                                                                                      \
      "setp.ne.s32 keep, %" #add                                                                  \
      ", 0;\n"                                                                                    \
      "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers              \
      "}, "                                                                                       \
      "da, db, keep, 1, 1, %" #ma ", %" #mb                                                       \
      ";\n"                                                                                       \
      "}"                                                                                         \
      : __VA_ARGS__                                                                               \
      : "r"(a_desc), "r"(b_desc), "n"(static_cast<int>(kMajorA)), "n"(static_cast<int>(kMajorB)), \
        "r"(add_to), "n"(kDescriptorUpper))
#define SONICMOE_WGMMA_N(type)                                                                  \
  if constexpr (kN == 64) {                                                                     \
    SONICMOE_WGMMA(64, type, SONICMOE_REGISTERS_32, 32, 33, 34, 35, 36, 37, SONICMOE_D32(0));   \
  } else if constexpr (kN == 128) {                                                             \
    SONICMOE_WGMMA(128, type, SONICMOE_REGISTERS_64, 64, 65, 66, 67, 68, 69, SONICMOE_D64(0));  \
  } else if constexpr (kN == 192) {                                                             \
    SONICMOE_WGMMA(192, type, SONICMOE_REGISTERS_96, 96, 97, 98, 99, 100, 101, SONICMOE_D64(0), \
                   SONICMOE_D32(64));                                                           \
  } else {                                                                                      \
    static_assert(kN == 256, "tile width: 64, 128, 192 or 256");                                \
    SONICMOE_WGMMA(256, type, SONICMOE_REGISTERS_128, 128, 129, 130, 131, 132, 133,             \
                   SONICMOE_D64(0), SONICMOE_D64(64));                                          \
  }

/// d = a b, or d += a b unless `add_to` is 0, for one m64 x kN x k16 step; the descriptors tell
/// where a and b lie. Thread t of the warpgroup, lane l = t % 32, holds in d[4j .. 4j+3] the
/// elements of rows 16 (t/32) + l/4 and 8 more, columns 8j + 2 (l%4) + {0, 1}.
template <class T, int kN, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], std::uint32_t a_desc,
                                      std::uint32_t b_desc, int add_to) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    SONICMOE_WGMMA_N("bf16")
  } else {
    static_assert(std::is_same_v<T, __half>, "bf16 or fp16");
    SONICMOE_WGMMA_N("f16")
  }
}

#undef SONICMOE_WGMMA_N
#undef SONICMOE_WGMMA
#undef SONICMOE_D64
#undef SONICMOE_D32
#undef SONICMOE_D16
#undef SONICMOE_D4
#undef SONICMOE_REGISTERS_128
#undef SONICMOE_REGISTERS_96
#undef SONICMOE_REGISTERS_64
#undef SONICMOE_REGISTERS_32

}  // namespace sonicmoe::cuda
