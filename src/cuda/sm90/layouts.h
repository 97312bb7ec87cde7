#pragma once

#include <type_traits>

#include "cuda/sm90/tensor_map.h"
#include "sonicmoe/ops.h"

/// How W1, H and their gradients lie in memory, as matrices of gates and of ups.
namespace sonicmoe::cuda {

/// W1 or dW1: gate and up as two matrices (E, n, d) with strides, which is all that a layout is.
struct W1View {
  std::int64_t up;  ///< offset of the up matrix from the gate; `separate`: 0, another base
  std::int64_t row_stride, expert_stride;
};

inline W1View w1_view(const GroupedGemmDesc& d, std::int64_t width) {
  const std::int64_t n = d.intermediate;
  if (!is_glu(d.activation)) return {0, width, n * width};
  switch (d.w1_layout) {
    case W1Layout::interleaved:
      return {width, 2 * width, 2 * n * width};
    case W1Layout::concatenated:
      return {n * width, width, 2 * n * width};
    case W1Layout::separate:
      break;
  }
  return {0, width, n * width};
}

/// Base of the up part: the second tensor, or inside the first, whose elements have `size` bytes.
template <class T>
T* up_base(const GroupedGemmDesc& d, const W1View& view, T* first, T* second, int size = 2) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  if (d.w1_layout == W1Layout::separate) return second;
  return static_cast<Byte*>(first) + view.up * size;
}

/// Maps of H or dH as (1, R, n) in boxes of 64 x `box`: gate and up, or twice the one there is.
inline void encode_preact(TensorMaps* maps, const GroupedGemmDesc& d, const void* preact, int box,
                          CUtensorMap (&parts)[2]) {
  const std::int64_t n = d.intermediate;
  const bool gated = is_glu(d.activation);
  for (int part = 0; part < 2; ++part) {
    const std::int64_t column = gated ? part * n : 0;
    parts[part] = maps->encode({.base = static_cast<const char*>(preact) + column * 2,
                                .inner = n,
                                .outer = d.rows,
                                .outer_stride = gated ? 2 * n : n,
                                .box = box});
  }
}

}  // namespace sonicmoe::cuda
