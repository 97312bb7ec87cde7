#pragma once

#include <cstddef>

#include "core/kernel.h"

/// The sums of down_proj_dgrad's dS over its n blocks.
namespace sonicmoe::cuda {

/// dscores = the sums over the n blocks of `partials` (n_blocks, R), where an expert owns the row.
Status sum_dscores(const GroupedGemmDesc& d, const float* partials, int n_blocks,
                   const GroupedGemmArgs& a, const Exec& exec);

/// Bytes of the workspace for each n block's partial dscores, unless there is one n block.
inline std::size_t dscores_partials_bytes(const GroupedGemmDesc& d, int n_blocks) {
  if (n_blocks == 1) return 0;
  return static_cast<std::size_t>(n_blocks) * static_cast<std::size_t>(d.rows) * 4;
}

}  // namespace sonicmoe::cuda
