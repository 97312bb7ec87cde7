#pragma once

#include <utility>

#include "sonicmoe/layer.h"
#include "testkit/numbers.h"

/// Between the tensors of the oracle and those that the library reads and writes, which lie as
/// W1Layout says. Empty tensors stay empty.
namespace sonicmoe::testkit {

/// W1 (row_length = d) or b1 (row_length = 1) from rows [gate n | up n] to a layout. `second` is
/// the up tensor of W1Layout::separate, else empty. unpack_w1 is the inverse.
std::pair<Tensor, Tensor> pack_w1(const Tensor& canonical, const LayerDesc& desc,
                                  std::int64_t row_length);
Tensor unpack_w1(const Tensor& first, const Tensor& second, const LayerDesc& desc,
                 std::int64_t row_length);

/// W2 from (E, d, n), and back.
Tensor pack_w2(const Tensor& canonical, const LayerDesc& desc);
Tensor unpack_w2(const Tensor& packed, const LayerDesc& desc);

/// Rows of H or dH from [gate n | up n], and back.
Tensor pack_preact(const Tensor& canonical, const LayerDesc& desc);
Tensor unpack_preact(const Tensor& packed, const LayerDesc& desc);

}  // namespace sonicmoe::testkit
