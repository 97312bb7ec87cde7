#pragma once

#include "tensors.h"
#include "timing.h"

namespace sonicmoe::cli {

/// One group for each operation that the layer is made of, in the layer's order, on the layer's own
/// tensors, which forward has filled. The constructor runs each once, so that every operation reads
/// realistic data.
class Operations {
 public:
  /// `every_kernel`: beside each grouped GEMM one group for each kernel that can run it, by the
  /// kernel's name.
  Operations(const Settings& settings, const LayerTensors& layer, bool every_kernel);
  std::vector<Group>& groups() { return groups_; }

  /// From given scores and experts on, without the router: metadata to O, and dO to dX, the weight
  /// gradients and the scores' gradient. One task each; `backward` not for inference.
  Task forward() const;
  Task backward() const;
  /// From logits to metadata.
  Task routing() const;

 private:
  template <class Desc>
  Task task(std::string name, const OpPlan<Desc>& plan, const typename Desc::Args& args,
            double flops, std::initializer_list<const Buffer*> moved) const;
  Task sequence(std::string name, const std::vector<const char*>& operations) const;
  template <class Desc>
  void add(std::string name, const Desc& desc, const typename Desc::Args& args, double flops,
           std::initializer_list<const Buffer*> moved);
  void add_gemm(const char* name, GemmOp op, double flops,
                std::initializer_list<const Buffer*> moved);
  /// An operation by itself; std::logic_error if this layer has none of that name.
  const Task& named(const std::string& name) const;
  /// On CUDA `name` once more, timed right behind what comes before it in a layer.
  void add_in_layer(const std::string& name, std::initializer_list<const char*> before);
  void add_routing();
  void add_top_k();
  void add_rounding();
  void add_metadata();
  void add_forward();
  void add_backward();
  void add_score_grad();

  GroupedGemmDesc gemm_desc(GemmOp op) const;
  GroupedGemmArgs gemm_args() const;
  AggregateDesc aggregate_desc() const;
  AggregateArgs aggregate_args() const;
  bool rounded() const { return settings_.desc.rounding.tile > 0; }
  double moved_bytes(const Buffer& buffer) const;

  const Settings& settings_;
  const LayerTensors& layer_;
  bool every_kernel_;
  Sizes s_;
  std::int64_t rows_;  ///< in use, of s_.r
  Buffer scores_, ids_, offsets_, expert_order_, row_tokens_, row_slots_, slot_rows_, row_scores_;
  Buffer block_counts_;                                         // not for token rounding
  Buffer slot_tokens_, token_offsets_, token_slots_, dscores_;  // token rounding only
  Buffer preact_, act_, expert_out_, dpreact_, scaled_act_, row_dscores_, dx_rows_, dlogits_;
  Buffer tile_counters_;  // of up_proj, down_proj, up_proj_dgrad
  std::vector<Group> groups_;
  std::vector<Task> in_sequence_;  // what a sequence has instead of groups_' task of that name
};

}  // namespace sonicmoe::cli
