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

/// The experts, whatever their number and their rows. Every descriptor of their products inherits
/// these fields, so that a new field reaches all of them.
struct ExpertsDesc {
  std::int64_t hidden = 0;        ///< d, multiples of 8 up to 2^20
  std::int64_t intermediate = 0;  ///< n, likewise
  DType dtype = DType::bf16;      ///< of every tensor but scores, ids and counts
  ActivationSpec activation = Activation::swiglu;
  W1Layout w1_layout = W1Layout::interleaved;
  bool bias = false;                     ///< b1 and b2 exist (both or none)
  bool inference = false;                ///< forward keeps nothing, backward is refused
  bool f32_weight_grads = false;         ///< dw1, dw1_up and dw2 are fp32, not dtype
  bool accumulate_weight_grads = false;  ///< backward adds to dw1, dw1_up and dw2
  /// False: backward writes dH to BackwardArgs::dpreact, which may be the memory of H.
  bool dpreact_in_workspace = true;
  /// `preact`: forward keeps no H, and backward makes it where dH will lie. It has the same bits.
  Recompute recompute = Recompute::none;

  RowSource row_source = RowSource::gathered;
  ScoreAt score_at = ScoreAt::combine;  ///< `combine` with gathered rows, else another value
  // Contiguous rows only.
  IndexType index_type = IndexType::i32;  ///< of counts and row_offsets
  bool zero_tail = false;  ///< rows that no expert owns get zeros; false: they stay untouched
  /// Rows that calls will likely have, where the capacity is a worst case. It guides the choice of
  /// tiles. 0: the capacity.
  std::int64_t expected_rows = 0;

  /// Width of H: 2n with a gate, else n.
  std::int64_t preact_width() const noexcept {
    return is_glu(activation) ? 2 * intermediate : intermediate;
  }
  /// Do the weights lie as W1 (E, d, W) and W2 (E, n, d)?
  bool transposed() const noexcept {
    return w1_layout == W1Layout::transposed || w1_layout == W1Layout::transposed_interleaved;
  }
  /// Do gates and ups alternate along the columns of H and dH, as they do along those of W1? Else
  /// H is [gate n | up n].
  bool alternates() const noexcept {
    return w1_layout == W1Layout::transposed_interleaved && is_glu(activation);
  }
  /// Does forward write H, for backward to read?
  bool keeps_preact() const noexcept {
    switch (recompute) {
      case Recompute::none:
        return !inference;
      case Recompute::preact:
        break;
    }
    return false;
  }
  bool gathers() const noexcept { return row_source == RowSource::gathered; }
  /// Do rows have scores, which get gradients?
  bool scored() const noexcept { return score_at != ScoreAt::none; }
  /// Does b2 get the row's score, too?
  bool scores_bias() const noexcept {
    switch (score_at) {
      case ScoreAt::combine:
      case ScoreAt::after_down:
        return true;
      case ScoreAt::none:
      case ScoreAt::before_down:
        break;
    }
    return false;
  }
  bool operator==(const ExpertsDesc&) const = default;
};

/// E experts and their R rows: of T tokens, or contiguous.
struct GroupedDesc : ExpertsDesc {
  std::int64_t tokens = 0;   ///< T; 0 with contiguous rows
  std::int64_t rows = 0;     ///< capacity R; calls use as many rows as the experts own
  std::int64_t experts = 0;  ///< E, 1 to 65536

  /// Rows that the choice of tiles reckons with.
  std::int64_t usual_rows() const noexcept { return expected_rows > 0 ? expected_rows : rows; }
  /// Rows of x, dO and dX.
  std::int64_t x_rows() const noexcept { return gathers() ? tokens : rows; }
  bool operator==(const GroupedDesc&) const = default;
};

