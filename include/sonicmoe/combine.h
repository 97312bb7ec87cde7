#pragma once

#include "sonicmoe/ops.h"

namespace sonicmoe {

/// The sums of T tokens over R rows of width d. Ranges as in AggregateDesc.
struct CombineDesc {
  std::int64_t tokens = 0;  ///< T
  std::int64_t rows = 0;    ///< R
  std::int64_t hidden = 0;  ///< d
  std::int64_t top_k = 0;   ///< K, or 0 for lists
  DType dtype = DType::bf16;
  std::int64_t experts = 0;  ///< E if backward may get router_w (AggregateArgs), else 0
  bool inference = false;    ///< the plan has no backward
  bool f32_dlogits = false;  ///< as in AggregateDesc
  bool f32_router_w = false;
  bool operator==(const CombineDesc&) const = default;
};

/// From the experts' rows to tokens, by the sums that AggregateArgs describes. Forward writes O:
/// the rows of Y weighted by `slot_scores`, without `router_w`. Backward writes dX: the rows of dX~
/// unweighted, plus an addend or the router's part. Otherwise like LayerPlan.
class SONICMOE_API CombinePlan {
 public:
  const CombineDesc& desc() const noexcept;
  /// Enough for either call.
  std::size_t workspace_bytes() const noexcept;
  /// Which kernels run and why the others do not, and the workspace.
  std::string explain() const;
  /// Names of the operations of a call, in order: the bits of OperationMask.
  std::vector<const char*> forward_operations() const;
  std::vector<const char*> backward_operations() const;

  Status forward(const AggregateArgs& args, Workspace workspace = {}, Stream stream = {},
                 OperationMask operations = kAllOperations) const noexcept;
  /// Runs nothing if `out` is null. Refused for inference plans.
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
