// Routing has the same bits on CUDA as on the CPU, given the same logits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "testkit/inputs.h"
#include "testkit/rounding.h"
#include "tests/device.h"
#include "tests/token_rounding_cases.h"

namespace sonicmoe::testkit {
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

/// Scores and ids. The CPU has no fp16 and gets the same numbers in fp32.
void expect_same_top_k(const TopKDesc& desc, Tensor logits,
                       const std::vector<std::int32_t>& given = {}) {
  for (double& x : logits) x = round_to(x, desc.dtype);
  const auto outputs = [&](Device device) {
    TopKDesc own = desc;
    if (device.type == DeviceType::cpu && own.dtype == DType::f16) own.dtype = DType::f32;
    return run(own, device, [&](Arena* arena, TopKArgs* args) -> std::vector<std::string> {
      args->logits = arena->input("logits", logits, own.dtype);
      if (own.takes_ids()) args->given_ids = arena->input("given_ids", given);
      args->scores = arena->output_float("scores", own.tokens * own.top_k);
      args->ids = arena->output_int32("ids", own.tokens * own.top_k);
      return {"scores", "ids"};
    });
  };
  EXPECT_EQ(outputs(kCpu), outputs(kCuda))
      << "E " << desc.experts << ", K " << desc.top_k << ", " << name(desc.dtype) << ", "
      << name(desc.order) << (desc.renormalize ? ", norm" : "");
}

/// The same of a router that is not plain(), and the scores before scales. Selection biases are
/// multiples of bias_unit, up to four.
void expect_same_scored(const TopKDesc& desc, Tensor logits,
                        const std::vector<std::int32_t>& given = {}, double bias_unit = 0.125) {
  for (double& x : logits) x = round_to(x, desc.dtype);
  Tensor bias, scale;
  for (std::int64_t e = 0; e < desc.experts; ++e) {
    bias.push_back(bias_unit * static_cast<double>(Random(7, 5).below(e, 5)));
    scale.push_back(0.5 + Random(7, 6).uniform(e));
  }
  const auto outputs = [&](Device device) {
    TopKDesc own = desc;
    if (device.type == DeviceType::cpu && own.dtype == DType::f16) own.dtype = DType::f32;
    return run(own, device, [&](Arena* arena, TopKArgs* args) -> std::vector<std::string> {
      const auto floats = [&](const char* name, const Tensor& values) {
        return static_cast<const float*>(arena->input(name, values, DType::f32));
      };
      args->logits = arena->input("logits", logits, own.dtype);
      if (own.takes_ids()) args->given_ids = arena->input("given_ids", given);
      if (own.selection_bias) args->selection_bias = floats("selection_bias", bias);
      if (own.expert_scale) args->expert_scale = floats("expert_scale", scale);
      args->scores = arena->output_float("scores", own.tokens * own.top_k);
      args->probabilities = arena->output_float("probabilities", own.tokens * own.top_k);
      args->ids = arena->output_int32("ids", own.tokens * own.top_k);
      return {"scores", "probabilities", "ids"};
    });
  };
  EXPECT_EQ(outputs(kCpu), outputs(kCuda))
      << "E " << desc.experts << ", K " << desc.top_k << ", " << name(desc.dtype) << ", "
      << name(desc.score) << ", " << name(desc.order) << ", groups " << desc.groups;
}

/// Every third case ties a lot.
Tensor random_logits(const TopKDesc& desc, std::uint64_t number) {
  const Random random(number, 3);
  Tensor logits(desc.tokens * desc.experts);
  const double coarse = number % 3 == 0 ? 2 : 256;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] = std::nearbyint(2 * random.normal(i) * coarse) / coarse;
  }
  return logits;
}

// 67 tokens leave part of a warp and of a thread block without one, however many share it.
TopKDesc top_k_of_67_tokens(std::int64_t experts, std::int64_t k, DType dtype, RouterOrder order,
                            bool norm = false) {
  TopKDesc desc;
  desc.tokens = 67;
  desc.experts = experts;
  desc.top_k = k;
  desc.dtype = dtype;
  desc.order = order;
  desc.renormalize = norm;
  return desc;
}

/// Ids that repeat, and sentinels.
std::vector<std::int32_t> given_ids(const TopKDesc& desc) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < desc.tokens * desc.top_k; ++i) {
    const auto id = static_cast<std::int32_t>(Random(5, 4).below(i, desc.experts + 1));
    ids.push_back(i % 11 == 3 ? -1 : i % 5 == 4 ? ids.back() : id);
  }
  return ids;
}

constexpr RouterOrder kModes[] = {RouterOrder::select_then_score, RouterOrder::score_then_select};

