#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "core/op_plan.h"

namespace sonicmoe {

/// Makes the operation plans of a larger plan. After the first refusal add() does nothing, and
/// finish() returns that refusal.
class PlanBuilder {
 public:
  PlanBuilder(const Exec& exec, const Options& options) : exec_(exec), options_(options) {}

  /// Options::kernel binds only operations that have an entry which it selects. The others choose
  /// freely.
  template <class Desc>
  void add(std::optional<OpPlan<Desc>>* plan, const Desc& desc) {
    if (!status_.ok()) return;
    Options options = options_;
    if (!offers(desc, options_.kernel)) options.kernel.clear();
    found_ |= options.kernel == options_.kernel;
    Result<OpPlan<Desc>> made = make_plan(desc, exec_.device, options);
    if (!made.ok()) {
      status_ = made.status();
      return;
    }
    scratch_ = std::max(scratch_, made->workspace_bytes());
    walk_ += made->explain();
    *plan = std::move(made).value();
  }

  /// The largest workspace of the operations added since the last call, in bytes. Operations run
  /// one after another, so they share it.
  std::size_t take_scratch() { return std::exchange(scratch_, 0); }
  /// OpPlan::explain() of every operation.
  const std::string& walk() const { return walk_; }

  /// Call it after the last operation. Returns the first refusal, or `unsupported` if no operation
  /// has an entry that Options::kernel selects.
  Status finish() const {
    if (status_.ok() && !found_) {
      return Status::error(StatusCode::unsupported,
                           "kernel: got %s, allowed: a name or backend of sonicmoe::kernels()",
                           options_.kernel.c_str());
    }
    return status_;
  }

 private:
  template <class Desc>
  bool offers(const Desc& desc, const std::string& wanted) const {
    for (const Kernel<Desc>* kernel : kernel_list<Desc>()) {
      if (is_candidate(*kernel, desc, exec_.traits) &&
          kernel_matches(wanted, kernel->name, kernel->arch)) {
        return true;
      }
    }
    return false;
  }

  const Exec& exec_;
  const Options& options_;
  Status status_;
  std::size_t scratch_ = 0;
  std::string walk_;
  bool found_ = false;
};

}  // namespace sonicmoe
