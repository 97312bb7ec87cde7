#pragma once

#include <type_traits>

#include "cuda/layouts.h"
#include "cuda/sm90/tensor_map.h"
#include "sonicmoe/ops.h"

/// How W1, H and their gradients lie in memory, as matrices of gates and of ups.
namespace sonicmoe::cuda {

/// How W1 lies, as far as kernels of its products with an activation differ.
enum class W1Form {
  rows,         ///< (E, W, d): gates and ups are rows
  columns,      ///< (E, d, W): gate columns, then up columns; or the columns there are
  alternating,  ///< (E, d, 2n): each gate column beside its up column
};

/// Calls f(constant) with the W1Form of a descriptor, whose weights are transposed or not.
template <bool kTransposed, class F>
auto visit_form(const GroupedGemmDesc& d, F&& f) {
  if constexpr (!kTransposed) {
    return f(std::integral_constant<W1Form, W1Form::rows>{});
  } else {
    if (d.alternates()) return f(std::integral_constant<W1Form, W1Form::alternating>{});
    return f(std::integral_constant<W1Form, W1Form::columns>{});
  }
}
/// Calls f(constant) with whether the weights are transposed.
template <class F>
auto visit_transposed(const GroupedGemmDesc& d, F&& f) {
  if (d.transposed()) return f(std::true_type{});
  return f(std::false_type{});
}

/// Maps of the gate and the up matrix of W1 that is not transposed, in boxes of 64 x `box`. Without
/// a gate both are of the one matrix there is.
inline void encode_w1_rows(TensorMaps* maps, const GroupedGemmDesc& d, const void* w1,
                           const void* w1_up, int box, CUtensorMap (&parts)[2]) {
  const W1View view = w1_view(d, d.hidden);
  const void* const bases[2] = {w1, is_glu(d.activation) ? up_base(d, view, w1, w1_up) : w1};
  for (int part = 0; part < 2; ++part) {
    parts[part] = maps->encode({.base = bases[part],
                                .inner = d.hidden,
                                .outer = d.intermediate,
                                .experts = d.experts,
                                .outer_stride = view.row_stride,
                                .expert_stride = view.expert_stride,
                                .box = box});
  }
}

/// Maps of a matrix (experts, outer, W) by parts of its columns, in boxes of 64 x `box`. Without a
/// second part both are of the first.
inline void encode_parts(TensorMaps* maps, const GroupedGemmDesc& d, const void* base,
                         std::int64_t outer, std::int64_t experts, int box,
                         CUtensorMap (&of_parts)[2]) {
  const Parts parts = parts_of(d);
  for (int part = 0; part < 2; ++part) {
    const std::int64_t column = part < parts.count ? part * parts.width : 0;
    of_parts[part] = maps->encode({.base = static_cast<const char*>(base) + column * 2,
                                   .inner = parts.width,
                                   .outer = outer,
                                   .experts = experts,
                                   .outer_stride = d.preact_width(),
                                   .expert_stride = outer * d.preact_width(),
                                   .box = box});
  }
}
/// Of H or dH (1, R, W).
inline void encode_preact(TensorMaps* maps, const GroupedGemmDesc& d, const void* preact, int box,
                          CUtensorMap (&parts)[2]) {
  encode_parts(maps, d, preact, d.rows, 1, box, parts);
}
/// Of transposed W1 or dW1 (E, d, W).
inline void encode_w1_columns(TensorMaps* maps, const GroupedGemmDesc& d, const void* w1, int box,
                              CUtensorMap (&parts)[2]) {
  encode_parts(maps, d, w1, d.hidden, d.experts, box, parts);
}

/// W2 or dW2: (E, d, n), or (E, n, d) if transposed; in boxes of 64 x `box`.
inline TensorView w2_view(const GroupedGemmDesc& d, const void* w2, int box) {
  const bool transposed = d.transposed();
  const std::int64_t inner = transposed ? d.hidden : d.intermediate;
  return {.base = w2,
          .inner = inner,
          .outer = transposed ? d.intermediate : d.hidden,
          .experts = d.experts,
          .outer_stride = inner,
          .expert_stride = d.hidden * d.intermediate,
          .box = box};
}

}  // namespace sonicmoe::cuda
