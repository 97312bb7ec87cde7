#pragma once

#include "sonicmoe/ops.h"

namespace sonicmoe {

struct CombineDesc {
  std::int64_t tokens = 0;  ///< T
  std::int64_t rows = 0;    ///< R
  std::int64_t hidden = 0;  ///< d
  std::int64_t top_k = 0;   ///< K, or 0 for lists
  DType dtype = DType::bf16;
  std::int64_t experts = 0;  ///< E where backward may have router_w (AggregateArgs), else 0
  bool inference = false;    ///< no backward
  bool operator==(const CombineDesc&) const = default;
};

/// From the experts' rows to tokens: O, weighted by slot_scores, and dX, unweighted, with an addend
/// or the router's part of it. Both are sums as AggregateArgs describes them.
class SONICMOE_API CombinePlan {
 public:
  const CombineDesc& desc() const noexcept;
  std::size_t workspace_bytes() const noexcept;
  std::string explain() const;
  std::vector<const char*> forward_operations() const;
  std::vector<const char*> backward_operations() const;

  Status forward(const AggregateArgs& args, Workspace workspace = {}, Stream stream = {},
                 OperationMask operations = kAllOperations) const noexcept;
  Status backward(const AggregateArgs& args, Workspace workspace = {}, Stream stream = {},
                  OperationMask operations = kAllOperations) const noexcept;

  struct Impl;
  explicit CombinePlan(std::shared_ptr<const Impl> impl) noexcept : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

SONICMOE_API Result<CombinePlan> make_plan(const CombineDesc& desc, Device device = {},
                                           const Options& options = {});

}  // namespace sonicmoe
