#pragma once

#include "core/kernel.h"

namespace sonicmoe::cuda {

/// Does top_few_scored route this? Its rows fill the lanes of a token: E is 64, 128, 256 or 512.
bool fits_top_few_scored(const TopKDesc& desc);

/// top_k for descriptors that fit. Writes block_counts (null: none), a row of `stride` bytes for
/// each block of tokens.
Status run_top_few_scored(const TopKDesc& desc, const TopKArgs& args, std::uint8_t* block_counts,
                          std::int32_t stride, const Exec& exec);

}  // namespace sonicmoe::cuda
