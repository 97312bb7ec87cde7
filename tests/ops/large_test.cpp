// Offsets into tensors are 64-bit: operands of more than 2^31 elements, of which only the last
// token and the last expert are used. The memory is reserved, not touched, so it costs little.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <span>

#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "testkit/device_memory.h"
#include "tests/device.h"

namespace sonicmoe::testkit {
namespace {

/// Zeros. On the CPU only what is written or read takes memory.
class Reserved {
 public:
  explicit Reserved(std::size_t bytes) : bytes_(bytes) {
    if (!kOnCpu) {
      data_ = allocate(kDevice, bytes);
      zero(kDevice, data_, bytes);
      return;
    }
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Reserved() {
    if (!kOnCpu) {
      release(kDevice, data_);
    } else if (ok()) {
      munmap(data_, bytes_);
    }
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }
  void put(std::size_t element, const Tensor& values, DType type) {
    put_bytes(element * size_of(type), encode(values, type));
  }
  void put_index(std::size_t element, std::int32_t value) {
    const std::span one(&value, 1);
    const auto bytes = std::as_bytes(one);
    put_bytes(element * sizeof(value), {bytes.begin(), bytes.end()});
  }
  Tensor get(std::size_t element, std::size_t count, DType type) const {
    std::vector<std::byte> bytes(count * size_of(type));
    copy(kDevice, bytes.data(), static_cast<std::byte*>(data_) + element * size_of(type),
         bytes.size());
    return decode(bytes, type);
  }

 private:
  void put_bytes(std::size_t offset, const std::vector<std::byte>& bytes) {
    copy(kDevice, static_cast<std::byte*>(data_) + offset, bytes.data(), bytes.size());
  }

  void* data_ = nullptr;
  std::size_t bytes_;
};

constexpr std::int64_t kHidden = 4096, kIntermediate = 16, kTokens = 700000, kExperts = 65536;
constexpr std::size_t kWeights = std::size_t{kExperts} * kIntermediate * kHidden;
constexpr std::size_t kInputs = std::size_t{kTokens} * kHidden;
static_assert(kInputs > (std::size_t{1} << 31) && kWeights > (std::size_t{1} << 31));

class Large : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (!weights_.ok() || !inputs_.ok()) GTEST_SKIP() << "cannot reserve 30 GB of address space";
    desc_.tokens = kTokens;
    desc_.rows = 1;
    desc_.hidden = kHidden;
    desc_.intermediate = kIntermediate;
    desc_.experts = kExperts;
    desc_.dtype = GetParam();
    desc_.activation = Activation::relu;
    offsets_.back() = 1;  // the last expert has the one row, of the last token
  }

  /// Runs `op` and returns its output.
  Tensor run(GemmOp op, GroupedGemmArgs args, void* GroupedGemmArgs::*output, std::size_t size) {
    desc_.op = op;
    Arena arena(kDevice);
    args.offsets = arena.input("offsets", offsets_);
    args.row_tokens = arena.input("row_tokens", {kTokens - 1});
    args.row_scores = static_cast<const float*>(arena.input("row_scores", {2}, DType::f32));
    args.row_dscores = arena.output_float("row_dscores", 1);
    for (void* GroupedGemmArgs::*spare :
         {&GroupedGemmArgs::act, &GroupedGemmArgs::dpreact, &GroupedGemmArgs::scaled_act}) {
      if (args.*spare == nullptr) args.*spare = arena.output("spare", kIntermediate, GetParam());
    }
    args.*output = arena.output("output", size, GetParam());
    Options options;
    options.threads = 2;
    const auto plan = make_plan(desc_, kDevice, options);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    const std::size_t bytes = plan.value().workspace_bytes();
    const Status status = plan.value().run(args, {arena.output("workspace", bytes, 256), bytes});
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(arena.damage(), "");
    return arena.tensor("output", GetParam());
  }

