#pragma once

#include <cstddef>

#include "sonicmoe/combine.h"
#include "sonicmoe/experts.h"
#include "sonicmoe/layer.h"
#include "sonicmoe/ops.h"
#include "sonicmoe/router.h"
#include "sonicmoe/status.h"
#include "sonicmoe/token_dispatch.h"
#include "sonicmoe/token_rounding.h"
#include "sonicmoe/types.h"

/// Checks of everything but data: sizes, enums, combinations, pointers. Each error is an
/// invalid_argument whose text has the form "<argument>: got <value>, allowed: <values>".
namespace sonicmoe {

Status validate(const LayerDesc& desc);
Status validate(const RoutingDesc& desc);
Status validate(const GroupedDesc& desc);
Status validate(const CombineDesc& desc);
Status validate(const RouterGemmDesc& desc);
Status validate(const TopKDesc& desc);
Status validate(const MetadataDesc& desc);
Status validate(const SegmentsDesc& desc);
Status validate(const ZeroTailDesc& desc);
Status validate(const GroupedGemmDesc& desc);
Status validate(const BiasGradDesc& desc);
Status validate(const AggregateDesc& desc);
Status validate(const ScoreGradDesc& desc);
Status validate(const AuxLossDesc& desc);
Status validate(const UpdateSelectionBiasDesc& desc);
Status validate(const TokenRoundingDesc& desc);
Status validate(const TokenRoundingGradDesc& desc);
Status validate(const TokenDispatchDesc& desc);
Status validate(const SendRowsDesc& desc);

// Tensors on CUDA start at multiples of 16 bytes, on the CPU at multiples of an element.
Status validate(const LayerDesc& desc, const ForwardArgs& args, DeviceType device);
Status validate(const LayerDesc& desc, const BackwardArgs& args, DeviceType device);
Status validate(const RoutingDesc& desc, const RouterForwardArgs& args, DeviceType device);
Status validate(const RoutingDesc& desc, const RouterBackwardArgs& args, DeviceType device);
Status validate(const GroupedDesc& desc, const ExpertsForwardArgs& args, DeviceType device);
Status validate(const GroupedDesc& desc, const ExpertsBackwardArgs& args, DeviceType device);
Status validate(const RouterGemmDesc& desc, const RouterGemmArgs& args, DeviceType device);
Status validate(const TopKDesc& desc, const TopKArgs& args, DeviceType device);
Status validate(const MetadataDesc& desc, const MetadataArgs& args, DeviceType device);
Status validate(const SegmentsDesc& desc, const SegmentsArgs& args, DeviceType device);
Status validate(const ZeroTailDesc& desc, const ZeroTailArgs& args, DeviceType device);
Status validate(const GroupedGemmDesc& desc, const GroupedGemmArgs& args, DeviceType device);
Status validate(const BiasGradDesc& desc, const BiasGradArgs& args, DeviceType device);
Status validate(const AggregateDesc& desc, const AggregateArgs& args, DeviceType device);
Status validate(const ScoreGradDesc& desc, const ScoreGradArgs& args, DeviceType device);
Status validate(const AuxLossDesc& desc, const AuxLossArgs& args, DeviceType device);
Status validate(const UpdateSelectionBiasDesc& desc, const UpdateSelectionBiasArgs& args,
                DeviceType device);
Status validate(const TokenRoundingDesc& desc, const TokenRoundingArgs& args, DeviceType device);
Status validate(const TokenRoundingGradDesc& desc, const TokenRoundingGradArgs& args,
                DeviceType device);
Status validate(const TokenDispatchDesc& desc, const TokenDispatchArgs& args, DeviceType device);
Status validate(const SendRowsDesc& desc, const SendRowsArgs& args, DeviceType device);

Status validate(Device device);
/// Refuses backward() of an inference plan.
Status validate_backward(bool inference);
Status validate(const Options& options);
/// `needed`: bytes. Checks size and alignment, unless `needed` is 0.
Status validate(Workspace workspace, std::size_t needed);

}  // namespace sonicmoe
