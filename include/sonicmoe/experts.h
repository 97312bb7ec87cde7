#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sonicmoe/status.h"
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

/// The experts and the rows that they get.
struct GroupedDesc : ExpertsDesc {
  std::int64_t tokens = 0;   ///< T
  std::int64_t rows = 0;     ///< capacity R
  std::int64_t experts = 0;  ///< E
  bool operator==(const GroupedDesc&) const = default;
};

/// Pointers as in ForwardArgs (layer.h). Rows past offsets[E] are neither read nor written.
struct ExpertsForwardArgs {
  const std::int32_t* offsets = nullptr;     ///< (E+1): expert e has rows offsets[e] ..
  const std::int32_t* row_tokens = nullptr;  ///< (R): which row of x
  const void* x = nullptr;                   ///< (T, d)
  const void* w1 = nullptr;                  ///< (E, W, d); the gate (E, n, d) if separate
  const void* w1_up = nullptr;               ///< (E, n, d) if separate
  const void* b1 = nullptr;                  ///< laid out like w1; with bias
  const void* b1_up = nullptr;
  const void* w2 = nullptr;  ///< (E, d, n)
  const void* b2 = nullptr;  ///< (E, d); with bias

  void* preact = nullptr;      ///< (R, W), kept for backward; unused for inference
  void* expert_out = nullptr;  ///< (R, d): Y, without the scores
};

struct ExpertsBackwardArgs {
  const std::int32_t* offsets = nullptr;       ///< (E+1)
  const std::int32_t* row_tokens = nullptr;    ///< (R)
  const float* row_scores = nullptr;           ///< (R): the weight of each row in dO's sum
  const std::int32_t* expert_order = nullptr;  ///< (E), optional; see GroupedGemmArgs
  const void* x = nullptr;                     ///< (T, d)
  const void* dout = nullptr;                  ///< (T, d)
  const void* w1 = nullptr;
  const void* w1_up = nullptr;
  const void* w2 = nullptr;
  const void* b2 = nullptr;
  const void* preact = nullptr;

  float* row_dscores = nullptr;  ///< (R)
  void* dx_rows = nullptr;       ///< (R, d): null: not wanted
  void* dw1 = nullptr;           ///< null: not wanted ...
  void* dw1_up = nullptr;        ///< ... together with this one
  void* db1 = nullptr;
  void* db1_up = nullptr;
  void* dw2 = nullptr;  ///< null: not wanted
  void* db2 = nullptr;
  void* dpreact = nullptr;  ///< as BackwardArgs::dpreact
};

/// The experts alone, on rows that somebody else has routed: Y = act(x[row_tokens] W1^T) W2^T row
/// by row, and its gradients from dO and the rows' scores. Otherwise like LayerPlan.
class SONICMOE_API ExpertsPlan {
 public:
  const GroupedDesc& desc() const noexcept;
  std::size_t forward_workspace_bytes() const noexcept;
  std::size_t backward_workspace_bytes() const noexcept;
  std::string explain() const;
  std::vector<const char*> forward_operations() const;
  std::vector<const char*> backward_operations() const;

  Status forward(const ExpertsForwardArgs& args, Workspace workspace, Stream stream = {},
                 OperationMask operations = kAllOperations) const noexcept;
  Status backward(const ExpertsBackwardArgs& args, Workspace workspace, Stream stream = {},
                  OperationMask operations = kAllOperations) const noexcept;

  struct Impl;
  explicit ExpertsPlan(std::shared_ptr<const Impl> impl) noexcept : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

SONICMOE_API Result<ExpertsPlan> make_plan(const GroupedDesc& desc, Device device = {},
                                           const Options& options = {});

}  // namespace sonicmoe
