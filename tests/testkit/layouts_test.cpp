#include "testkit/layouts.h"

#include <gtest/gtest.h>

#include <numeric>

namespace sonicmoe::testkit {
namespace {

constexpr W1Layout kLayouts[] = {W1Layout::interleaved, W1Layout::concatenated, W1Layout::separate,
                                 W1Layout::transposed, W1Layout::transposed_interleaved};

/// n = 2, which the library refuses: small enough to write down.
LayerDesc tiny(W1Layout layout, Activation activation = Activation::swiglu) {
  LayerDesc desc;
  desc.router.experts = 2;
  desc.experts.hidden = 3;
  desc.experts.intermediate = 2;
  desc.experts.activation = activation;
  desc.experts.w1_layout = layout;
  return desc;
}

/// 0, 1, 2, ...
Tensor counted(std::int64_t size) {
  Tensor values(static_cast<std::size_t>(size));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

TEST(Layouts, WeightsLieAsTheirNamesSay) {
  const auto w1 = [](W1Layout layout) { return pack_w1(counted(24), tiny(layout), 3).first; };
  // Rows of expert 0: the gates {0 1 2}, {3 4 5}, the ups {6 7 8}, {9 10 11}.
  EXPECT_EQ(w1(W1Layout::concatenated), counted(24));
  EXPECT_EQ(w1(W1Layout::interleaved), (Tensor{0,  1,  2,  6,  7,  8,  3,  4,  5,  9,  10, 11,
                                               12, 13, 14, 18, 19, 20, 15, 16, 17, 21, 22, 23}));
  EXPECT_EQ(w1(W1Layout::separate), (Tensor{0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17}));
  EXPECT_EQ(pack_w1(counted(24), tiny(W1Layout::separate), 3).second,
            (Tensor{6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23}));
  EXPECT_EQ(w1(W1Layout::transposed), (Tensor{0,  3,  6,  9,  1,  4,  7,  10, 2,  5,  8,  11,
                                              12, 15, 18, 21, 13, 16, 19, 22, 14, 17, 20, 23}));
  EXPECT_EQ(w1(W1Layout::transposed_interleaved),
            (Tensor{0,  6,  3,  9,  1,  7,  4,  10, 2,  8,  5,  11,
                    12, 18, 15, 21, 13, 19, 16, 22, 14, 20, 17, 23}));
  const LayerDesc alternating = tiny(W1Layout::transposed_interleaved);
  EXPECT_EQ(pack_w1(counted(8), alternating, 1).first, (Tensor{0, 2, 1, 3, 4, 6, 5, 7}));  // b1
  EXPECT_EQ(pack_w2(counted(12), alternating), (Tensor{0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11}));
  EXPECT_EQ(pack_preact(counted(8), alternating), (Tensor{0, 2, 1, 3, 4, 6, 5, 7}));
  EXPECT_EQ(pack_preact(counted(8), tiny(W1Layout::transposed)), counted(8));
  const LayerDesc plain = tiny(W1Layout::transposed_interleaved, Activation::relu);
  EXPECT_EQ(pack_w1(counted(12), plain, 3).first, (Tensor{0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11}));
  EXPECT_EQ(pack_preact(counted(4), plain), counted(4));
}

TEST(Layouts, UnpackingUndoesPacking) {
  for (const Activation activation : {Activation::swiglu, Activation::relu}) {
    for (const W1Layout layout : kLayouts) {
      if (layout == W1Layout::separate && !is_glu(activation)) continue;
      SCOPED_TRACE(name(layout));
      const LayerDesc desc = tiny(layout, activation);
      const Tensor w1 = counted(2 * desc.experts.preact_width() * 3), w2 = counted(12);
      const auto [first, second] = pack_w1(w1, desc, 3);
      EXPECT_EQ(unpack_w1(first, second, desc, 3), w1);
      EXPECT_EQ(unpack_w2(pack_w2(w2, desc), desc), w2);
      const Tensor h = counted(5 * desc.experts.preact_width());
      EXPECT_EQ(unpack_preact(pack_preact(h, desc), desc), h);
      EXPECT_EQ(pack_w1({}, desc, 3), std::pair(Tensor{}, Tensor{}));
    }
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
