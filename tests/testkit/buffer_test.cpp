#include "testkit/buffer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace sonicmoe::testkit {
namespace {

TEST(GuardedBuffer, IsAlignedToExactlyWhatWasAskedFor) {
  for (const std::size_t alignment : {4, 16, 256}) {
    for (const std::size_t bytes : {1, 2, 4, 30, 1000}) {
      const GuardedBuffer buffer(bytes, alignment);
      const auto address = reinterpret_cast<std::uintptr_t>(buffer.data());
      EXPECT_EQ(address % alignment, 0u);
      EXPECT_EQ(address % (2 * alignment), alignment);
    }
  }
  EXPECT_EQ(GuardedBuffer(0).data(), nullptr);
}

TEST(GuardedBuffer, PoisonIsNanAndNoIndex) {
  const GuardedBuffer buffer(8);
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const double value : decode(buffer.bytes(), type)) EXPECT_TRUE(std::isnan(value));
  }
  std::int32_t index;
  std::memcpy(&index, buffer.data(), sizeof index);
  EXPECT_GT(index, 1 << 30);
}

TEST(GuardedBuffer, NoticesWrites) {
  const GuardedBuffer buffer(6);
  EXPECT_TRUE(buffer.intact());
  EXPECT_TRUE(buffer.untouched());
  buffer.bytes()[5] = std::byte{0};
  EXPECT_TRUE(buffer.intact());
  EXPECT_FALSE(buffer.untouched());
}

#if !defined(__SANITIZE_ADDRESS__)  // there the write itself is fatal
TEST(GuardedBuffer, NoticesWritesOutside) {
  for (const std::ptrdiff_t offset : {-256, -1, 6, 261}) {
    const GuardedBuffer buffer(6);
    static_cast<volatile char*>(buffer.data())[offset] = 0;
    EXPECT_FALSE(buffer.intact()) << offset;
  }
}
#endif

TEST(Arena, NamesTheInputThatChanged) {
  Arena arena;
  const void* x = arena.input("x", {1, 2}, DType::bf16);
  const std::int32_t* ids = arena.input("ids", {3, 4});
  arena.output("y", 2, DType::f32);
  EXPECT_EQ(arena.damage(), "");
  EXPECT_EQ(arena.tensor("x", DType::bf16), (Tensor{1, 2}));
  EXPECT_EQ(arena.int32("ids"), (std::vector<std::int32_t>{3, 4}));
  const_cast<std::int32_t*>(ids)[1] = 5;
  EXPECT_EQ(arena.damage(), "changed the input ids");
  EXPECT_NE(x, nullptr);
  EXPECT_TRUE(arena.outputs_untouched());
  arena["y"].bytes()[0] = std::byte{1};
  EXPECT_FALSE(arena.outputs_untouched());
}

}  // namespace
}  // namespace sonicmoe::testkit
