#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <vector>

#include "core/op_plan.h"

namespace sonicmoe {

/// Runs the operations of a call in order and stops at the first that fails. It can run a part of
/// them, or only tell their names, so that the order of operations is written once.
class Sequence {
 public:
  /// `scratch`: where the workspace that operations share begins; up to the workspace's end.
  Sequence(Workspace workspace, std::size_t scratch, Stream stream, OperationMask wanted)
      : base_(static_cast<char*>(workspace.data)),
        scratch_{base_ == nullptr ? nullptr : base_ + scratch, workspace.bytes - scratch},
        stream_(stream),
        wanted_(wanted) {}
  /// Runs nothing: names of operations are added to `names`.
  explicit Sequence(std::vector<const char*>* names) : names_(names) {}

  /// A region of the workspace, as any pointer. Null when there is no workspace, which is so only
  /// when all regions are empty.
  struct Region {
    char* data;
    template <class T>
    operator T*() const {  // NOLINT: implicit by design
      return reinterpret_cast<T*>(data);
    }
  };
  Region region(std::size_t offset) const { return {base_ == nullptr ? nullptr : base_ + offset}; }

  /// Runs `plan`, if there is one. `handoff` is meant for the whole sequence: of what it says only
  /// that is passed on which the operations that run in this call make true.
  template <class Desc>
  void run(const char* name, const std::optional<OpPlan<Desc>>& plan,
           const typename Desc::Args& args, Handoff handoff = {}) {
    if (!plan) return;
    if (names_ != nullptr) return names_->push_back(name);
    if (!wants_next()) return;
    if (!is_reset(handoff.tile_counter)) handoff.tile_counter = nullptr;
    handoff.overlap_previous &= follows_;
    if (status_.ok()) status_ = run_operation(*plan, args, handoff, scratch_, stream_);
    if (handoff.next_tile_counter != nullptr) reset_[resets_++] = handoff.next_tile_counter;
    follows_ = true;
  }
  /// For an optional output: the operation does not run if that is null.
  template <class Desc>
  void run_for(const void* output, const char* name, const std::optional<OpPlan<Desc>>& plan,
               const typename Desc::Args& args, Handoff handoff = {}) {
    if (names_ != nullptr || output != nullptr) return run(name, plan, args, handoff);
    if (plan) ++next_;
  }
  /// A copy to an optional output, in calls that run all operations.
  void copy(void* to, const void* from, std::size_t bytes, Exec exec) {
    if (names_ != nullptr || to == nullptr || wanted_ != kAllOperations) return;
    exec.stream = stream_;
    if (status_.ok()) status_ = sonicmoe::copy(to, from, bytes, exec);
  }
  const Status& status() const { return status_; }

 private:
  bool wants_next() {
    const bool wants = (wanted_ >> std::min(next_++, 63) & 1) != 0;
    if (!wants) follows_ = false;
    return wants;
  }
  bool is_reset(const std::int32_t* counter) const {
    return std::find(reset_.begin(), reset_.begin() + resets_, counter) != reset_.begin() + resets_;
  }

  char* base_ = nullptr;
  Workspace scratch_;
  Stream stream_;
  OperationMask wanted_ = kAllOperations;
  std::vector<const char*>* names_ = nullptr;
  int next_ = 0;          // of the operations in order
  bool follows_ = false;  // the operation before the next one ran in this call
  int resets_ = 0;
  std::array<const std::int32_t*, 4> reset_ = {};  // tile counters that operations of it have set
  Status status_;
};

}  // namespace sonicmoe
