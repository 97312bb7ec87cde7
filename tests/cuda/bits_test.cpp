// Routing has the same bits on CUDA as on the CPU, given the same logits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "sonicmoe/ops.h"
#include "tests/device.h"
#include "tests/token_rounding_cases.h"
#include "verify/buffer.h"
#include "verify/inputs.h"
#include "verify/rounding.h"

namespace sonicmoe::verify {
namespace {

constexpr Device kCpu{};
constexpr Device kCuda{DeviceType::cuda, 0};

/// What `fill` names as outputs after the operation ran on a device.
template <class Desc, class Fill>
std::vector<std::vector<std::byte>> run(const Desc& desc, Device device, Fill fill) {
  const auto plan = make_plan(desc, device, kChecked);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  if (!plan.ok()) return {};
  Arena arena(device), scratch(device);
  typename Desc::Args args;
  const std::vector<std::string> outputs = fill(&arena, &args);
  const std::size_t bytes = plan.value().workspace_bytes();
  const Status status = plan.value().run(args, {scratch.output("workspace", bytes, 256), bytes});
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(arena.damage() + scratch.damage(), "");
  std::vector<std::vector<std::byte>> all;
  for (const std::string& name : outputs) {
    const auto contents = arena[name].bytes();
    all.emplace_back(contents.begin(), contents.end());
  }
  return all;
}

TEST(Bits, TopK) {
  std::uint64_t number = 0;
  for (const std::int64_t E : {1, 5, 8, 32, 33, 60, 64, 128, 160, 256, 384, 512, 1000, 1024}) {
    for (const std::int64_t K : {1, 2, 6, 8, 10, 16, 64}) {
      if (K > E) continue;
      for (const RouterMode mode : {RouterMode::softmax_over_topk, RouterMode::topk_over_softmax}) {
        for (const bool norm : {false, true}) {
          TopKDesc desc;
          desc.tokens = 67;
          desc.experts = E;
          desc.top_k = K;
          desc.dtype = DType::bf16;
          desc.mode = mode;
          desc.norm_topk_probs = norm;
          const Random random(++number, 3);
          Tensor logits(desc.tokens * E);
          // Every third case ties a lot.
          const double coarse = number % 3 == 0 ? 2 : 256;
          for (std::size_t i = 0; i < logits.size(); ++i) {
            logits[i] = std::nearbyint(2 * random.normal(i) * coarse) / coarse;
          }
          const auto fill = [&](Arena* arena, TopKArgs* args) -> std::vector<std::string> {
            args->logits = arena->input("logits", logits, desc.dtype);
            args->scores = arena->output_float("scores", desc.tokens * K);
            args->ids = arena->output_int32("ids", desc.tokens * K);
            return {"scores", "ids"};
          };
          EXPECT_EQ(run(desc, kCpu, fill), run(desc, kCuda, fill))
              << "E " << E << ", K " << K << ", " << name(mode) << (norm ? ", norm" : "");
        }
      }
    }
  }
}

TEST(Bits, Metadata) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const Random random(seed, 9);
    MetadataDesc desc;
    desc.tokens = 1 + random.below(0, seed % 3 == 0 ? 5000 : 200);
    desc.experts = 1 + random.below(1, seed % 4 == 0 ? 700 : 20);
    const bool lists = seed % 2 == 0;
    if (lists) {
      desc.list_length = random.below(2, 4 * desc.tokens);
    } else {
      desc.top_k = 1 + random.below(2, std::min<std::int64_t>(desc.experts, 8));
    }
    std::vector<std::int32_t> tokens, experts;
    Tensor scores;
    for (std::int64_t s = 0; s < desc.slots(); ++s) {
      tokens.push_back(static_cast<std::int32_t>(random.below(3 * s + 3, desc.tokens)));
      experts.push_back(static_cast<std::int32_t>(random.below(3 * s + 4, desc.experts + 1)));
      scores.push_back(round_to(random.uniform(3 * s + 5), DType::f32));
    }
    const auto fill = [&](Arena* arena, MetadataArgs* args) {
      std::vector<std::string> outputs;
      const auto ints = [&](const char* name, std::int64_t count) {
        outputs.emplace_back(name);
        return arena->output_int32(name, count);
      };
      args->slot_experts = arena->input("slot_experts", experts);
      args->slot_scores =
          static_cast<const float*>(arena->input("slot_scores", scores, DType::f32));
      args->counts = ints("counts", desc.experts);
      args->offsets = ints("offsets", desc.experts + 1);
      args->row_tokens = ints("row_tokens", desc.slots());
      args->row_slots = ints("row_slots", desc.slots());
      args->slot_rows = ints("slot_rows", desc.slots());
      args->row_scores = arena->output_float("row_scores", desc.slots());
      outputs.emplace_back("row_scores");
      if (lists) {
        args->slot_tokens = arena->input("slot_tokens", tokens);
        args->token_offsets = ints("token_offsets", desc.tokens + 1);
        // Entries past the slots in use are not written by either.
        args->token_slots = ints("token_slots", desc.slots());
      }
      return outputs;
    };
    ASSERT_EQ(run(desc, kCpu, fill), run(desc, kCuda, fill)) << "seed " << seed;
  }
}

TEST(Bits, TokenRounding) {
  int compared = 0;
  for (std::uint64_t number = 0; number < 2000; ++number) {
    const RoundingCase c = random_rounding_case(number);
    const auto cpu = RoundingRunner(c.desc, c.logits, kCpu).round(c.seed, c.offset);
    const auto cuda = RoundingRunner(c.desc, c.logits, kCuda).round(c.seed, c.offset);
    ASSERT_TRUE(cpu.ok()) << cpu.status().message();
    ASSERT_TRUE(cuda.ok()) << c.text() << ": " << cuda.status().message();
    ASSERT_EQ(first_difference(cpu.value(), cuda.value()), "") << number << ": " << c.text();
    ++compared;
  }
  EXPECT_EQ(compared, 2000);
}

}  // namespace
}  // namespace sonicmoe::verify
