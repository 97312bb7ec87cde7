#pragma once

#include <optional>
#include <vector>

#include "testkit/run.h"

/// The experts alone, on contiguous rows. run_layer() hands such problems over. Their lists name
/// the owner of each row: entry r has token r, and a sentinel where no expert owns the row.
namespace sonicmoe::testkit {

/// A plan, and the tensors of its calls in guarded memory. Rows that no expert owns are NaN in
/// every input.
class ExpertsCall {
 public:
  ExpertsCall(const Problem& problem, Device device, const Options& options);

  const Status& status() const { return status_; }  ///< of the plan
  Status run_forward(Stream stream = {});
  Status run_backward(Stream stream = {});

  /// What the calls left behind. Rows of outputs that no expert owns come back as zeros; `damage`
  /// says if they hold anything else than zero_tail promises.
  void read_forward(LayerRun* run) const;
  void read_backward(LayerRun* run) const;

  Arena arena;

 private:
  void add_inputs();
  void add_outputs();
  const void* rows_input(const char* name, Tensor values, std::int64_t width, DType type);
  Tensor rows_output(const char* name, std::int64_t width, DType type, LayerRun* run) const;

  std::int64_t R() const { return p_.desc.tokens; }
  std::int64_t E() const { return p_.desc.router.experts; }

  Problem p_;
  ExpertsDesc x_;
  std::vector<std::int64_t> counts_, offsets_;  // (E), (E+1)
  std::vector<std::int64_t> owned_;             // rows of experts, in order
  bool dense_ = true;                           // rows follow each other from row 0 on
  Status status_;
  std::optional<ExpertsPlan> plan_;
  ExpertsForwardArgs forward_;
  ExpertsBackwardArgs backward_;
  Workspace forward_workspace_, backward_workspace_;
};

LayerRun run_experts(const Problem& problem, Device device = {}, const Options& options = {});

}  // namespace sonicmoe::testkit
