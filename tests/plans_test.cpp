// The three plans that a layer is made of give, alone and one after the other, the layer's own
// bits; and so do a layer's operations, one call each.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sonicmoe/sonicmoe.h"
#include "testkit/buffer.h"
#include "testkit/device_memory.h"
#include "testkit/inputs.h"
#include "tests/device.h"

namespace sonicmoe::testkit {
namespace {

/// Every tensor that forward and backward return, by name.
using Results = std::map<std::string, std::vector<std::byte>>;

/// A layer's tensors, in guarded memory.
class Tensors {
 public:
  explicit Tensors(const LayerDesc& desc) : d_(desc), problem_(make_problem(custom_case(desc, 3))) {
    const DType type = d_.experts.dtype;
    const Problem& p = problem_;
    fwd.x = arena.input("x", p.x, type);
    fwd.w1 = arena.input("w1", p.w1, type);
    fwd.w2 = arena.input("w2", p.w2, type);
    fwd.b1 = arena.input("b1", p.b1, type);
    fwd.b2 = arena.input("b2", p.b2, type);
    if (!d_.router.chooses()) {
      fwd.list_tokens = arena.input("list_tokens", p.lists.tokens);
      fwd.given_ids = fwd.list_experts = arena.input("list_experts", p.lists.experts);
      fwd.given_weights = fwd.list_scores =
          static_cast<const float*>(arena.input("list_scores", p.list_scores, DType::f32));
    }
    if (d_.router.projects()) {
      fwd.router_w = arena.input("router_w", p.router_w, type);
      fwd.logits = result("logits", d_.tokens * E(), type);
      bwd.drouter_w = result("drouter_w", E() * hidden(), type);
    } else if (d_.router.has_logits()) {
      fwd.given_logits = arena.input("given_logits", p.logits, type);
      bwd.dgiven_logits = result("dgiven_logits", d_.tokens * E(), type);
    }
    fwd.seed = 5, fwd.offset = 7;
    fwd.o = result("o", d_.tokens * hidden(), type);
    fwd.counts = static_cast<std::int32_t*>(result("counts", E(), DType::f32));
    fwd.preact = arena.output("preact", d_.rows() * d_.experts.preact_width(), type);

    bwd.dout = arena.input("dout", p.dout, type);
    bwd.x = fwd.x, bwd.router_w = fwd.router_w, bwd.w1 = fwd.w1, bwd.w2 = fwd.w2;
    bwd.b1 = fwd.b1, bwd.b2 = fwd.b2,
    bwd.logits = d_.router.projects() ? fwd.logits : fwd.given_logits, bwd.preact = fwd.preact;
    bwd.dx = result("dx", d_.tokens * hidden(), type);
    bwd.dw1 = result("dw1", E() * d_.experts.preact_width() * hidden(), type);
    bwd.dw2 = result("dw2", E() * hidden() * d_.experts.intermediate, type);
    if (d_.experts.bias) {
      bwd.db1 = result("db1", E() * d_.experts.preact_width(), type);
      bwd.db2 = result("db2", E() * hidden(), type);
    }
    if (!d_.router.has_logits()) {
      bwd.dscores = static_cast<float*>(result("dscores", d_.rows(), DType::f32));
    }
  }

  Workspace workspace(const std::string& name, std::size_t bytes) {
    return {arena.output(name, bytes, 256), bytes};
  }
  void routing(std::size_t bytes) { bwd.routing = fwd.routing = arena.output("routing", bytes); }

  Results results() const {
    EXPECT_TRUE(synchronize(kDevice).ok());
    EXPECT_EQ(arena.damage(), "");
    Results all;
    for (const std::string& name : names_) {
      const auto bytes = arena[name].bytes();
      all[name].assign(bytes.begin(), bytes.end());
    }
    return all;
  }

  std::int64_t E() const { return d_.router.experts; }
  std::int64_t hidden() const { return d_.experts.hidden; }

  Arena arena{kDevice};
  ForwardArgs fwd;
  BackwardArgs bwd;

 private:
  void* result(const std::string& name, std::int64_t elements, DType type) {
    names_.push_back(name);
    return arena.output(name, static_cast<std::size_t>(elements), type);
  }

