#pragma once

#include <memory>

#include "sonicmoe/layer.h"
#include "timing.h"

namespace sonicmoe::cli {

/// What the six grouped GEMMs would cost as dense fp32 GEMMs (OpenBLAS) with perfectly even
/// experts and contiguous rows: no routing, no gather, no activation, no aggregation. Each GEMM is
/// timed two ways, experts in parallel with one thread each, and one expert after the other with
/// all threads; the faster one counts.
class DenseBound {
 public:
  /// `rows` of all experts together: fewer than the layer's capacity if its tokens were rounded.
  DenseBound(const LayerDesc& desc, std::int64_t rows, int threads, std::uint64_t seed);

  /// The groups to time.
  std::vector<Group>& groups() { return groups_; }

  struct Gemm {
    const Task* task;  ///< with the times of the faster way; named like the operation it bounds
    const char* way;   ///< "experts in parallel" or "threads inside a GEMM"
  };
  /// What has been timed so far, in the order of GemmOp.
  std::vector<Gemm> gemms() const;

  struct Seconds {
    double forward, backward;  ///< NaN if not timed
  };
  Seconds seconds() const;

 private:
  struct Data;
  std::shared_ptr<const Data> data_;
  std::vector<Group> groups_;  ///< forward, backward of one way, then of the other
};

}  // namespace sonicmoe::cli
