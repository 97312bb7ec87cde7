#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe {

/// What the experts are, however many there are and whatever rows they get. Every descriptor of
/// their products has these fields, so that what is added here reaches all of them.
struct ExpertsDesc {
  std::int64_t hidden = 0;        ///< d, a multiple of 8, at least 8
  std::int64_t intermediate = 0;  ///< n, a multiple of 8, at least 8
  DType dtype = DType::bf16;      ///< of every tensor but scores, ids and counts
  ActivationSpec activation = Activation::swiglu;
  W1Layout w1_layout = W1Layout::interleaved;
  bool bias = false;                     ///< b1 and b2 exist (both or none)
  bool inference = false;                ///< keep nothing for backward
  bool f32_weight_grads = false;         ///< dw1, dw1_up and dw2 are fp32, not dtype
  bool accumulate_weight_grads = false;  ///< backward adds to dw1, dw1_up and dw2
  /// False: backward's arguments bring the memory for dH, which may be that of H.
  bool dpreact_in_workspace = true;

  /// Width of H: 2n with a gate, else n.
  std::int64_t preact_width() const noexcept {
    return is_glu(activation) ? 2 * intermediate : intermediate;
  }
  bool operator==(const ExpertsDesc&) const = default;
};

}  // namespace sonicmoe
