#pragma once

#include "tensors.h"
#include "timing.h"

namespace sonicmoe::cli {

/// One group for each operation that the layer is made of, in the layer's order, on the layer's own
/// tensors. The constructor runs each once, so that every operation reads realistic data.
class Operations {
 public:
  Operations(const Settings& settings, const LayerTensors& layer);
  std::vector<Group>& groups() { return groups_; }

 private:
  template <class Desc>
  void add(std::string name, const Desc& desc, const typename Desc::Args& args, double flops,
           std::initializer_list<const Buffer*> moved);
  void add_routing();
  void add_forward();
  void add_backward();

  GroupedGemmDesc gemm_desc(GemmOp op) const;
  GroupedGemmArgs gemm_args() const;
  AggregateDesc aggregate_desc() const;

  const Settings& settings_;
  const LayerTensors& layer_;
  Sizes s_;
  Buffer scores_, ids_, offsets_, row_tokens_, row_slots_, slot_rows_, row_scores_;
  Buffer preact_, act_, expert_out_, dpreact_, scaled_act_, row_dscores_, dx_rows_, dlogits_;
  std::vector<Group> groups_;
};

}  // namespace sonicmoe::cli