// Scores of ids of the caller.
TEST(Bits, TopKOfGivenIds) {
  std::uint64_t number = 9000;
  for (const std::int64_t E : {5, 128, 512, 1025}) {
    for (const std::int64_t K : {1, 5, 40}) {
      if (K > E) continue;
      for (const RouterOrder order : kModes) {
        for (const bool norm : {false, true}) {
          for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
            TopKDesc desc = top_k_of_67_tokens(E, K, type, order, norm);
            desc.input = RouterInput::logits_and_ids;
            expect_same_top_k(desc, random_logits(desc, ++number), given_ids(desc));
          }
        }
      }
    }
  }
}

// Every score, order and type; rows of a warp and of a block; groups where they fit; -inf.
TEST(Bits, TopKOfScoredRouters) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  std::uint64_t number = 20000;
  for (const RouterScore score :
       {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus}) {
    for (const RouterOrder order : kModes) {
      for (const std::int64_t E : {8, 60, 128, 256, 512, 1024, 1040}) {
        for (const std::int64_t K : {1, 5, 8, 40, 70}) {
          for (const std::int64_t groups : {1, 2, 4, 8}) {
            if (K > E / groups * ((groups + 1) / 2) || E % groups != 0) continue;
            constexpr DType kTypes[] = {DType::bf16, DType::f16, DType::f32};
            TopKDesc desc = top_k_of_67_tokens(E, K, kTypes[number % 3], order, number % 2 == 0);
            desc.score = score;
            desc.scale = 2.5f;
            if (desc.divides()) desc.eps = 0x1p-10f;
            desc.selection_bias = number % 5 < 3;
            desc.expert_scale = number % 7 < 3;
            desc.groups = groups;
            desc.kept_groups = (groups + 1) / 2;
            if (groups > 1 && E / groups >= 2 && number % 4 < 2) {
              desc.group_score = GroupScore::sum_of_two;
            }
            Tensor logits = random_logits(desc, ++number);
            for (std::size_t i = 0; i < logits.size(); ++i) {
              if (Random(number, 12).below(i, 8) == 0) logits[i] = -kInf;
            }
            for (std::int64_t t = 0; t < desc.tokens; ++t) logits[t * E + t % E] = 1;
            expect_same_scored(desc, logits);
            if (groups > 1) continue;
            desc.selection_bias = false;
            desc.input = RouterInput::logits_and_ids;
            std::vector<std::int32_t> ids = given_ids(desc);
            for (std::int64_t t = 0; t < desc.tokens; ++t) {
              ids[t * K] = static_cast<std::int32_t>(t % E);  // one with a finite logit
            }
            expect_same_scored(desc, logits, ids);
          }
        }
      }
    }
  }
}

// As many groups as experts: more than a warp's part of the shared memory holds.
TEST(Bits, TopKOfManyGroups) {
  for (const std::int64_t E : {1008, 1024}) {
    TopKDesc desc = top_k_of_67_tokens(E, 8, DType::bf16, RouterOrder::score_then_select);
    desc.score = RouterScore::sigmoid;
    desc.selection_bias = true;
    desc.groups = E;
    desc.kept_groups = E / 2;
    expect_same_scored(desc, random_logits(desc, 31));
  }
}

// The kernel in which several lanes share a token: few values, zeros of both signs, saturated
// scores, and rows of -inf but for some.
TEST(Bits, TopKOfTiesInScoredRouters) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kValues[] = {0.0, -0.0, 1, -1, 0.5, 1, 40, -40, 200, -200, 17, 0x1p-30};
  std::uint64_t number = 40000;
  for (const RouterScore score :
       {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus}) {
    for (const RouterOrder order : kModes) {
      for (const std::int64_t E : {64, 128, 256, 512}) {
        for (const std::int64_t K : {1, 3, 8}) {
          for (const std::int64_t size :
               {std::int64_t{16}, std::int64_t{32}, std::int64_t{64}, E}) {
            constexpr DType kTypes[] = {DType::bf16, DType::f16, DType::f32};
            ++number;
            TopKDesc desc = top_k_of_67_tokens(E, K, kTypes[number % 3], order, number % 2 == 1);
            desc.score = score;
            desc.scale = 1.5f;
            desc.selection_bias = number % 3 != 0;
            desc.groups = E / size;
            desc.kept_groups = (desc.groups + 1) / 2;
            if (desc.groups > 1 && number % 2 == 0) desc.group_score = GroupScore::sum_of_two;
            const Random random(number, 13);
            Tensor logits(desc.tokens * E);
            for (std::size_t i = 0; i < logits.size(); ++i) {
              const std::int64_t t = static_cast<std::int64_t>(i) / E;
              // A group has two finite logits at least: the sum of its two is finite.
              const bool some = static_cast<std::int64_t>(i) % size < 2;
              logits[i] = t % 4 == 3 && !some && random.below(i, 16) > 0
                              ? -kInf
                              : kValues[random.below(i, t % 4 == 0 ? 2 : 12)];
            }
            for (std::int64_t t = 0; t < desc.tokens; ++t) logits[t * E + t % E] = 1;
            expect_same_scored(desc, logits);
          }
        }
      }
    }
  }
}

