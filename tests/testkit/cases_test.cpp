#include "testkit/cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "testkit/inputs.h"

namespace sonicmoe::testkit {
namespace {

TEST(Cases, NamesAreUniqueAndFound) {
  std::set<std::string> names;
  std::vector<Case> cases = full_cases();
  for (Case& c : benchmark_cases()) cases.push_back(std::move(c));
  for (const Case& c : cases) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    ASSERT_NE(find_case(c.name), nullptr);
    EXPECT_EQ(find_case(c.name)->seed, c.seed);
  }
  EXPECT_EQ(find_case("no such case"), nullptr);
  EXPECT_EQ(smoke_cases().size(), 26u);
}

// Tests of single kernels take their cases from the lists by name.
TEST(Cases, ActivationsAreListedForCuda) {
  for (const std::string& name : activation_case_names()) {
    for (const char* type : {"/f16", "/bf16"}) EXPECT_NE(find_case(name + type), nullptr) << name;
  }
}

TEST(Cases, ReproCommands) {
  EXPECT_EQ(repro_command(*find_case("shape/t127-one_expert/bf16"), 3),
            "sonicmoe check --case shape/t127-one_expert/bf16 --threads 3");
  LayerDesc desc;
  desc.tokens = 10;
  desc.experts.hidden = 16;
  desc.experts.intermediate = 24;
  desc.router.experts = 4;
  desc.router.top_k = 2;
  desc.experts.dtype = DType::f32;
  desc.experts.activation = Activation::geglu;
  desc.router.order = RouterOrder::score_then_select;
  desc.router.renormalize = true;
  desc.experts.w1_layout = W1Layout::concatenated;
  desc.experts.bias = true;
  desc.rounding = {.tile = 16, .rule = RoundingRule::balance};
  EXPECT_EQ(
      repro_command(custom_case(desc, 7)),
      "sonicmoe check --layer 'tokens=10 hidden=16 intermediate=24 experts=4 top_k=2 dtype=f32 "
      "activation=geglu w1_layout=concatenated router_order=score_then_select renormalize=true "
      "rounding_tile=16 rounding_rule=balance bias=true' --seed 7");
}

/// Rows of each expert in the case's own routing.
std::vector<std::int32_t> counts(const char* name) {
  const Problem problem = make_problem(*find_case(name));
  const LayerDesc& desc = problem.desc;
  return group(own_routing(problem, Precision::rounded), desc.tokens, desc.router.experts).counts;
}

// The hostile routings are what their names say.
TEST(Cases, Routings) {
  using Counts = std::vector<std::int32_t>;
  for (const char* name :
       {"router/softmax_over_topk-empty_ends/bf16", "given/empty_ends-sorted/f32"}) {
    const Counts c = counts(name);
    ASSERT_EQ(c.size(), 9u);
    EXPECT_EQ(c[0] + c[4] + c[8], 0) << name;
    EXPECT_GT(c[1], 0) << name;
  }
  for (const int tokens : {127, 128, 129}) {
    const std::string shape = "shape/t" + std::to_string(tokens);
    EXPECT_EQ(counts((shape + "-one_expert/f32").c_str()),
              (Counts{0, 0, 0, 0, 0, 0, 0, 0, tokens}));
    EXPECT_EQ(counts((shape + "-all_experts/f32").c_str()), (Counts{tokens, tokens}));
  }
  EXPECT_EQ(counts("given/tile_counts/bf16"), (Counts{127, 128, 129, 0, 1, 255, 256, 257}));
  EXPECT_EQ(counts("given/sentinels_only/f32"), (Counts{0, 0, 0}));
  EXPECT_EQ(counts("given/one_expert/f32").back(), 70);
}

TEST(Cases, HostileListsHaveEverything) {
  const Problem p = make_problem(*find_case("given/hostile/f32"));
  const Routing& lists = p.lists;
  const Grouping g = group(lists, p.desc.tokens, p.desc.router.experts);
  EXPECT_LT(g.rows(), lists.slots());
  EXPECT_FALSE(std::is_sorted(lists.tokens.begin(), lists.tokens.end()));
  bool lonely = false;  // a token without expert
  for (std::size_t t = 0; t + 1 < g.token_offsets.size(); ++t) {
    lonely = lonely || g.token_offsets[t] == g.token_offsets[t + 1];
  }
  EXPECT_TRUE(lonely);
  bool duplicate = false;
  for (std::size_t row = 1; row < g.rows(); ++row) {
    duplicate =
        duplicate || (g.row_tokens[row] == g.row_tokens[row - 1] &&
                      lists.experts[g.row_slots[row]] == lists.experts[g.row_slots[row - 1]]);
  }
  EXPECT_TRUE(duplicate);
}

TEST(Inputs, AreUnitScaleAndRounded) {
  const Problem p = make_problem(*find_case("shape/large/bf16"));
  double sum = 0, squares = 0;
  for (const double v : p.x) {
    ASSERT_EQ(v, round_to(v, DType::bf16));
    sum += v;
    squares += v * v;
  }
  const auto n = static_cast<double>(p.x.size());
  // Standard errors 1/sqrt(n) and sqrt(2/n); 4 of them.
  EXPECT_LT(std::fabs(sum / n), 4 / std::sqrt(n));
  EXPECT_LT(std::fabs(squares / n - 1), 4 * std::sqrt(2 / n));
  EXPECT_NE(p.x, p.dout);
}

TEST(Inputs, IntegerGatesAreZeroOrSaturated) {
  LayerDesc desc = find_case("activation/swiglu-interleaved/f32")->desc;
  const Routing all = own_routing(make_problem(*find_case("activation/swiglu-interleaved/f32")),
                                  Precision::rounded);
  const GemmInputs in = integer_inputs(desc, all, 1);
  const Grouping g = group(all, desc.tokens, desc.router.experts);
  const auto up = Oracle(desc, Precision::exact).up_proj(g, in.x, in.w1, in.b1);
  std::set<double> gates, ups;
  for (std::size_t row = 0; row < g.rows(); ++row) {
    for (std::int64_t j = 0; j < desc.experts.intermediate; ++j) {
      gates.insert(up.preact[row * 2 * desc.experts.intermediate + j]);
      ups.insert(up.preact[row * 2 * desc.experts.intermediate + desc.experts.intermediate + j]);
    }
  }
  EXPECT_EQ(gates, (std::set<double>{-64, 0, 64}));
  EXPECT_GT(ups.size(), 30u);
}

}  // namespace
}  // namespace sonicmoe::testkit
