#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <vector>

#include "core/op_plan.h"

namespace sonicmoe {

/// Runs the operations of a call in order and stops at the first that fails. It can also run some
/// of them, or only list their names. So a plan's code states the order of its operations once.
class Sequence {
 public:
  /// `scratch`: offset of the memory that operations share as their own workspace. It extends to
  /// the end of `workspace`.
  Sequence(Workspace workspace, std::size_t scratch, Stream stream, OperationMask wanted)
      : base_(static_cast<char*>(workspace.data)),
        scratch_{base_ == nullptr ? nullptr : base_ + scratch, workspace.bytes - scratch},
        stream_(stream),
        wanted_(wanted) {}
  /// Runs nothing; appends the names of the operations to `names`.
  explicit Sequence(std::vector<const char*>* names) : names_(names) {}

  /// A region of the workspace, converted to any pointer. Null without a workspace: then all
  /// regions are empty, or the sequence lists names.
  struct Region {
    char* data;
    template <class T>
    operator T*() const {  // NOLINT: implicit by design
      return reinterpret_cast<T*>(data);
    }
  };
  Region region(std::size_t offset) const { return {base_ == nullptr ? nullptr : base_ + offset}; }

  /// Runs `plan`, if there is one and the call wants it. `handoff` assumes that the whole sequence
  /// runs. The operation gets its tile counter only if an operation of this call has reset it, and
  /// overlap_previous only if the operation before it runs in this call.
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
  /// run(), but only if `output` is not null. In a list of names the operation always appears.
  template <class Desc>
  void run_for(const void* output, const char* name, const std::optional<OpPlan<Desc>>& plan,
               const typename Desc::Args& args, Handoff handoff = {}) {
    if (names_ != nullptr || output != nullptr) return run(name, plan, args, handoff);
    if (plan) ++next_;
  }
  /// Copies to an optional output, in calls that run all operations and give the output.
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
  int next_ = 0;          // index of the next operation: its bit in wanted_
  bool follows_ = false;  // the operation before the next one ran in this call
  int resets_ = 0;
  std::array<const std::int32_t*, 4> reset_ = {};  // tile counters that this call has reset
  Status status_;
};

}  // namespace sonicmoe