// Scores that differ by a few units of the last place, or not at all: at the K-th place, among many
// experts, and in whole groups, which then compete for the last place. In odd tokens a softmax has
// terms that differ, while their quotients by the sum do not.
TEST(Bits, TopKOfNearlyEqualScores) {
  std::uint64_t number = 60000;
  const auto compare = [&](TopKDesc desc, std::int64_t group_size, double bias_unit) {
    const std::int64_t E = desc.experts;
    desc.selection_bias = bias_unit > 0;
    desc.groups = E / group_size;
    desc.kept_groups = (desc.groups + 1) / 2;
    const Random random(++number, 14);
    Tensor logits(desc.tokens * E);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const std::int64_t t = static_cast<std::int64_t>(i) / E;
      const bool odd = t % 2 != 0;
      const double base = odd ? 0.0 : static_cast<double>(t % 5) - 1.5;
      const double unit = odd ? 0x1p-24 : 0x1p-22;
      // One in so many experts is near the others at the top.
      const std::uint64_t one_in = t % 3 == 0 ? 2 : t % 3 == 1 ? E / 12 : E / 6;
      logits[i] = random.below(2 * i, one_in) == 0
                      ? base + static_cast<double>(random.below(2 * i + 1, 24)) * unit
                      : base - 1 - random.uniform(2 * i + 1);
    }
    expect_same_scored(desc, logits, {}, bias_unit);
  };
  for (const RouterScore score : {RouterScore::softmax, RouterScore::sigmoid}) {
    for (const std::int64_t E : {64, 128, 256, 512}) {
      for (const std::int64_t K : {1, 3, 8}) {
        TopKDesc desc = top_k_of_67_tokens(E, K, DType::f32, RouterOrder::score_then_select, true);
        desc.score = score;
        for (const double bias_unit : {0.0, 0x1p-24, 0.125}) {
          desc.group_score = GroupScore::largest;
          compare(desc, E, bias_unit);
          for (const std::int64_t group_size : {16, 32, 64}) {
            if (group_size == E) continue;
            for (const GroupScore group_score : {GroupScore::largest, GroupScore::sum_of_two}) {
              desc.group_score = group_score;
              compare(desc, group_size, bias_unit);
            }
          }
        }
      }
    }
  }
}

TEST(Bits, TopK) {
  std::uint64_t number = 0;
  for (const std::int64_t E : {1, 5, 8, 32, 33, 60, 64, 128, 160, 256, 384, 512, 1000, 1024}) {
    for (const std::int64_t K : {1, 2, 6, 8, 10, 16, 64}) {
      if (K > E) continue;
      for (const RouterOrder order : kModes) {
        for (const bool norm : {false, true}) {
          const TopKDesc desc = top_k_of_67_tokens(E, K, DType::bf16, order, norm);
          expect_same_top_k(desc, random_logits(desc, ++number));
        }
      }
    }
  }
}

// Rows of every type that just fill the lanes of a token, and that do not.
TEST(Bits, TopKOfEveryType) {
  std::uint64_t number = 5000;
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t E : {8, 60, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1025}) {
      for (const std::int64_t K : {1, 8}) {
        for (const RouterOrder order : kModes) {
          const TopKDesc desc = top_k_of_67_tokens(E, K, type, order);
          expect_same_top_k(desc, random_logits(desc, ++number));
        }
      }
    }
  }
}

// Every token is one of: zeros of both signs; those among numbers below; few values in all; -inf
// but for at most K experts.
TEST(Bits, TopKOfTiesZerosAndInfinities) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kValues[] = {0.0, -0.0, 0.0, -0.0, -1, -0.5, -1, -kInf, 0.5, 1, 0.5, 1};
  constexpr std::int64_t kBelow[] = {4, 8, 12};  // the first of kValues, by kind of token
  std::uint64_t number = 0;
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t E : {8, 60, 127, 128, 129, 256, 257, 511, 512}) {
      for (const std::int64_t K : {1, 2, 8}) {
        for (const RouterOrder order : kModes) {
          const TopKDesc desc = top_k_of_67_tokens(E, K, type, order);
          const Random random(++number, 11);
          Tensor logits(desc.tokens * E);
          for (std::int64_t t = 0; t < desc.tokens; ++t) {
            double* row = logits.data() + t * E;
            const std::int64_t kind = t % 4;
            const std::int64_t below = kind < 3 ? kBelow[kind] : 7;
            for (std::int64_t e = 0; e < E; ++e) row[e] = kValues[random.below(t * E + e, below)];
            // At least one finite number, and for the last kind 1 to K.
            const std::int64_t some = static_cast<std::int64_t>(logits.size()) + t * K;
            if (kind == 3) std::fill_n(row, E, -kInf);
            for (std::int64_t k = 0; k < (kind == 3 ? 1 + t / 4 % K : 1); ++k) {
              row[random.below(some + k, E)] = kValues[k % 7];
            }
          }
          expect_same_top_k(desc, logits);
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
      args->expert_order = ints("expert_order", desc.experts);
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
}  // namespace sonicmoe::testkit
