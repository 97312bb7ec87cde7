#pragma once

#include <memory>
#include <string>

#include "dense_bound.h"
#include "sonicmoe/layer.h"

namespace sonicmoe::cli {

/// Of CUDA: cuBLAS in the layer's own type with fp32 accumulation, two ways: strided-batched, and
/// the fastest of what cuBLASLt's heuristics propose. x and dO are 0.2 randn, weights 0.02 randn.
/// cuBLAS is loaded when it is asked for, so that the program starts on machines without it.
class CublasBound : public DenseBound {
 public:
  /// Null where there is no cuBLAS; then `why` says so.
  static std::unique_ptr<DenseBound> make(const LayerDesc& desc, std::int64_t rows, Device device,
                                          std::uint64_t seed, std::string* why);

 private:
  struct Data;
  explicit CublasBound(std::shared_ptr<Data> data, bool inference);
};

}  // namespace sonicmoe::cli