  LayerDesc d_;
  Problem problem_;
  std::vector<std::string> names_;
};

void expect_ok(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

template <class Desc>
auto plan_of(const Desc& desc) {
  const auto plan = make_plan(desc, kDevice);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.value();
}

Results by_layer(const LayerDesc& desc) {
  Tensors t(desc);
  const LayerPlan plan = plan_of(desc);
  t.routing(plan.saved_bytes().routing);
  expect_ok(plan.forward(t.fwd, t.workspace("forward", plan.forward_workspace_bytes())));
  expect_ok(plan.backward(t.bwd, t.workspace("backward", plan.backward_workspace_bytes())));
  return t.results();
}

/// One call for each operation.
Results by_operations(const LayerDesc& desc) {
  Tensors t(desc);
  const LayerPlan plan = plan_of(desc);
  t.routing(plan.saved_bytes().routing);
  const Workspace forward = t.workspace("forward", plan.forward_workspace_bytes());
  const Workspace backward = t.workspace("backward", plan.backward_workspace_bytes());
  for (std::size_t i = 0; i < plan.forward_operations().size(); ++i) {
    expect_ok(plan.forward(t.fwd, forward, {}, OperationMask{1} << i));
  }
  for (std::size_t i = 0; i < plan.backward_operations().size(); ++i) {
    expect_ok(plan.backward(t.bwd, backward, {}, OperationMask{1} << i));
  }
  return t.results();
}

/// RouterPlan, ExpertsPlan and CombinePlan, as a caller would put them together.
Results by_plans(const LayerDesc& desc) {
  Tensors t(desc);
  const RouterPlan router = plan_of(desc.routing());
  const ExpertsPlan experts = plan_of(desc.grouped());
  const bool lists = desc.router.takes_lists() || desc.rounding.tile > 0;
  const bool by_sum = desc.router.projects() && !lists && !desc.needs_logits();
  const CombinePlan combine = plan_of(CombineDesc{.tokens = desc.tokens,
                                                  .rows = desc.rows(),
                                                  .hidden = t.hidden(),
                                                  .top_k = lists ? 0 : desc.router.top_k,
                                                  .dtype = desc.experts.dtype,
                                                  .experts = by_sum ? t.E() : 0});
  t.routing(router.routing_bytes());
  const RoutedRows rows = router.routed_rows(t.fwd.routing);
  const DType type = desc.experts.dtype;
  const auto R = static_cast<std::size_t>(desc.rows());
  const std::size_t width = R * static_cast<std::size_t>(t.hidden());
  float* const made_scores = t.arena.output_float("slot_scores", R);
  void* const expert_out = t.arena.output("expert_out", width, type);
  expect_ok(router.forward({.x = t.fwd.x,
                            .router_w = t.fwd.router_w,
                            .given_logits = t.fwd.given_logits,
                            .given_ids = t.fwd.given_ids,
                            .given_weights = t.fwd.given_weights,
                            .list_tokens = t.fwd.list_tokens,
                            .list_experts = t.fwd.list_experts,
                            .list_scores = t.fwd.list_scores,
                            .seed = t.fwd.seed,
                            .offset = t.fwd.offset,
                            .logits = t.fwd.logits,
                            .counts = t.fwd.counts,
                            .slot_scores = made_scores,
                            .routing = t.fwd.routing},
                           t.workspace("router forward", router.forward_workspace_bytes())));
  expect_ok(experts.forward({.offsets = rows.offsets,
                             .row_tokens = rows.row_tokens,
                             .x = t.fwd.x,
                             .w1 = t.fwd.w1,
                             .b1 = t.fwd.b1,
                             .w2 = t.fwd.w2,
                             .b2 = t.fwd.b2,
                             .preact = t.fwd.preact,
                             .expert_out = expert_out},
                            t.workspace("experts forward", experts.forward_workspace_bytes())));
  const float* scores = desc.rounding.tile > 0 ? made_scores : rows.slot_scores;
  if (!desc.router.has_logits()) scores = t.fwd.list_scores;
  AggregateArgs sum{.rows = expert_out,
                    .slot_rows = rows.slot_rows,
                    .token_offsets = rows.token_offsets,
                    .token_slots = rows.token_slots,
                    .slot_scores = scores,
                    .out = t.fwd.o};
  const Workspace sums = t.workspace("sums", combine.workspace_bytes());
  expect_ok(combine.forward(sum, sums));

  float* const row_dscores = t.arena.output_float("row_dscores", R);
  void* const dx_rows = t.arena.output("dx_rows", width, type);
  void* const own_dlogits = t.arena.output(
      "dlogits", static_cast<std::size_t>(desc.router.projects() ? desc.tokens * t.E() : 0), type);
  void* const dlogits = desc.router.projects() ? own_dlogits : t.bwd.dgiven_logits;
  expect_ok(experts.backward({.offsets = rows.offsets,
                              .row_tokens = rows.row_tokens,
                              .row_scores = rows.row_scores,
                              .x = t.fwd.x,
                              .dout = t.bwd.dout,
                              .w1 = t.fwd.w1,
                              .b1 = t.fwd.b1,
                              .w2 = t.fwd.w2,
                              .b2 = t.fwd.b2,
                              .preact = t.fwd.preact,
                              .row_dscores = row_dscores,
                              .dx_rows = dx_rows,
                              .dw1 = t.bwd.dw1,
                              .db1 = t.bwd.db1,
                              .dw2 = t.bwd.dw2,
                              .db2 = t.bwd.db2},
                             t.workspace("experts backward", experts.backward_workspace_bytes())));
  const bool by_product = desc.router.projects() && !by_sum;
  expect_ok(router.backward({.x = t.fwd.x,
                             .router_w = t.fwd.router_w,
                             .logits = t.bwd.logits,
                             .routing = t.fwd.routing,
                             .row_dscores = row_dscores,
                             .dlogits = dlogits,
                             .dscores = t.bwd.dscores,
                             .dx = by_product ? t.bwd.dx : nullptr,
                             .drouter_w = t.bwd.drouter_w},
                            t.workspace("router backward", router.backward_workspace_bytes())));
  sum.rows = dx_rows, sum.slot_scores = nullptr, sum.out = t.bwd.dx;
  if (by_product) sum.addend = t.bwd.dx;
  if (by_sum) {
    sum.slot_experts = rows.slot_experts, sum.dlogits = dlogits, sum.router_w = t.fwd.router_w;
  }
  expect_ok(combine.backward(sum, sums));
  return t.results();
}

LayerDesc top_k_layer() {
  return {.tokens = 70,
          .router = {.experts = 9, .top_k = 3},
          .experts = {.hidden = 72,
                      .intermediate = 40,
                      .dtype = kTypes[0],
                      .w1_layout = W1Layout::concatenated}};
}

std::vector<std::pair<const char*, LayerDesc>> layers() {
  std::vector<std::pair<const char*, LayerDesc>> all = {{"softmax over top-K", top_k_layer()}};
  LayerDesc d = top_k_layer();
  d.router.order = RouterOrder::score_then_select;
  d.experts.bias = true;
  all.emplace_back("top-K over softmax, biases", d);
  d = top_k_layer();
  d.rounding.tile = 8;
  d.experts.activation = Activation::gelu;
  all.emplace_back("rounding", d);
  d = top_k_layer();
  d.experts.w1_layout = W1Layout::transposed_interleaved;
  d.experts.bias = true;
  all.emplace_back("transposed weights, biases", d);
  d.experts.recompute = Recompute::preact;
  all.emplace_back("H made again", d);
  for (const RouterInput input :
       {RouterInput::logits, RouterInput::logits_and_ids, RouterInput::ids_and_weights}) {
    d = top_k_layer();
    d.router.input = input;
    all.emplace_back(name(input), d);
  }
  d.router.input = RouterInput::logits;
  d.rounding.tile = 8;
  all.emplace_back("logits, rounding", d);
  d = top_k_layer();
  d.router = {.experts = 9, .input = RouterInput::lists, .list_length = 150};
  all.emplace_back("lists", d);
  d.router.list_length = 0;
  all.emplace_back("no rows", d);
  return all;
}

TEST(Plans, TogetherGiveTheLayersBits) {
  for (const auto& [name, desc] : layers()) {
    SCOPED_TRACE(name);
    EXPECT_EQ(by_plans(desc), by_layer(desc));
  }
}

TEST(Plans, OperationsOneByOneGiveTheLayersBits) {
  for (const auto& [name, desc] : layers()) {
    SCOPED_TRACE(name);
    EXPECT_EQ(by_operations(desc), by_layer(desc));
  }
}

#if !SONICMOE_TEST_CUDA  // the order of operations is the same everywhere
TEST(Plans, OperationsThatAreNotWantedDoNotRun) {
  const LayerDesc desc = top_k_layer();
  Tensors t(desc);
  const LayerPlan plan = plan_of(desc);
  t.routing(plan.saved_bytes().routing);
  const Workspace workspace = t.workspace("forward", plan.forward_workspace_bytes());
  expect_ok(plan.forward(t.fwd, workspace, {}, 0));
  EXPECT_TRUE(t.arena.outputs_untouched());
  expect_ok(plan.forward(t.fwd, workspace, {}, 1));  // router_gemm
  EXPECT_FALSE(t.arena["logits"].untouched());
  for (const char* name : {"counts", "preact", "o"}) EXPECT_TRUE(t.arena[name].untouched()) << name;
}
#endif

using Names = std::vector<std::string>;
Names strings(const std::vector<const char*>& names) { return {names.begin(), names.end()}; }

TEST(Plans, NameTheirOperationsInOrder) {
  LayerDesc desc = top_k_layer();
  LayerPlan plan = plan_of(desc);
  EXPECT_EQ(strings(plan.forward_operations()),
            (Names{"router_gemm", "top_k", "metadata", "up_proj", "down_proj", "aggregate_o"}));
  EXPECT_EQ(strings(plan.backward_operations()),
            (Names{"down_proj_dgrad", "score_grad", "down_proj_wgrad", "up_proj_wgrad",
                   "up_proj_dgrad", "router_dgrad", "router_wgrad", "aggregate_dx"}));
  desc.rounding.tile = 8;
  desc.experts.bias = true;
  plan = plan_of(desc);
  EXPECT_EQ(strings(plan.forward_operations())[1], "token_rounding");
  EXPECT_EQ(strings(plan.backward_operations())[1], "bias_grad");
  EXPECT_EQ(strings(plan.backward_operations())[3], "token_rounding_grad");
  desc.experts.inference = true;
  EXPECT_TRUE(plan_of(desc).backward_operations().empty());
  // What the caller hands over is not computed.
  const Names experts_forward = {"metadata", "up_proj", "down_proj", "aggregate_o"};
  const Names backward = {"down_proj_dgrad", "score_grad",    "down_proj_wgrad",
                          "up_proj_wgrad",   "up_proj_dgrad", "aggregate_dx"};
  for (const RouterInput input :
       {RouterInput::logits, RouterInput::logits_and_ids, RouterInput::ids_and_weights}) {
    desc = top_k_layer();
    desc.router.input = input;
    plan = plan_of(desc);
    Names forward = experts_forward;
    if (desc.router.has_logits()) forward.insert(forward.begin(), "top_k");
    EXPECT_EQ(strings(plan.forward_operations()), forward);
    EXPECT_EQ(strings(plan.backward_operations()), backward);
  }
}

TEST(Plans, RefuseABackwardThatInferenceLacks) {
  LayerDesc desc = top_k_layer();
  desc.experts.inference = true;
  const char* const message =
      "inference: got true, allowed: false: an inference plan keeps nothing";
  EXPECT_STREQ(plan_of(desc.routing()).backward({}, {}).message(), message);
  EXPECT_STREQ(plan_of(desc.grouped()).backward({}, {}).message(), message);
  EXPECT_STREQ(plan_of(CombineDesc{.tokens = 1,
                                   .rows = 1,
                                   .hidden = 8,
                                   .top_k = 1,
                                   .dtype = kTypes[0],
                                   .inference = true})
                   .backward({}, {})
                   .message(),
               message);
}

TEST(Plans, RefuseMissingTensorsByName) {
  const LayerDesc desc = top_k_layer();
  const auto refusal = [](const Status& status) { return std::string(status.message()); };
  EXPECT_EQ(refusal(plan_of(desc.routing()).forward({}, {})),
            "x: got null, allowed: a pointer to (T, d)");
  EXPECT_EQ(refusal(plan_of(desc.routing()).backward({}, {})),
            "routing: got null, allowed: a pointer to routing_bytes()");
  EXPECT_EQ(refusal(plan_of(desc.grouped()).forward({}, {})),
            "offsets: got null, allowed: a pointer to (E+1) int32");
  EXPECT_EQ(refusal(plan_of(desc.grouped()).backward({}, {})),
            "offsets: got null, allowed: a pointer to (E+1) int32");
}

TEST(Plans, RefuseWhatTheyAreNotMadeFor) {
  RoutingDesc routing = top_k_layer().routing();
  routing.top_k = 10;
  EXPECT_STREQ(make_plan(routing, kDevice).status().message(),
               "top_k: got 10, allowed: 1 to experts (9)");
  GroupedDesc grouped = top_k_layer().grouped();
  grouped.rows = -1;
  EXPECT_STREQ(make_plan(grouped, kDevice).status().message(),
               "rows: got -1, allowed: 0 to 2147483647");
  EXPECT_STREQ(make_plan(CombineDesc{.tokens = 2, .rows = 5, .hidden = 8, .top_k = 2}, kDevice)
                   .status()
                   .message(),
               "rows: got 5, allowed: 0 to 4");
}

}  // namespace
}  // namespace sonicmoe::testkit
