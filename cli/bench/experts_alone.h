#pragma once

#include "cli/tensors.h"
#include "timing.h"

namespace sonicmoe::cli {

/// The layer's experts alone, on contiguous rows with scores: as many rows for each expert as the
/// layer's router gave it, random contents, the layer's weights.
class ExpertsAlone {
 public:
  /// Runs forward and backward once. The layer has counted its rows.
  ExpertsAlone(const Settings& settings, const LayerTensors& tensors);
  /// "rows_forward" and, unless for inference, "rows_backward".
  std::vector<Group>& groups() { return groups_; }
  /// Each operation of both by itself: "rows.up_proj", ...
  std::vector<Group>& operations() { return operations_; }

 private:
  ExpertsForwardArgs forward_args() const;
  ExpertsBackwardArgs backward_args() const;

  const LayerTensors& l_;
  Buffer rows_, out_, scores_, segments_, preact_, dpreact_, dout_, dx_, dscores_;
  std::vector<Group> groups_, operations_;
};

}  // namespace sonicmoe::cli
