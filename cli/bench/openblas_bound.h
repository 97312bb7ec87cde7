#pragma once

#include <memory>

#include "dense_bound.h"
#include "sonicmoe/layer.h"

namespace sonicmoe::cli {

/// Of the CPU: fp32 OpenBLAS, two ways: experts in parallel with one thread each, and one expert
/// after the other with all threads.
class OpenblasBound : public DenseBound {
 public:
  /// `rows` of all experts together: fewer than the layer's capacity if its tokens were rounded.
  OpenblasBound(const LayerDesc& desc, std::int64_t rows, int threads, std::uint64_t seed);

 private:
  struct Data;
  std::shared_ptr<const Data> data_;
};

}  // namespace sonicmoe::cli
