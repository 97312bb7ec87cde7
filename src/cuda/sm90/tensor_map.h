#pragma once

#include <cuda.h>

#include <cstdint>

#include "sonicmoe/status.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// A rank-3 tensor of 16-bit elements as the copy engine sees it: (experts, outer, inner), inner
/// contiguous, moved in boxes of 64 x `box` elements in the 128-byte swizzle. The copy engine reads
/// zeros outside the extents and writes nothing there.
struct TensorView {
  const void* base = nullptr;
  std::int64_t inner = 0, outer = 0, experts = 1;
  std::int64_t outer_stride = 0, expert_stride = 0;  ///< elements, multiples of 8
  int box = 0;                                       ///< at most 256
  /// A box has the rows of each eight in the order 0, 4, 1, 5, 2, 6, 3, 7. Loads of such a map are
  /// those of load_box5_multicast(); `outer` and `box` are multiples of 8.
  bool pairs_rows = false;
};

/// Encodes maps and keeps the first failure.
class TensorMaps {
 public:
  explicit TensorMaps(DType dtype) : dtype_(dtype) {}
  CUtensorMap encode(const TensorView& view) noexcept;
  const Status& status() const noexcept { return status_; }

 private:
  DType dtype_;
  Status status_;
};

}  // namespace sonicmoe::cuda
