#pragma once

#include <cstddef>

#include "sonicmoe/combine.h"
#include "sonicmoe/experts.h"
#include "sonicmoe/layer.h"
#include "sonicmoe/ops.h"
#include "sonicmoe/router.h"
#include "sonicmoe/status.h"
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
Status validate(const TokenRoundingDesc& desc);
Status validate(const TokenRoundingGradDesc& desc);

Status validate(const LayerDesc& desc, const ForwardArgs& args);
Status validate(const LayerDesc& desc, const BackwardArgs& args);
Status validate(const RoutingDesc& desc, const RouterForwardArgs& args);
Status validate(const RoutingDesc& desc, const RouterBackwardArgs& args);
Status validate(const GroupedDesc& desc, const ExpertsForwardArgs& args);
Status validate(const GroupedDesc& desc, const ExpertsBackwardArgs& args);
Status validate(const RouterGemmDesc& desc, const RouterGemmArgs& args);
Status validate(const TopKDesc& desc, const TopKArgs& args);
Status validate(const MetadataDesc& desc, const MetadataArgs& args);
Status validate(const SegmentsDesc& desc, const SegmentsArgs& args);
Status validate(const ZeroTailDesc& desc, const ZeroTailArgs& args);
Status validate(const GroupedGemmDesc& desc, const GroupedGemmArgs& args);
Status validate(const BiasGradDesc& desc, const BiasGradArgs& args);
Status validate(const AggregateDesc& desc, const AggregateArgs& args);
Status validate(const ScoreGradDesc& desc, const ScoreGradArgs& args);
Status validate(const AuxLossDesc& desc, const AuxLossArgs& args);
Status validate(const TokenRoundingDesc& desc, const TokenRoundingArgs& args);
Status validate(const TokenRoundingGradDesc& desc, const TokenRoundingGradArgs& args);

Status validate(Device device);
/// Refuses backward() of an inference plan.
Status validate_backward(bool inference);
Status validate(const Options& options);
/// `needed`: bytes. Checks size and alignment, unless `needed` is 0.
Status validate(Workspace workspace, std::size_t needed);

}  // namespace sonicmoe
