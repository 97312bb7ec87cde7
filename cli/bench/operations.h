#pragma once

#include <memory>

#include "cli/tensors.h"
#include "timing.h"

namespace sonicmoe::cli {

/// The operations that a layer's plan says it is made of, each run by that plan on the layer's own
/// tensors. The constructor runs the whole layer once, so that each reads realistic data.
class Operations {
 public:
  /// `every_kernel`: beside each grouped GEMM one group for each kernel that can run it, by the
  /// kernel's name.
  Operations(const Settings& settings, const LayerPlan& plan, const LayerTensors& tensors,
             bool every_kernel);
  /// One group for each operation, in the layer's order.
  std::vector<Group>& groups() { return groups_; }

  /// From given scores and experts on, without the router's products: metadata to O, and dO to dX,
  /// the weight gradients and the scores' gradient. One task each; `backward` not for inference.
  Task forward() const;
  Task backward() const;
  /// From logits to metadata.
  Task routing() const;

 private:
  /// A plan with workspaces of its own, in which its last calls have left what operations read.
  struct Layer {
    LayerPlan plan;
    Buffer forward_workspace, backward_workspace;
    std::vector<std::string> forward, backward;  // names of operations, in order
  };
  struct Cost {
    double flops, bytes;
  };

  std::shared_ptr<const Layer> make_layer(const LayerPlan& plan) const;
  /// The operations of these names, in the layer's order: all of forward, or all of backward.
  Task task(const std::shared_ptr<const Layer>& layer, std::string name,
            const std::vector<std::string>& operations) const;
  void add_every_kernel(const std::string& operation);
  /// On CUDA `name` once more, timed right behind what comes before it in a layer.
  void add_in_layer(const std::string& name, const std::vector<std::string>& before);
  /// Flops, and inputs read once plus outputs written once.
  Cost cost(const std::string& operation) const;

  const Settings& settings_;
  const LayerTensors& tensors_;
  Sizes s_;
  std::int64_t rows_;  ///< in use, of s_.r
  std::shared_ptr<const Layer> layer_;
  std::vector<Group> groups_;
};

}  // namespace sonicmoe::cli