/// Pointers as in ForwardArgs (layer.h); W is 2n with a gate, else n. Rows that no expert owns are
/// not read. They are written only with zero_tail, and then with zeros.
///
/// Gathered rows: no call checks the values of index arrays. `offsets` must ascend from 0 to at
/// most R, and `row_tokens` must lie in [0, T).
///
/// Contiguous rows: counts, row_offsets or both say which rows an expert owns.
///
///   counts alone       rows follow each other from row 0 on
///   row_offsets alone  expert e owns rows row_offsets[e] .. row_offsets[e+1]-1
///   both               expert e owns counts[e] rows from row_offsets[e] on; row_offsets[E] is
///                      ignored
///
/// Segments that overlap an earlier one, or reach past R, lose those rows. Where the device is not
/// checked that sets kBadCounts (ops.h); CPU calls and checked calls refuse it (invalid_data).
struct ExpertsForwardArgs {
  const std::int32_t* offsets = nullptr;  ///< (E+1): expert e has rows offsets[e] .. offsets[e+1]-1
  const std::int32_t* row_tokens = nullptr;  ///< (R): the token of each row, a row of x
  const void* counts = nullptr;              ///< (E) index_type, contiguous rows; or null
  const void* row_offsets = nullptr;         ///< (E+1) index_type, contiguous rows; or null
  const float* row_scores = nullptr;         ///< (R), contiguous rows with scores
  std::int32_t* error_word = nullptr;        ///< (1), optional, CUDA, contiguous rows
  std::int32_t* segments = nullptr;          ///< (3E), contiguous rows: written, for backward
  const void* x = nullptr;                   ///< (T, d), or the rows (R, d)
  const void* w1 = nullptr;     ///< (E, W, d); the gate (E, n, d) if separate; (E, d, W)
                                ///< if transposed
  const void* w1_up = nullptr;  ///< (E, n, d) if separate
  const void* b1 = nullptr;     ///< (E, W) in the order of w1; with bias
  const void* b1_up = nullptr;  ///< (E, n); with bias and `separate`
  const void* w2 = nullptr;     ///< (E, d, n); (E, n, d) if transposed
  const void* b2 = nullptr;     ///< (E, d); with bias

  void* preact = nullptr;      ///< (R, W), kept for backward; with keeps_preact()
  void* expert_out = nullptr;  ///< (R, d): Y, with the scores unless they enter in `combine`
};

/// The gradients from dO and the rows' scores. Inputs have the values that forward read and wrote.
/// Gradients are overwritten, but for accumulate_weight_grads, and shaped like their tensors.
struct ExpertsBackwardArgs {
  const std::int32_t* offsets = nullptr;       ///< (E+1)
  const std::int32_t* row_tokens = nullptr;    ///< (R)
  const float* row_scores = nullptr;           ///< (R): the weight of each row in O
  const std::int32_t* expert_order = nullptr;  ///< (E), optional; see GroupedGemmArgs
  /// (3E), contiguous rows: as forward wrote it, in place of offsets and expert_order
  const std::int32_t* segments = nullptr;
  const void* x = nullptr;     ///< (T, d), or the rows (R, d)
  const void* dout = nullptr;  ///< dO (T, d), or dY (R, d)
  const void* w1 = nullptr;
  const void* w1_up = nullptr;
  const void* b1 = nullptr;  ///< b1 and b1_up: with bias and Recompute::preact
  const void* b1_up = nullptr;
  const void* w2 = nullptr;
  const void* b2 = nullptr;
  const void* preact = nullptr;  ///< with keeps_preact()

  float* row_dscores = nullptr;  ///< (R): gradients of row_scores, if there are scores
  void* dx_rows = nullptr;       ///< dX~ (R, d), the rows of dX before they are summed; or null
  void* dw1 = nullptr;           ///< or null, together with dw1_up: not computed
  void* dw1_up = nullptr;
  void* db1 = nullptr;
  void* db1_up = nullptr;
  void* dw2 = nullptr;  ///< or null
  void* db2 = nullptr;
  void* dpreact = nullptr;  ///< dH (R, W), as BackwardArgs::dpreact
};

/// The experts alone, on rows that the caller has routed. Forward writes
/// Y = act(x[row_tokens] W1^T + b1) W2^T + b2, row by row, with the scores where score_at says.
/// Backward writes the gradients; an expert without rows gets zeros. With contiguous rows nothing
/// is gathered, sorted or summed. Otherwise like LayerPlan.
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