  GroupedGemmDesc desc_;
  std::vector<std::int32_t> offsets_ = std::vector<std::int32_t>(kExperts + 1, 0);
  Reserved weights_{kWeights * size_of(GetParam())};
  Reserved inputs_{kInputs * size_of(GetParam())};
  static constexpr std::size_t kLastExpert = kWeights - std::size_t{kIntermediate} * kHidden;
  static constexpr std::size_t kLastToken = kInputs - kHidden;
};

TEST_P(Large, Forward) {
  // x has a 3 in its last column, W1 a 5 in the last column of its last row: h = 15 there.
  inputs_.put(kInputs - 1, {3}, GetParam());
  weights_.put(kWeights - 1, {5}, GetParam());
  GroupedGemmArgs args;
  args.x = inputs_.data();
  args.w1 = args.w2 = weights_.data();
  Tensor expected(kIntermediate, 0.0);
  expected.back() = 15;
  EXPECT_EQ(run(GemmOp::up_proj, args, &GroupedGemmArgs::preact, kIntermediate), expected);
  // As W2 the same memory is (E, d, n), and its last element joins the last column of A to the last
  // of Y.
  Arena arena(kDevice);
  args.act = const_cast<void*>(arena.input("act", expected, GetParam()));
  expected.assign(kHidden, 0.0);
  expected.back() = 75;
  EXPECT_EQ(run(GemmOp::down_proj, args, &GroupedGemmArgs::expert_out, kHidden), expected);
}

TEST_P(Large, Backward) {
  inputs_.put(kInputs - 1, {3}, GetParam());
  weights_.put(kWeights - 1, {5}, GetParam());
  Arena arena(kDevice);
  GroupedGemmArgs args;
  args.dout = args.x = inputs_.data();
  args.w1 = args.w2 = weights_.data();
  const Tensor ones(kIntermediate, 1.0);
  args.preact = const_cast<void*>(arena.input("preact", ones, GetParam()));
  Tensor expected(kIntermediate, 0.0);
  expected.back() = 30;  // s dO W2 = 2 * 3 * 5
  EXPECT_EQ(run(GemmOp::down_proj_dgrad, args, &GroupedGemmArgs::dpreact, kIntermediate), expected);
  args.dpreact = const_cast<void*>(arena.input("dpreact", ones, GetParam()));
  expected.assign(kHidden, 0.0);
  expected.back() = 5;
  EXPECT_EQ(run(GemmOp::up_proj_dgrad, args, &GroupedGemmArgs::dx_rows, kHidden), expected);

  // Weight gradients write all experts, so here there is but one.
  desc_.experts = 1;
  offsets_ = {0, 1};
  args.scaled_act = args.dpreact;
  Tensor gradient(kHidden * kIntermediate, 0.0);
  std::fill(gradient.end() - kIntermediate, gradient.end(), 3.0);
  EXPECT_EQ(run(GemmOp::down_proj_wgrad, args, &GroupedGemmArgs::dw2, gradient.size()), gradient);
  gradient.assign(gradient.size(), 0.0);
  for (std::int64_t j = 1; j <= kIntermediate; ++j) gradient[j * kHidden - 1] = 3;
  EXPECT_EQ(run(GemmOp::up_proj_wgrad, args, &GroupedGemmArgs::dw1, gradient.size()), gradient);
}

TEST_P(Large, Aggregate) {
  inputs_.put(kInputs - 1, {3}, GetParam());
  AggregateDesc desc;
  desc.tokens = 1;
  desc.rows = kTokens;
  desc.hidden = kHidden;
  desc.dtype = GetParam();
  // A list of which only the last slot is no sentinel, and has the last row.
  Reserved slot_rows(kTokens * sizeof(std::int32_t)), token_slots(kTokens * sizeof(std::int32_t));
  slot_rows.put_index(kTokens - 1, kTokens - 1);
  token_slots.put_index(0, kTokens - 1);
  Arena arena(kDevice);
  AggregateArgs args;
  args.rows = inputs_.data();
  args.slot_rows = static_cast<const std::int32_t*>(slot_rows.data());
  args.token_slots = static_cast<const std::int32_t*>(token_slots.data());
  args.token_offsets = arena.input("token_offsets", {0, 1});
  args.out = arena.output("out", kHidden, GetParam());
  const auto plan = make_plan(desc, kDevice, kChecked);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const std::size_t bytes = plan.value().workspace_bytes();
  ASSERT_TRUE(plan.value().run(args, {arena.output("workspace", bytes, 256), bytes}).ok());
  Tensor expected(kHidden, 0.0);
  expected.back() = 3;
  EXPECT_EQ(arena.tensor("out", GetParam()), expected);
}

TEST_P(Large, AggregateOfTopKSlots) {
  if (kOnCpu) GTEST_SKIP() << "would write 11 GB";
  inputs_.put(kInputs - 1, {3}, GetParam());
  AggregateDesc desc;
  desc.tokens = desc.rows = kTokens;
  desc.hidden = kHidden;
  desc.top_k = 1;
  desc.dtype = GetParam();
  // The last token has the last row, all others the first.
  Reserved slot_rows(kTokens * sizeof(std::int32_t)), out(kInputs * size_of(GetParam()));
  slot_rows.put_index(kTokens - 1, kTokens - 1);
  AggregateArgs args;
  args.rows = inputs_.data();
  args.slot_rows = static_cast<const std::int32_t*>(slot_rows.data());
  args.out = out.data();
  const auto plan = make_plan(desc, kDevice, Options{});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  ASSERT_EQ(plan.value().workspace_bytes(), 0U);
  ASSERT_TRUE(plan.value().run(args, {}).ok());
  Tensor expected(2 * kHidden, 0.0);
  expected.back() = 3;
  EXPECT_EQ(out.get(kInputs - 2 * kHidden, 2 * kHidden, GetParam()), expected);
}

INSTANTIATE_TEST_SUITE_P(Types, Large, testing::ValuesIn(kTypes),
                         [](const auto& param_info) { return name(param_info.param); });

}  // namespace
}  // namespace sonicmoe::testkit
