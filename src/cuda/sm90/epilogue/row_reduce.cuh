#pragma once

#include "math/ieee.h"

/// The third port of epilogues: sums along the rows of a tile.
namespace sonicmoe::cuda {

/// Sums over the columns of a tile for a warp's 16 rows. A lane adds to two rows, eight apart.
class RowReduce {
 public:
  /// Adds x * y to row lane / 4 + 8 * eights.
  __device__ __forceinline__ void add(int eights, float x, float y) {
    sum_[eights] = math::fma(x, y, sum_[eights]);
  }
  /// Adds up the four lanes of each row in a fixed order; to[i] = the sum of row i for i < rows.
  __device__ __forceinline__ void store(float* to, int rows, int lane) {
#pragma unroll
    for (int eights = 0; eights < 2; ++eights) {
      float sum = sum_[eights];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = lane / 4 + 8 * eights;
      if (lane % 4 == 0 && row < rows) to[row] = sum;
    }
  }

 private:
  float sum_[2] = {0.0f, 0.0f};
};

}  // namespace sonicmoe::cuda
