// The only list that decides which kernel runs, best first: the first entry that neither rejects
// nor defers runs.
#include "core/backends.h"
#include "core/kernel.h"

namespace sonicmoe {

template <>
std::span<const Kernel<RouterGemmDesc>* const> kernel_list() {
  static constexpr const Kernel<RouterGemmDesc>* kList[] = {
    &cpu::kRouterGemmAvx512Bf16,
    &cpu::kRouterGemmAvx512,
    &cpu::kRouterGemm,
#if SONICMOE_HAS_CUDA
#if SONICMOE_HAS_SM90
    &cuda::kRouterGemm256,
    &cuda::kRouterGemm128,
    &cuda::kRouterGemm64,
#endif
    &cuda::kPortableRouterGemm,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<GroupedGemmDesc>* const> kernel_list() {
  static constexpr const Kernel<GroupedGemmDesc>* kList[] = {
    &cpu::kUpProjAvx512Bf16,
    &cpu::kUpProjAvx512,
    &cpu::kUpProj,  //
    &cpu::kDownProjAvx512Bf16,
    &cpu::kDownProjAvx512,
    &cpu::kDownProj,  //
    &cpu::kDownProjDgradAvx512Bf16,
    &cpu::kDownProjDgradAvx512,
    &cpu::kDownProjDgrad,  //
    &cpu::kUpProjDgradAvx512Bf16,
    &cpu::kUpProjDgradAvx512,
    &cpu::kUpProjDgrad,  //
    &cpu::kDownProjWgradAvx512Bf16,
    &cpu::kDownProjWgradAvx512,
    &cpu::kDownProjWgrad,  //
    &cpu::kUpProjWgradAvx512Bf16,
    &cpu::kUpProjWgradAvx512,
    &cpu::kUpProjWgrad,  //
#if SONICMOE_HAS_CUDA
#if SONICMOE_HAS_SM90
    &cuda::kUpProj256,
    &cuda::kUpProj128,  //
    &cuda::kDownProj256,
    &cuda::kDownProj192,  //
    &cuda::kDownProjDgrad256,
    &cuda::kDownProjDgrad128,  //
    &cuda::kUpProjDgrad256,
    &cuda::kUpProjDgrad192,  //
    &cuda::kDownProjWgrad256,
    &cuda::kDownProjWgrad128,  //
    &cuda::kUpProjWgrad256,
    &cuda::kUpProjWgrad128,
#endif
    &cuda::kPortableUpProj256,
    &cuda::kPortableUpProj128,  //
    &cuda::kPortableDownProj,
    &cuda::kPortableDownProjDgrad,
    &cuda::kPortableUpProjDgrad,
    &cuda::kPortableDownProjWgrad,
    &cuda::kPortableUpProjWgrad,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<TopKDesc>* const> kernel_list() {
  static constexpr const Kernel<TopKDesc>* kList[] = {
    &cpu::kTopK,
#if SONICMOE_HAS_CUDA
    &cuda::kTopK,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<MetadataDesc>* const> kernel_list() {
  static constexpr const Kernel<MetadataDesc>* kList[] = {
    &cpu::kMetadata,
#if SONICMOE_HAS_CUDA
    &cuda::kMetadata,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<SegmentsDesc>* const> kernel_list() {
  static constexpr const Kernel<SegmentsDesc>* kList[] = {
    &cpu::kSegments,
#if SONICMOE_HAS_CUDA
    &cuda::kSegments,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<ZeroTailDesc>* const> kernel_list() {
  static constexpr const Kernel<ZeroTailDesc>* kList[] = {
    &cpu::kZeroTail,
#if SONICMOE_HAS_CUDA
    &cuda::kZeroTail,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<BiasGradDesc>* const> kernel_list() {
  static constexpr const Kernel<BiasGradDesc>* kList[] = {
    &cpu::kBiasGrad,
#if SONICMOE_HAS_CUDA
    &cuda::kBiasGrad,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<AggregateDesc>* const> kernel_list() {
  static constexpr const Kernel<AggregateDesc>* kList[] = {
    &cpu::kAggregate,
#if SONICMOE_HAS_CUDA
    &cuda::kAggregate,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<ScoreGradDesc>* const> kernel_list() {
  static constexpr const Kernel<ScoreGradDesc>* kList[] = {
    &cpu::kScoreGrad,
#if SONICMOE_HAS_CUDA
    &cuda::kScoreGrad,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<AuxLossDesc>* const> kernel_list() {
  static constexpr const Kernel<AuxLossDesc>* kList[] = {
    &cpu::kAuxLoss,
#if SONICMOE_HAS_CUDA
    &cuda::kAuxLoss,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<UpdateSelectionBiasDesc>* const> kernel_list() {
  static constexpr const Kernel<UpdateSelectionBiasDesc>* kList[] = {
    &cpu::kUpdateSelectionBias,
#if SONICMOE_HAS_CUDA
    &cuda::kUpdateSelectionBias,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<TokenRoundingDesc>* const> kernel_list() {
  static constexpr const Kernel<TokenRoundingDesc>* kList[] = {
    &cpu::kTokenRounding,
#if SONICMOE_HAS_CUDA
    &cuda::kTokenRounding,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<TokenRoundingGradDesc>* const> kernel_list() {
  static constexpr const Kernel<TokenRoundingGradDesc>* kList[] = {
    &cpu::kTokenRoundingGrad,
#if SONICMOE_HAS_CUDA
    &cuda::kTokenRoundingGrad,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<TokenDispatchDesc>* const> kernel_list() {
  static constexpr const Kernel<TokenDispatchDesc>* kList[] = {
    &cpu::kTokenDispatch,
#if SONICMOE_HAS_CUDA
    &cuda::kTokenDispatch,
#endif
  };
  return kList;
}

template <>
std::span<const Kernel<SendRowsDesc>* const> kernel_list() {
  static constexpr const Kernel<SendRowsDesc>* kList[] = {
    &cpu::kSendRows,
#if SONICMOE_HAS_CUDA
    &cuda::kSendRows,
#endif
  };
  return kList;
}

}  // namespace sonicmoe
