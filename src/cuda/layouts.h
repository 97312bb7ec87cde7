#pragma once

#include <cstdint>
#include <type_traits>

#include "sonicmoe/ops.h"

/// How W1, H and their gradients lie in memory, as far as pointers and strides say it.
namespace sonicmoe::cuda {

/// The columns of H, and of transposed W1, in parts that products take one after the other: gates
/// and ups, or all columns where they alternate or there are no gates.
struct Parts {
  int count;
  std::int64_t width;
};
inline Parts parts_of(const GroupedGemmDesc& d) {
  const int count = is_glu(d.activation) && !d.alternates() ? 2 : 1;
  return {count, d.preact_width() / count};
}

/// W1 or dW1 that is not transposed: gate and up as two matrices (E, n, d) with strides, which is
/// all that a layout is. With width 1: b1, of every layout.
struct W1View {
  std::int64_t up;  ///< offset of the up matrix from the gate; `separate`: 0, another base
  std::int64_t row_stride, expert_stride;
};

inline W1View w1_view(const GroupedGemmDesc& d, std::int64_t width) {
  const std::int64_t n = d.intermediate;
  if (!is_glu(d.activation)) return {0, width, n * width};
  switch (d.w1_layout) {
    case W1Layout::interleaved:
    case W1Layout::transposed_interleaved:
      return {width, 2 * width, 2 * n * width};
    case W1Layout::concatenated:
    case W1Layout::transposed:
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

}  // namespace sonicmoe::cuda
