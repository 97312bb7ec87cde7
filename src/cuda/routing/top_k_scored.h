#pragma once

#include "core/kernel.h"

namespace sonicmoe::cuda {

/// top_k where the router is not RouterDesc::plain().
Status run_scored_top_k(const TopKDesc& desc, const TopKArgs& args, const Exec& exec);

}  // namespace sonicmoe::cuda
