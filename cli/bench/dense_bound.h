#pragma once

#include <string>
#include <vector>

#include "timing.h"

namespace sonicmoe::cli {

/// What the six grouped GEMMs would cost as dense GEMMs of some other library with perfectly even
/// experts and contiguous rows: no routing, no gather, no activation, no aggregation. Each is timed
/// in more than one way, and the fastest counts.
class DenseBound {
 public:
  virtual ~DenseBound() = default;

  /// The groups to time.
  std::vector<Group>& groups() { return groups_; }

  struct Gemm {
    const Task* task;  ///< with the times of the fastest way; named like the operation it bounds
    const char* way;   ///< "experts in parallel"
  };
  /// What has been timed so far, in the order of GemmOp.
  std::vector<Gemm> gemms() const;

  struct Seconds {
    double forward, backward;  ///< NaN if not timed
  };
  Seconds seconds() const;

  /// "fp32 OpenBLAS, even experts"
  const std::string& title() const { return title_; }

 protected:
  struct Candidate {
    std::size_t group, task;
    const char* way;
  };
  std::string title_;
  std::vector<Group> groups_;
  std::vector<std::vector<Candidate>> candidates_;  ///< ways to run each GEMM, in order of GemmOp
};

}  // namespace sonicmoe::cli
