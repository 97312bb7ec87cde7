// The same for each operation by itself.
#include <gtest/gtest.h>

#include <climits>
#include <limits>

#include "sonicmoe/combine.h"
#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "tests/bad_input/pointer_rows.h"

namespace sonicmoe::testkit {
namespace {

template <class Desc>
struct BadDesc {
  const char* message;
  std::function<void(Desc*)> spoil;
};

template <class Desc>
void expect_refused(const Desc& good, const std::vector<BadDesc<Desc>>& table) {
  ASSERT_TRUE(make_plan(good).ok()) << make_plan(good).status().message();
  for (const BadDesc<Desc>& row : table) {
    Desc desc = good;
    row.spoil(&desc);
    const auto plan = make_plan(desc);
    ASSERT_FALSE(plan.ok()) << row.message;
    EXPECT_STREQ(plan.status().message(), row.message);
  }
}

/// Pointers are judged before any is followed, so one buffer can stand for every tensor.
template <class Desc, class Rows>
void expect_pointers(const Desc& desc, typename Desc::Args good, const Rows& rows) {
  const auto plan = make_plan(desc);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const std::size_t bytes = plan.value().workspace_bytes();
  const GuardedBuffer memory(bytes, 256);
  for_each_bad_pointer(good, rows,
                       [&](const typename Desc::Args& args, const std::string& message) {
                         const Status status = plan.value().run(args, {memory.data(), bytes});
                         EXPECT_EQ(status.code(), StatusCode::invalid_argument);
                         EXPECT_EQ(status.message(), message);
                         EXPECT_TRUE(memory.untouched());
                       });
  if (bytes == 0) return;
  const Status status = plan.value().run(good, {memory.data(), bytes - 1});
  EXPECT_EQ(std::string(status.message()), "workspace: got " + std::to_string(bytes - 1) +
                                               " bytes, allowed: at least " +
                                               std::to_string(bytes));
}

constexpr std::int64_t kTokens = 5, kHidden = 16, kIntermediate = 8, kExperts = 4, kRows = 10;

template <class Desc>
Desc sized() {
  Desc d;
  d.tokens = kTokens;
  d.hidden = kHidden;
  d.intermediate = kIntermediate;
  d.experts = kExperts;
  d.rows = kRows;
  d.dtype = DType::f32;
  return d;
}

/// Descriptor fields that many operations share.
template <class Desc>
std::vector<BadDesc<Desc>> bad_grouped() {
  return {
      {"tokens: got -1, allowed: 0 to 2147483647", [](Desc* d) { d->tokens = -1; }},
      {"rows: got -1, allowed: 0 to 2147483647", [](Desc* d) { d->rows = -1; }},
      {"hidden: got 20, allowed: multiples of 8 from 8 to 1048576",
       [](Desc* d) { d->hidden = 20; }},
      {"intermediate: got 0, allowed: multiples of 8 from 8 to 1048576",
       [](Desc* d) { d->intermediate = 0; }},
      {"experts: got 0, allowed: 1 to 65536", [](Desc* d) { d->experts = 0; }},
      {"dtype: got -1, allowed: f32, bf16, f16",
       [](Desc* d) { d->dtype = static_cast<DType>(-1); }},
      {"dtype: got f16, allowed: f32, bf16 (on the CPU)", [](Desc* d) { d->dtype = DType::f16; }},
      {"activation: got 13, allowed: swiglu, geglu, geglu_tanh, reglu, relu, relu_sq, gelu, "
       "gelu_tanh, silu, swiglu_clamp_after, swiglu_oai, situ_glu, quick_geglu",
       [](Desc* d) { d->activation = static_cast<Activation>(13); }},
      {"w1_layout: got 5, allowed: interleaved, concatenated, separate, transposed, "
       "transposed_interleaved",
       [](Desc* d) { d->w1_layout = static_cast<W1Layout>(5); }},
      {"w1_layout: got separate, allowed: interleaved, concatenated, transposed, "
       "transposed_interleaved for an activation without a gate",
       [](Desc* d) {
         d->activation = Activation::silu;
         d->w1_layout = W1Layout::separate;
       }},
  };
}

TEST(BadOp, GroupedGemmDescriptors) {
  auto table = bad_grouped<GroupedGemmDesc>();
  table.push_back(
      {"op: got 6, allowed: 0 to 5", [](GroupedGemmDesc* d) { d->op = static_cast<GemmOp>(6); }});
  expect_refused(sized<GroupedGemmDesc>(), table);
  expect_refused(sized<BiasGradDesc>(), bad_grouped<BiasGradDesc>());

  Options options;
  options.kernel = "cpu.down_proj";
  EXPECT_STREQ(make_plan(sized<GroupedGemmDesc>(), {}, options).status().message(),
               "kernel: got cpu.down_proj, allowed: cpu-avx512bf16.up_proj, cpu-avx512.up_proj, "
               "cpu.up_proj");
}

TEST(BadOp, GroupedGemmPointers) {
  using A = GroupedGemmArgs;
  const GuardedBuffer memory(64);
  void* const p = memory.data();
  A good;
  good.offsets = good.row_tokens = good.expert_order = static_cast<const std::int32_t*>(p);
  good.row_scores = good.row_dscores = static_cast<float*>(p);
  good.x = good.dout = good.w1 = good.w1_up = good.b1 = good.b1_up = good.w2 = good.b2 = p;
  good.preact = good.act = good.expert_out = good.dpreact = good.scaled_act = p;
  good.dx_rows = good.dw1 = good.dw1_up = good.dw2 = p;
  const auto offsets = pointer_row("offsets", &A::offsets, "(E+1) int32", 4);
  const auto tokens = pointer_row("row_tokens", &A::row_tokens, "(R) int32", 4);
  const auto order = pointer_row("expert_order", &A::expert_order, "", 4, true);
  const auto scores = pointer_row("row_scores", &A::row_scores, "(R) float", 4);
  const auto x = pointer_row("x", &A::x, "(T, d)");
  const auto dout = pointer_row("dout", &A::dout, "(T, d)");
  const auto w1 = pointer_row("w1", &A::w1, "the gate rows (E, n, d)");
  const auto w1_up = pointer_row("w1_up", &A::w1_up, "the up rows (E, n, d)");
  const auto w2 = pointer_row("w2", &A::w2, "(E, d, n)");
  const auto preact = pointer_row("preact", &A::preact, "(R, 2n or n)");
  const auto act = pointer_row("act", &A::act, "(R, n)");
  const auto dpreact = pointer_row("dpreact", &A::dpreact, "(R, 2n or n)");
  const auto scaled = pointer_row("scaled_act", &A::scaled_act, "(R, n)");
  const std::vector<std::vector<PointerRow<A>>> rows = {
      {offsets, tokens, x, w1, w1_up, pointer_row("b1", &A::b1, "the gate biases (E, n)"),
       pointer_row("b1_up", &A::b1_up, "the up biases (E, n)"), preact, act},
      {offsets, act, w2, pointer_row("b2", &A::b2, "(E, d)"),
       pointer_row("expert_out", &A::expert_out, "(R, d)")},
      {offsets, tokens, scores, dout, w2, preact, dpreact, scaled,
       pointer_row("row_dscores", &A::row_dscores, "(R) float", 4)},
      {offsets, dpreact, w1, w1_up, pointer_row("dx_rows", &A::dx_rows, "(R, d)")},
      {offsets, tokens, order, dout, scaled, pointer_row("dw2", &A::dw2, "(E, d, n)")},
      {offsets, tokens, order, x, dpreact, pointer_row("dw1", &A::dw1, "the gate rows (E, n, d)"),
       pointer_row("dw1_up", &A::dw1_up, "the up rows (E, n, d)")}};
  for (int op = 0; op < 6; ++op) {
    auto desc = sized<GroupedGemmDesc>();
    desc.op = static_cast<GemmOp>(op);
    desc.w1_layout = W1Layout::separate;
    desc.bias = op < 2;
    SCOPED_TRACE(op);
    expect_pointers(desc, good, rows[op]);
  }
  const auto transposed_w1 = pointer_row("w1", &A::w1, "(E, d, 2n or n)");
  const auto transposed_w2 = pointer_row("w2", &A::w2, "(E, n, d)");
  const std::vector<std::vector<PointerRow<A>>> transposed = {
      {transposed_w1, pointer_row("b1", &A::b1, "(E, 2n or n)")},
      {transposed_w2},
      {transposed_w2},
      {transposed_w1},
      {pointer_row("dw2", &A::dw2, "(E, n, d)")},
      {pointer_row("dw1", &A::dw1, "(E, d, 2n or n)")}};
  for (int op = 0; op < 6; ++op) {
    auto desc = sized<GroupedGemmDesc>();
    desc.op = static_cast<GemmOp>(op);
    desc.w1_layout = op % 2 == 0 ? W1Layout::transposed : W1Layout::transposed_interleaved;
    desc.bias = op < 2;
    SCOPED_TRACE(op);
    expect_pointers(desc, good, transposed[op]);
  }
  EXPECT_TRUE(memory.untouched());
}

TEST(BadOp, BiasGradPointers) {
  using A = BiasGradArgs;
  const GuardedBuffer memory(64);
  void* const p = memory.data();
  A good;
  good.offsets = good.row_tokens = static_cast<const std::int32_t*>(p);
  good.row_scores = good.row_dscores = static_cast<float*>(p);
  good.dpreact = good.dout = good.b2 = good.db1 = good.db1_up = good.db2 = p;
  auto desc = sized<BiasGradDesc>();
  desc.w1_layout = W1Layout::separate;
  const std::vector<PointerRow<A>> rows = {
      pointer_row("offsets", &A::offsets, "(E+1) int32", 4),
      pointer_row("row_tokens", &A::row_tokens, "(R) int32", 4),
      pointer_row("row_scores", &A::row_scores, "(R) float", 4),
      pointer_row("dpreact", &A::dpreact, "(R, 2n or n)"),
      pointer_row("dout", &A::dout, "(T, d)"),
      pointer_row("b2", &A::b2, "(E, d)"),
      pointer_row("row_dscores", &A::row_dscores, "(R) float", 4),
      pointer_row("db1", &A::db1, "the gate biases (E, n)"),
      pointer_row("db1_up", &A::db1_up, "the up biases (E, n)"),
      pointer_row("db2", &A::db2, "(E, d)")};
  expect_pointers(desc, good, rows);
}

TEST(BadOp, RouterGemm) {
  RouterGemmDesc desc;
  desc.tokens = kTokens;
  desc.hidden = kHidden;
  desc.experts = kExperts;
  desc.dtype = DType::f32;
  using D = RouterGemmDesc;
  expect_refused<D>(
      desc,
      {{"pass: got 3, allowed: 0 to 2", [](D* d) { d->pass = static_cast<GemmPass>(3); }},
       {"tokens: got -5, allowed: 0 to 2147483647", [](D* d) { d->tokens = -5; }},
       {"hidden: got 4, allowed: multiples of 8 from 8 to 1048576", [](D* d) { d->hidden = 4; }},
       {"experts: got -1, allowed: 1 to 65536", [](D* d) { d->experts = -1; }},
       {"f32_w: got true, allowed: false without f32_logits", [](D* d) { d->f32_w = true; }},
       {"dtype: got f16, allowed: f32, bf16 (on the CPU)", [](D* d) { d->dtype = DType::f16; }}});
  using A = RouterGemmArgs;
  const GuardedBuffer memory(64);
  A good;
  good.x = good.w = good.dlogits = good.logits = good.dx = good.dw = memory.data();
  const auto x = pointer_row("x", &A::x, "(T, d)");
  const auto w = pointer_row("w", &A::w, "(E, d)");
  const auto dlogits = pointer_row("dlogits", &A::dlogits, "(T, E)");
  const std::vector<std::vector<PointerRow<A>>> rows = {
      {x, w, pointer_row("logits", &A::logits, "(T, E)")},
      {dlogits, w, pointer_row("dx", &A::dx, "(T, d)")},
      {dlogits, x, pointer_row("dw", &A::dw, "(E, d)")}};
  for (int pass = 0; pass < 3; ++pass) {
    desc.pass = static_cast<GemmPass>(pass);
    expect_pointers(desc, good, rows[pass]);
  }
  // With a bias the last pass makes two gradients, of which either may be left out.
  desc.bias = true;
  good.bias = static_cast<const float*>(memory.data());
  good.dbias = static_cast<float*>(memory.data());
  const auto bias = pointer_row("bias", &A::bias, "(E) float", 4);
  expect_pointers(desc, good,
                  std::vector{pointer_row("dw", &A::dw, "", 4, true),
                              pointer_row("dbias", &A::dbias, "", 4, true)});
  good.dbias = nullptr;
  expect_pointers(desc, good, rows[2]);
  desc.pass = GemmPass::forward;
  expect_pointers(desc, good, std::vector{bias});
}

TEST(BadOp, TopK) {
  TopKDesc desc;
  desc.tokens = kTokens;
  desc.experts = kExperts;
  desc.top_k = 2;
  desc.dtype = DType::f32;
  using D = TopKDesc;
  expect_refused<D>(desc, {{"top_k: got 5, allowed: 1 to experts (4)", [](D* d) { d->top_k = 5; }},
                           {"top_k: got 0, allowed: 1 to experts (4)", [](D* d) { d->top_k = 0; }},
                           {"router_input: got ids_and_weights, allowed: projection, logits, "
                            "logits_and_ids",
                            [](D* d) { d->input = RouterInput::ids_and_weights; }},
                           {"router_input: got lists, allowed: projection, logits, logits_and_ids",
                            [](D* d) { d->input = RouterInput::lists; }},
                           {"router_order: got 9, allowed: select_then_score, score_then_select",
                            [](D* d) { d->order = static_cast<RouterOrder>(9); }}});
  using A = TopKArgs;
  const GuardedBuffer memory(64);
  A good;
  good.logits = memory.data();
  good.scores = static_cast<float*>(memory.data());
  good.ids = static_cast<std::int32_t*>(memory.data());
  expect_pointers(desc, good,
                  std::vector{pointer_row("logits", &A::logits, "(T, E)"),
                              pointer_row("scores", &A::scores, "(T, K) float", 4),
                              pointer_row("ids", &A::ids, "(T, K) int32", 4)});
  desc.selection_bias = desc.expert_scale = true;
  good.selection_bias = good.expert_scale = static_cast<const float*>(memory.data());
  good.probabilities = static_cast<float*>(memory.data());
  expect_pointers(desc, good,
                  std::vector{pointer_row("selection_bias", &A::selection_bias, "(E) float", 4),
                              pointer_row("expert_scale", &A::expert_scale, "(E) float", 4),
                              pointer_row("probabilities", &A::probabilities, "(T, K) float", 4)});
}

MetadataDesc metadata_desc() {
  MetadataDesc desc;
  desc.tokens = kTokens;
  desc.experts = kExperts;
  desc.list_length = kRows;
  return desc;
}

TEST(BadOp, Metadata) {
  using D = MetadataDesc;
  expect_refused<D>(
      metadata_desc(),
      {{"list_length: got -1, allowed: 0 to 2147483647", [](D* d) { d->list_length = -1; }},
       {"list_length: got 10, allowed: 0", [](D* d) { d->top_k = 2; }},
       {"top_k: got -1, allowed: 0 to 4", [](D* d) { d->top_k = -1; }},
       {"top_k: got 5, allowed: 0 to 4", [](D* d) { d->top_k = 5; }},
       {"row_capacity: got 1, allowed: 0", [](D* d) { d->row_capacity = 1; }},
       {"row_capacity: got 11, allowed: 0 to 10",
        [](D* d) {
          d->top_k = 2;
          d->list_length = 0;
          d->row_capacity = 11;
        }},
       {"assume_sorted: got true, allowed: false unless top_k is 0 (lists)", [](D* d) {
          d->top_k = 2;
          d->list_length = 0;
          d->assume_sorted = true;
        }}});
  using A = MetadataArgs;
  const GuardedBuffer memory(64);
  auto* const ints = static_cast<std::int32_t*>(memory.data());
  A good;
  good.slot_experts = good.slot_tokens = ints;
  good.slot_scores = good.row_scores = static_cast<float*>(memory.data());
  good.counts = good.offsets = good.row_tokens = good.row_slots = good.slot_rows = ints;
  good.token_offsets = good.token_slots = good.expert_order = ints;
  expect_pointers(metadata_desc(), good,
                  std::vector{pointer_row("slot_experts", &A::slot_experts, "(S) int32", 4),
                              pointer_row("slot_tokens", &A::slot_tokens, "(S) int32", 4),
                              pointer_row("slot_scores", &A::slot_scores, "(S) float", 4),
                              pointer_row("counts", &A::counts, "(E) int32", 4),
                              pointer_row("offsets", &A::offsets, "(E+1) int32", 4),
                              pointer_row("row_tokens", &A::row_tokens, "(S) int32", 4),
                              pointer_row("row_slots", &A::row_slots, "(S) int32", 4),
                              pointer_row("slot_rows", &A::slot_rows, "(S) int32", 4),
                              pointer_row("row_scores", &A::row_scores, "", 4, true),
                              pointer_row("token_offsets", &A::token_offsets, "(T+1) int32", 4),
                              pointer_row("token_slots", &A::token_slots, "(S) int32", 4),
                              pointer_row("expert_order", &A::expert_order, "", 4, true)});
}

TEST(BadOp, MetadataIds) {
  struct Row {
    const char* message;
    std::int32_t token, expert;
  };
  for (const Row& row :
       {Row{"token ids: got 5 at position 2, allowed: 0 to 4", 5, 0},
        // A sentinel's token must be one too.
        Row{"token ids: got -2147483648 at position 2, allowed: 0 to 4", INT_MIN, -7}}) {
    const MetadataDesc desc = metadata_desc();
    std::vector<std::int32_t> tokens(kRows, 1), experts(kRows, 1);
    tokens[2] = row.token;
    experts[2] = row.expert;
    Arena arena;
    MetadataArgs args;
    args.slot_experts = arena.input("slot_experts", experts);
    args.slot_tokens = arena.input("slot_tokens", tokens);
    args.counts = arena.output_int32("counts", kExperts);
    args.offsets = arena.output_int32("offsets", kExperts + 1);
    args.row_tokens = arena.output_int32("row_tokens", kRows);
    args.row_slots = arena.output_int32("row_slots", kRows);
    args.slot_rows = arena.output_int32("slot_rows", kRows);
    args.token_offsets = arena.output_int32("token_offsets", kTokens + 1);
    args.token_slots = arena.output_int32("token_slots", kRows);
    const auto plan = make_plan(desc);
    const std::size_t bytes = plan.value().workspace_bytes();
    const Status status = plan.value().run(args, {arena.output("workspace", bytes, 256), bytes});
    EXPECT_EQ(status.code(), StatusCode::invalid_data);
    EXPECT_STREQ(status.message(), row.message);
    EXPECT_TRUE(arena.outputs_untouched());
  }
}

TEST(BadOp, Aggregate) {
  AggregateDesc desc;
  desc.tokens = kTokens;
  desc.rows = kRows;
  desc.hidden = kHidden;
  desc.dtype = DType::f32;
  using D = AggregateDesc;
  expect_refused<D>(
      desc,
      {{"rows: got -1, allowed: 0 to 2147483647", [](D* d) { d->rows = -1; }},
       {"hidden: got 9, allowed: multiples of 8 from 8 to 1048576", [](D* d) { d->hidden = 9; }},
       {"top_k: got -1, allowed: 0 to 65536", [](D* d) { d->top_k = -1; }},
       {"rows: got 10, allowed: 0 to 5", [](D* d) { d->top_k = 1; }},
       {"experts: got -1, allowed: 0 to 65536", [](D* d) { d->experts = -1; }},
       {"top_k: got 0, allowed: 1 to 4", [](D* d) { d->experts = 4; }},
       {"top_k: got 65, allowed: 1 to 64",
        [](D* d) {
          d->experts = 100;
          d->top_k = 65;
          d->rows = 65 * kTokens;
        }},
       {"dtype: got f16, allowed: f32, bf16 (on the CPU)", [](D* d) { d->dtype = DType::f16; }}});
  using A = AggregateArgs;
  const GuardedBuffer memory(64);
  void* const p = memory.data();
  A good;
  good.rows = good.addend = good.out = p;
  good.slot_rows = good.token_offsets = good.token_slots = static_cast<const std::int32_t*>(p);
  good.slot_scores = static_cast<const float*>(p);
  expect_pointers(desc, good,
                  std::vector{pointer_row("rows", &A::rows, "(R, d)"),
                              pointer_row("slot_rows", &A::slot_rows, "(S) int32", 4),
                              pointer_row("token_offsets", &A::token_offsets, "(T+1) int32", 4),
                              pointer_row("token_slots", &A::token_slots, "", 4, true),
                              pointer_row("slot_scores", &A::slot_scores, "", 4, true),
                              pointer_row("addend", &A::addend, "", 4, true),
                              pointer_row("out", &A::out, "(T, d)")});

  A routed = good;
  routed.slot_experts = routed.slot_rows;
  routed.dlogits = routed.router_w = p;
  const auto refusal = [&] {
    return std::string(make_plan(desc).value().run(routed, {}).message());
  };
  EXPECT_EQ(refusal(), "router_w: got a pointer, allowed: null without experts");
  desc.top_k = 2;
  desc.experts = kExperts;
  EXPECT_EQ(refusal(), "slot_scores: got a pointer, allowed: null with router_w");
  routed.slot_scores = nullptr;
  expect_pointers(desc, routed,
                  std::vector{pointer_row("slot_experts", &A::slot_experts, "(S) int32", 4),
                              pointer_row("dlogits", &A::dlogits, "(T, E)"),
                              pointer_row("router_w", &A::router_w, "", 4, true)});

  // Tokens have slots where no expert has a row.
  desc.rows = 0;
  routed.rows = nullptr;
  routed.slot_experts = nullptr;
  EXPECT_EQ(refusal(), "slot_experts: got null, allowed: a pointer to (S) int32");
  routed.slot_rows = nullptr;
  EXPECT_EQ(refusal(), "slot_rows: got null, allowed: a pointer to (S) int32");
  const auto combine =
      make_plan(CombineDesc{.tokens = kTokens, .hidden = kHidden, .top_k = 2, .dtype = DType::f32});
  EXPECT_EQ(std::string(combine.value().forward({.out = p}, {}).message()),
            "slot_rows: got null, allowed: a pointer to (S) int32");
  EXPECT_TRUE(memory.untouched());
}

TEST(BadOp, ScoreGrad) {
  ScoreGradDesc desc;
  desc.tokens = kTokens;
  desc.experts = kExperts;
  desc.top_k = 2;
  desc.rows = kRows;
  desc.dtype = DType::f32;
  desc.order = RouterOrder::score_then_select;
  using D = ScoreGradDesc;
  expect_refused<D>(desc, {{"rows: got 11, allowed: 10", [](D* d) { d->rows = 11; }},
                           {"top_k: got 0, allowed: 1 to experts (4)", [](D* d) { d->top_k = 0; }},
                           {"router_order: got score_then_select, allowed: select_then_score (the "
                            "default) without logits",
                            [](D* d) { d->input = RouterInput::ids_and_weights; }},
                           {"top_k: got 2, allowed: 0",
                            [](D* d) {
                              d->input = RouterInput::lists;
                              d->order = RouterOrder::select_then_score;
                            }},
                           {"router_input: got 5, allowed: projection, logits, logits_and_ids, "
                            "ids_and_weights, lists",
                            [](D* d) { d->input = static_cast<RouterInput>(5); }},
                           {"router_order: got 5, allowed: select_then_score, score_then_select",
                            [](D* d) { d->order = static_cast<RouterOrder>(5); }}});
  using A = ScoreGradArgs;
  const GuardedBuffer memory(64);
  void* const p = memory.data();
  A good;
  good.row_dscores = good.slot_scores = good.dscores = static_cast<float*>(p);
  good.slot_rows = good.slot_experts = static_cast<const std::int32_t*>(p);
  good.logits = good.dlogits_in = good.dlogits = p;
  const auto dscores = pointer_row("row_dscores", &A::row_dscores, "(R) float", 4);
  const auto rows = pointer_row("slot_rows", &A::slot_rows, "(R) int32", 4);
  expect_pointers(
      desc, good,
      std::vector{dscores, rows, pointer_row("slot_scores", &A::slot_scores, "(R) float", 4),
                  pointer_row("slot_experts", &A::slot_experts, "(R) int32", 4),
                  pointer_row("logits", &A::logits, "(T, E)"),
                  pointer_row("dlogits_in", &A::dlogits_in, "", 4, true),
                  pointer_row("dlogits", &A::dlogits, "(T, E)")});
  desc.order = RouterOrder::select_then_score;
  desc.input = RouterInput::ids_and_weights;
  expect_pointers(desc, good,
                  std::vector{dscores, rows, pointer_row("dscores", &A::dscores, "(R) float", 4)});
  desc.input = RouterInput::lists;
  desc.top_k = 0;
  expect_pointers(desc, good,
                  std::vector{dscores, rows, pointer_row("dscores", &A::dscores, "(R) float", 4)});
}

TEST(BadOp, UpdateSelectionBias) {
  UpdateSelectionBiasDesc desc{kExperts};
  using D = UpdateSelectionBiasDesc;
  expect_refused<D>(
      desc, {{"experts: got 0, allowed: 1 to 65536", [](D* d) { d->experts = 0; }},
             {"experts: got 65537, allowed: 1 to 65536", [](D* d) { d->experts = 65537; }}});
  using A = UpdateSelectionBiasArgs;
  const GuardedBuffer memory(64);
  A good;
  good.counts = static_cast<const std::int32_t*>(memory.data());
  good.selection_bias = static_cast<float*>(memory.data());
  good.rate = 0.5f;
  expect_pointers(desc, good,
                  std::vector{pointer_row("counts", &A::counts, "(E) int32", 4),
                              pointer_row("selection_bias", &A::selection_bias, "(E) float", 4)});
  const auto plan = make_plan(desc);
  using Limits = std::numeric_limits<float>;
  for (const auto& [rate, text] :
       {std::pair{-1e-9f, "-1e-09"}, {Limits::infinity(), "inf"}, {Limits::quiet_NaN(), "nan"}}) {
    A args = good;
    args.rate = rate;
    EXPECT_EQ(plan.value().run(args).message(),
              "rate: got " + std::string(text) + ", allowed: finite numbers from 0 on");
  }
  EXPECT_TRUE(memory.untouched());
}

TEST(BadOp, AuxLoss) {
  AuxLossDesc desc;
  desc.tokens = kTokens;
  desc.experts = kExperts;
  desc.dtype = DType::f32;
  using D = AuxLossDesc;
  expect_refused<D>(
      desc,
      {{"tokens: got -1, allowed: 0 to 2147483647", [](D* d) { d->tokens = -1; }},
       {"experts: got 0, allowed: 1 to 65536", [](D* d) { d->experts = 0; }},
       {"dtype: got f16, allowed: f32, bf16 (on the CPU)", [](D* d) { d->dtype = DType::f16; }},
       {"score: got sigmoid, allowed: softmax (the default) with loss z",
        [](D* d) {
          d->loss = RouterLoss::z;
          d->score = RouterScore::sigmoid;
        }},
       {"sequences: got 5, allowed: 1",
        [](D* d) {
          d->loss = RouterLoss::z;
          d->sequences = 5;
        }},
       {"sequences: got 0, allowed: 1 to 5", [](D* d) { d->sequences = 0; }},
       {"sequences: got 6, allowed: 1 to 5", [](D* d) { d->sequences = 6; }},
       {"sequences: got 2, allowed: divisors of tokens", [](D* d) { d->sequences = 2; }}});
  using A = AuxLossArgs;
  const GuardedBuffer memory(64);
  A good;
  good.logits = good.dlogits = memory.data();
  good.counts = static_cast<const std::int32_t*>(memory.data());
  good.dloss = good.loss = static_cast<float*>(memory.data());
  const auto logits = pointer_row("logits", &A::logits, "(T, E)");
  const auto counts = pointer_row("counts", &A::counts, "(B, E) int32", 4);
  expect_pointers(desc, good,
                  std::vector{logits, counts, pointer_row("loss", &A::loss, "(1) float", 4)});
  desc.backward = true;
  expect_pointers(desc, good,
                  std::vector{logits, counts, pointer_row("dloss", &A::dloss, "(1) float", 4),
                              pointer_row("dlogits", &A::dlogits, "(T, E)")});
  // The z-loss reads no counts. A mask may start at any byte, so null is the one address to refuse.
  desc.loss = RouterLoss::z;
  desc.backward = false;
  good.counts = nullptr;
  expect_pointers(desc, good, std::vector{logits, pointer_row("loss", &A::loss, "(1) float", 4)});
  desc.masked = true;
  const auto plan = make_plan(desc);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const std::size_t bytes = plan.value().workspace_bytes();
  const GuardedBuffer workspace(bytes, 256);
  EXPECT_STREQ(plan.value().run(good, {workspace.data(), bytes}).message(),
               "token_mask: got null, allowed: a pointer to (T) uint8");
  EXPECT_TRUE(memory.untouched() && workspace.untouched());
}

}  // namespace
}  // namespace sonicmoe::testkit
