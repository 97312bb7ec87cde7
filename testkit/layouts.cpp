#include "testkit/layouts.h"

#include <cstdint>

namespace sonicmoe::testkit {
namespace {

/// Blocks (rows, columns, length), each as (columns, rows, length).
Tensor transposed(const Tensor& blocks, std::int64_t rows, std::int64_t columns,
                  std::int64_t length = 1) {
  Tensor out;
  out.reserve(blocks.size());
  for (auto block = blocks.begin(); block < blocks.end(); block += rows * columns * length) {
    for (std::int64_t j = 0; j < columns; ++j) {
      for (std::int64_t i = 0; i < rows; ++i) {
        const auto from = block + (i * columns + j) * length;
        out.insert(out.end(), from, from + length);
      }
    }
  }
  return out;
}

/// Do gate and up rows alternate in W1?
bool alternate(const ExpertsDesc& x) {
  return is_glu(x.activation) && (x.w1_layout == W1Layout::interleaved || x.alternates());
}

}  // namespace

std::pair<Tensor, Tensor> pack_w1(const Tensor& canonical, const LayerDesc& desc,
                                  std::int64_t row_length) {
  const ExpertsDesc& x = desc.experts;
  const std::int64_t n = x.intermediate;
  if (x.w1_layout == W1Layout::separate) {
    const Tensor both = transposed(canonical, desc.router.experts, 2, n * row_length);
    const auto middle = both.begin() + static_cast<std::ptrdiff_t>(both.size() / 2);
    return {Tensor(both.begin(), middle), Tensor(middle, both.end())};
  }
  Tensor out = alternate(x) ? transposed(canonical, 2, n, row_length) : canonical;
  if (x.transposed()) out = transposed(out, x.preact_width(), row_length);
  return {std::move(out), {}};
}

Tensor unpack_w1(const Tensor& first, const Tensor& second, const LayerDesc& desc,
                 std::int64_t row_length) {
  const ExpertsDesc& x = desc.experts;
  const std::int64_t n = x.intermediate;
  Tensor out = first;
  if (x.w1_layout == W1Layout::separate) {
    out.insert(out.end(), second.begin(), second.end());
    return transposed(out, 2, desc.router.experts, n * row_length);
  }
  if (x.transposed()) out = transposed(out, row_length, x.preact_width());
  return alternate(x) ? transposed(out, n, 2, row_length) : out;
}

Tensor pack_w2(const Tensor& canonical, const LayerDesc& desc) {
  const ExpertsDesc& x = desc.experts;
  return x.transposed() ? transposed(canonical, x.hidden, x.intermediate) : canonical;
}

Tensor unpack_w2(const Tensor& packed, const LayerDesc& desc) {
  const ExpertsDesc& x = desc.experts;
  return x.transposed() ? transposed(packed, x.intermediate, x.hidden) : packed;
}

Tensor pack_preact(const Tensor& canonical, const LayerDesc& desc) {
  const ExpertsDesc& x = desc.experts;
  return x.alternates() ? transposed(canonical, 2, x.intermediate) : canonical;
}

Tensor unpack_preact(const Tensor& packed, const LayerDesc& desc) {
  const ExpertsDesc& x = desc.experts;
  return x.alternates() ? transposed(packed, x.intermediate, 2) : packed;
}

}  // namespace sonicmoe::testkit
