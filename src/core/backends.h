#pragma once

#include <vector>

#include "core/kernel.h"
#include "sonicmoe/info.h"

/// The entries that each backend offers to the kernel list, and the functions that core calls in
/// it. src/cpu and src/cuda define them, each entry beside its kernel; core includes nothing from
/// there.
namespace sonicmoe {

namespace cpu {
// By OpenBLAS's sgemm on fp32 tiles, bf16 storage widened. For any x86-64-v3 or aarch64.
extern const Kernel<RouterGemmDesc> kRouterGemm;
extern const Kernel<GroupedGemmDesc> kUpProj;
extern const Kernel<GroupedGemmDesc> kDownProj;
extern const Kernel<GroupedGemmDesc> kDownProjDgrad;
extern const Kernel<GroupedGemmDesc> kUpProjDgrad;
extern const Kernel<GroupedGemmDesc> kDownProjWgrad;
extern const Kernel<GroupedGemmDesc> kUpProjWgrad;
// The same operations by our own tile engine: fp32 with AVX-512, bf16 with AVX-512 BF16.
extern const Kernel<RouterGemmDesc> kRouterGemmAvx512;
extern const Kernel<RouterGemmDesc> kRouterGemmAvx512Bf16;
extern const Kernel<GroupedGemmDesc> kUpProjAvx512;
extern const Kernel<GroupedGemmDesc> kUpProjAvx512Bf16;
extern const Kernel<GroupedGemmDesc> kDownProjAvx512;
extern const Kernel<GroupedGemmDesc> kDownProjAvx512Bf16;
extern const Kernel<GroupedGemmDesc> kDownProjDgradAvx512;
extern const Kernel<GroupedGemmDesc> kDownProjDgradAvx512Bf16;
extern const Kernel<GroupedGemmDesc> kUpProjDgradAvx512;
extern const Kernel<GroupedGemmDesc> kUpProjDgradAvx512Bf16;
extern const Kernel<GroupedGemmDesc> kDownProjWgradAvx512;
extern const Kernel<GroupedGemmDesc> kDownProjWgradAvx512Bf16;
extern const Kernel<GroupedGemmDesc> kUpProjWgradAvx512;
extern const Kernel<GroupedGemmDesc> kUpProjWgradAvx512Bf16;
extern const Kernel<TopKDesc> kTopK;
extern const Kernel<MetadataDesc> kMetadata;
extern const Kernel<SegmentsDesc> kSegments;
extern const Kernel<ZeroTailDesc> kZeroTail;
extern const Kernel<BiasGradDesc> kBiasGrad;
extern const Kernel<AggregateDesc> kAggregate;
extern const Kernel<ScoreGradDesc> kScoreGrad;
extern const Kernel<AuxLossDesc> kAuxLoss;
extern const Kernel<UpdateSelectionBiasDesc> kUpdateSelectionBias;
extern const Kernel<TokenRoundingDesc> kTokenRounding;
extern const Kernel<TokenRoundingGradDesc> kTokenRoundingGrad;
extern const Kernel<TokenDispatchDesc> kTokenDispatch;
extern const Kernel<SendRowsDesc> kSendRows;

int usable_threads();          ///< cores that this process may run on
std::string processor_name();  ///< "AMD EPYC ..."
std::string processor_details();
std::string missing_feature();  ///< the processor lacks it, but all CPU kernels need it; or empty
void copy(void* to, const void* from, std::size_t bytes);
}  // namespace cpu

#if SONICMOE_HAS_CUDA
namespace cuda {
/// Every device that the driver knows, or one entry that says why there is none.
std::vector<DeviceInfo> devices();
/// Why the machine has no CUDA device `index`, or empty.
std::string device_reason(int index);
/// Precondition: device_reason(index) is empty. An attribute that the driver refuses is 0.
DeviceTraits device_traits(int index) noexcept;
/// Makes a device the current one of this thread and clears cudaGetLastError(). Returns the device
/// that was current before, or -1 if leave() need not restore it.
int enter(int index) noexcept;
void leave(int previous) noexcept;
Status copy(void* to, const void* from, std::size_t bytes, const Exec& exec) noexcept;

extern const Kernel<RouterGemmDesc> kRouterGemm256;
extern const Kernel<RouterGemmDesc> kRouterGemm128;
extern const Kernel<RouterGemmDesc> kRouterGemm64;
// The number is the tile's width along N, the axis of operand B, which the CTAs of a cluster share.
extern const Kernel<GroupedGemmDesc> kUpProj256;
extern const Kernel<GroupedGemmDesc> kUpProj128;
extern const Kernel<GroupedGemmDesc> kDownProj256;
extern const Kernel<GroupedGemmDesc> kDownProj192;
extern const Kernel<GroupedGemmDesc> kDownProjDgrad128;
extern const Kernel<GroupedGemmDesc> kDownProjDgrad256;
extern const Kernel<GroupedGemmDesc> kUpProjDgrad256;
extern const Kernel<GroupedGemmDesc> kUpProjDgrad192;
extern const Kernel<GroupedGemmDesc> kDownProjWgrad256;
extern const Kernel<GroupedGemmDesc> kDownProjWgrad128;
extern const Kernel<GroupedGemmDesc> kUpProjWgrad256;
extern const Kernel<GroupedGemmDesc> kUpProjWgrad128;

// For any GPU since Ampere.
extern const Kernel<RouterGemmDesc> kPortableRouterGemm;
extern const Kernel<GroupedGemmDesc> kPortableUpProj256;
extern const Kernel<GroupedGemmDesc> kPortableUpProj128;
extern const Kernel<GroupedGemmDesc> kPortableDownProj;
extern const Kernel<GroupedGemmDesc> kPortableDownProjDgrad;
extern const Kernel<GroupedGemmDesc> kPortableUpProjDgrad;
extern const Kernel<GroupedGemmDesc> kPortableDownProjWgrad;
extern const Kernel<GroupedGemmDesc> kPortableUpProjWgrad;

extern const Kernel<TopKDesc> kTopK;
extern const Kernel<MetadataDesc> kMetadata;
extern const Kernel<SegmentsDesc> kSegments;
extern const Kernel<ZeroTailDesc> kZeroTail;
extern const Kernel<AggregateDesc> kAggregate;
extern const Kernel<ScoreGradDesc> kScoreGrad;
extern const Kernel<BiasGradDesc> kBiasGrad;
extern const Kernel<AuxLossDesc> kAuxLoss;
extern const Kernel<UpdateSelectionBiasDesc> kUpdateSelectionBias;
extern const Kernel<TokenRoundingDesc> kTokenRounding;
extern const Kernel<TokenRoundingGradDesc> kTokenRoundingGrad;
extern const Kernel<TokenDispatchDesc> kTokenDispatch;
extern const Kernel<SendRowsDesc> kSendRows;
}  // namespace cuda
#endif

}  // namespace sonicmoe
