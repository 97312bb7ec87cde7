// Everything that a layer refuses, with the exact words, and that it writes nothing then.
#include <gtest/gtest.h>

#include <climits>
#include <limits>

#include "sonicmoe/info.h"
#include "tests/bad_input/pointer_rows.h"
#include "tests/plain_layer.h"

namespace sonicmoe::testkit {
namespace {

constexpr StatusCode kArgument = StatusCode::invalid_argument;
constexpr StatusCode kUnsupported = StatusCode::unsupported;
constexpr StatusCode kData = StatusCode::invalid_data;

LayerDesc router_desc() {
  LayerDesc d;
  d.tokens = 5;
  d.experts.hidden = 16;
  d.experts.intermediate = 8;
  d.router.experts = 4;
  d.router.top_k = 2;
  d.experts.dtype = DType::f32;
  return d;
}

LayerDesc given_desc() {
  LayerDesc d = router_desc();
  d.router.input = RouterInput::lists;
  d.router.top_k = 0;
  d.router.list_length = 7;
  return d;
}

LayerDesc ids_desc() {
  LayerDesc d = router_desc();
  d.router.input = RouterInput::ids_and_weights;
  return d;
}

LayerDesc logits_desc(RouterInput input) {
  LayerDesc d = router_desc();
  d.router.input = input;
  d.router.order = RouterOrder::score_then_select;
  return d;
}

/// What make_plan is asked for.
struct Request {
  LayerDesc desc;
  Device device;
  Options options;
};

struct BadPlan {
  StatusCode code;
  const char* message;
  std::function<void(Request*)> spoil;
};

void expect_refused(const LayerDesc& good, const std::vector<BadPlan>& table) {
  ASSERT_TRUE(make_plan(good).ok());
  for (const BadPlan& row : table) {
    Request request{good, {}, {}};
    row.spoil(&request);
    const auto plan = make_plan(request.desc, request.device, request.options);
    ASSERT_FALSE(plan.ok()) << row.message;
    EXPECT_EQ(plan.status().code(), row.code) << row.message;
    EXPECT_STREQ(plan.status().message(), row.message);
  }
}

TEST(BadLayer, Sizes) {
  expect_refused(router_desc(),
                 {{kArgument, "tokens: got -1, allowed: 0 to 2147483647",
                   [](Request* r) { r->desc.tokens = -1; }},
                  {kArgument, "tokens: got 2147483648, allowed: 0 to 2147483647",
                   [](Request* r) { r->desc.tokens = 1L << 31; }},
                  {kArgument, "hidden: got 0, allowed: multiples of 8 from 8 to 1048576",
                   [](Request* r) { r->desc.experts.hidden = 0; }},
                  {kArgument, "hidden: got -8, allowed: multiples of 8 from 8 to 1048576",
                   [](Request* r) { r->desc.experts.hidden = -8; }},
                  {kArgument, "hidden: got 12, allowed: multiples of 8 from 8 to 1048576",
                   [](Request* r) { r->desc.experts.hidden = 12; }},
                  {kArgument, "hidden: got 1048584, allowed: multiples of 8 from 8 to 1048576",
                   [](Request* r) { r->desc.experts.hidden = (1 << 20) + 8; }},
                  {kArgument, "intermediate: got 7, allowed: multiples of 8 from 8 to 1048576",
                   [](Request* r) { r->desc.experts.intermediate = 7; }},
                  {kArgument, "experts: got 0, allowed: 1 to 65536",
                   [](Request* r) { r->desc.router.experts = 0; }},
                  {kArgument, "experts: got 65537, allowed: 1 to 65536",
                   [](Request* r) { r->desc.router.experts = 65537; }},
                  {kArgument, "top_k: got 0, allowed: 1 to experts (4)",
                   [](Request* r) { r->desc.router.top_k = 0; }},
                  {kArgument, "top_k: got 5, allowed: 1 to experts (4)",
                   [](Request* r) { r->desc.router.top_k = 5; }},
                  {kArgument, "top_k: got -2, allowed: 1 to experts (4)",
                   [](Request* r) { r->desc.router.top_k = -2; }},
                  {kArgument, "tokens * top_k: got 2147483648, allowed: at most 2147483647",
                   [](Request* r) { r->desc.tokens = 1 << 30; }},
                  {kArgument, "tokens: got 9223372036854775807, allowed: 0 to 2147483647",
                   [](Request* r) { r->desc.tokens = INT64_MAX; }},
                  {kArgument, "list_length: got 3, allowed: 0",
                   [](Request* r) { r->desc.router.list_length = 3; }}});
  expect_refused(given_desc(), {{kArgument, "list_length: got -1, allowed: 0 to 2147483647",
                                 [](Request* r) { r->desc.router.list_length = -1; }},
                                {kArgument, "list_length: got 2147483648, allowed: 0 to 2147483647",
                                 [](Request* r) { r->desc.router.list_length = 1L << 31; }},
                                {kArgument, "top_k: got 2, allowed: 0",
                                 [](Request* r) { r->desc.router.top_k = 2; }}});
}

TEST(BadLayer, EnumsAndCombinations) {
  expect_refused(
      router_desc(),
      {{kArgument, "dtype: got 3, allowed: f32, bf16, f16",
        [](Request* r) { r->desc.experts.dtype = static_cast<DType>(3); }},
       {kUnsupported, "dtype: got f16, allowed: f32, bf16 (on the CPU)",
        [](Request* r) { r->desc.experts.dtype = DType::f16; }},
       {kArgument,
        "activation: got 13, allowed: swiglu, geglu, geglu_tanh, reglu, relu, relu_sq, gelu, "
        "gelu_tanh, silu, swiglu_clamp_after, swiglu_oai, situ_glu, quick_geglu",
        [](Request* r) { r->desc.experts.activation = static_cast<Activation>(13); }},
       {kArgument,
        "activation: got -1, allowed: swiglu, geglu, geglu_tanh, reglu, relu, relu_sq, gelu, "
        "gelu_tanh, silu, swiglu_clamp_after, swiglu_oai, situ_glu, quick_geglu",
        [](Request* r) { r->desc.experts.activation = static_cast<Activation>(-1); }},
       {kArgument,
        "w1_layout: got 5, allowed: interleaved, concatenated, separate, transposed, "
        "transposed_interleaved",
        [](Request* r) { r->desc.experts.w1_layout = static_cast<W1Layout>(5); }},
       {kArgument,
        "w1_layout: got separate, allowed: interleaved, concatenated, transposed, "
        "transposed_interleaved for an activation without a gate",
        [](Request* r) {
          r->desc.experts.activation = Activation::relu;
          r->desc.experts.w1_layout = W1Layout::separate;
        }},
       {kArgument, "router_order: got 2, allowed: select_then_score, score_then_select",
        [](Request* r) { r->desc.router.order = static_cast<RouterOrder>(2); }},
       {kArgument,
        "router_input: got 5, allowed: projection, logits, logits_and_ids, ids_and_weights, lists",
        [](Request* r) { r->desc.router.input = static_cast<RouterInput>(5); }},
       {kArgument, "assume_sorted: got true, allowed: false unless router_input is lists",
        [](Request* r) { r->desc.router.assume_sorted = true; }},
       {kArgument, "max_rows: got 9, allowed: 0", [](Request* r) { r->desc.max_rows = 9; }}});
  expect_refused(
      given_desc(),
      {{kArgument, "renormalize: got true, allowed: false without logits",
        [](Request* r) { r->desc.router.renormalize = true; }},
       {kArgument,
        "router_order: got score_then_select, allowed: select_then_score (the default) "
        "without logits",
        [](Request* r) { r->desc.router.order = RouterOrder::score_then_select; }},
       {kArgument, "router_input: got lists, allowed: projection, logits with token rounding",
        [](Request* r) { r->desc.rounding.tile = 128; }}});
  expect_refused(
      ids_desc(),
      {{kArgument,
        "router_input: got logits_and_ids, allowed: projection, logits with token rounding",
        [](Request* r) {
          r->desc.router.input = RouterInput::logits_and_ids;
          r->desc.rounding.tile = 128;
        }},
       {kArgument,
        "router_input: got ids_and_weights, allowed: projection, logits with token rounding",
        [](Request* r) { r->desc.rounding.tile = 128; }},
       {kArgument, "renormalize: got true, allowed: false without logits",
        [](Request* r) { r->desc.router.renormalize = true; }},
       {kArgument, "list_length: got 3, allowed: 0",
        [](Request* r) { r->desc.router.list_length = 3; }},
       {kArgument, "max_rows: got -1, allowed: 0 to 2147483647",
        [](Request* r) { r->desc.max_rows = -1; }},
       {kArgument, "top_k: got 5, allowed: 1 to experts (4)",
        [](Request* r) { r->desc.router.top_k = 5; }}});
}

TEST(BadLayer, RouterOptions) {
  const auto set = [](auto RouterDesc::*field, auto value) {
    return [=](Request* r) { r->desc.router.*field = value; };
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  LayerDesc sigmoid = router_desc();
  sigmoid.router.score = RouterScore::sigmoid;
  sigmoid.router.renormalize = true;
  expect_refused(
      sigmoid,
      {{kArgument, "router_score: got 3, allowed: softmax, sigmoid, sqrt_softplus",
        set(&RouterDesc::score, static_cast<RouterScore>(3))},
       {kArgument, "eps: got -1, allowed: finite numbers from 0 on", set(&RouterDesc::eps, -1.0f)},
       {kArgument, "eps: got nan, allowed: finite numbers from 0 on", set(&RouterDesc::eps, nan)},
       {kArgument, "eps: got inf, allowed: finite numbers from 0 on", set(&RouterDesc::eps, inf)},
       {kArgument, "scale: got 0, allowed: finite numbers above 0", set(&RouterDesc::scale, 0.0f)},
       {kArgument, "scale: got -2.5, allowed: finite numbers above 0",
        set(&RouterDesc::scale, -2.5f)},
       {kArgument, "scale: got inf, allowed: finite numbers above 0", set(&RouterDesc::scale, inf)},
       {kArgument, "groups: got 0, allowed: 1 to 1024", set(&RouterDesc::groups, 0L)},
       {kArgument, "groups: got 1025, allowed: 1 to 1024", set(&RouterDesc::groups, 1025L)},
       {kArgument, "groups: got 3, allowed: divisors of experts (4)", set(&RouterDesc::groups, 3L)},
       {kArgument, "kept_groups: got 2, allowed: 1", set(&RouterDesc::kept_groups, 2L)},
       {kArgument, "kept_groups: got 3, allowed: 1 to 2",
        [](Request* r) { r->desc.router.groups = 2, r->desc.router.kept_groups = 3; }},
       {kArgument,
        "kept_groups: got 1, allowed: so many that top_k experts stay: top_k at most kept_groups "
        "* experts / groups",
        [](Request* r) { r->desc.router.groups = 4; }},
       {kArgument, "group_score: got sum_of_two, allowed: largest with one expert a group",
        [](Request* r) {
          r->desc.router.groups = r->desc.router.kept_groups = 4;
          r->desc.router.group_score = GroupScore::sum_of_two;
        }},
       {kArgument, "f32_router_w: got true, allowed: false without f32_logits",
        set(&RouterDesc::f32_router_w, true)},
       {kArgument, "router_score: got sigmoid, allowed: softmax with token rounding",
        [](Request* r) { r->desc.rounding.tile = 2; }}});
  expect_refused(
      router_desc(),
      {{kArgument,
        "eps: got 0.5, allowed: 0 unless renormalize divides by a sum (a softmax over the top-K "
        "adds up to 1)",
        [](Request* r) { r->desc.router.eps = 0.5f, r->desc.router.renormalize = true; }}});
  LayerDesc rounded = router_desc();
  rounded.router.order = RouterOrder::score_then_select;
  rounded.router.renormalize = true;
  rounded.rounding.tile = 2;
  expect_refused(
      rounded,
      {{kArgument, "eps: got 0.5, allowed: 0 with token rounding", set(&RouterDesc::eps, 0.5f)},
       {kArgument, "scale: got 2, allowed: 1 with token rounding", set(&RouterDesc::scale, 2.0f)},
       {kArgument, "logit_bias: got true, allowed: false with token rounding",
        set(&RouterDesc::logit_bias, true)},
       {kArgument, "selection_bias: got true, allowed: false with token rounding",
        set(&RouterDesc::selection_bias, true)},
       {kArgument, "expert_scale: got true, allowed: false with token rounding",
        set(&RouterDesc::expert_scale, true)},
       {kArgument, "groups: got 2, allowed: 1 with token rounding",
        [](Request* r) { r->desc.router.groups = r->desc.router.kept_groups = 2; }}});
  const BadPlan logit_bias = {
      kArgument, "logit_bias: got true, allowed: false unless router_input is projection",
      set(&RouterDesc::logit_bias, true)};
  const BadPlan fp32 = {
      kArgument, "f32_router_w: got true, allowed: false unless router_input is projection",
      [](Request* r) { r->desc.router.f32_logits = r->desc.router.f32_router_w = true; }};
  expect_refused(logits_desc(RouterInput::logits), {logit_bias, fp32});
  expect_refused(logits_desc(RouterInput::logits_and_ids),
                 {logit_bias,
                  fp32,
                  {kArgument,
                   "selection_bias: got true, allowed: false unless router_input is projection, "
                   "logits",
                   set(&RouterDesc::selection_bias, true)},
                  {kArgument, "groups: got 2, allowed: 1 unless router_input is projection, logits",
                   [](Request* r) { r->desc.router.groups = r->desc.router.kept_groups = 2; }}});
  for (const LayerDesc& desc : {ids_desc(), given_desc()}) {
    expect_refused(
        desc,
        {{kArgument, "router_score: got sigmoid, allowed: softmax (the default) without logits",
          set(&RouterDesc::score, RouterScore::sigmoid)},
         {kArgument, "scale: got 2, allowed: the default without logits",
          set(&RouterDesc::scale, 2.0f)},
         {kArgument, "expert_scale: got true, allowed: false without logits",
          set(&RouterDesc::expert_scale, true)},
         {kArgument, "f32_logits: got true, allowed: false without logits",
          set(&RouterDesc::f32_logits, true)},
         logit_bias});
  }
}

TEST(BadLayer, DevicesAndOptions) {
  expect_refused(
      router_desc(),
      {{kArgument, "device.type: got 2, allowed: cpu, cuda",
        [](Request* r) { r->device.type = static_cast<DeviceType>(2); }},
       {kArgument, "device.index: got 1, allowed: 0", [](Request* r) { r->device.index = 1; }},
       {kArgument, "device.index: got -1, allowed: 0 to 2147483647",
        [](Request* r) {
          r->device.type = DeviceType::cuda;
          r->device.index = -1;
        }},
       {kArgument, "threads: got -1, allowed: 0 to 4096",
        [](Request* r) { r->options.threads = -1; }},
       {kArgument, "threads: got 4097, allowed: 0 to 4096",
        [](Request* r) { r->options.threads = 4097; }},
       {kArgument, "multiprocessors: got 100, allowed: 0 (on the CPU)",
        [](Request* r) { r->options.multiprocessors = 100; }},
       {kUnsupported, "kernel: got cpu.nothing, allowed: a name or backend of sonicmoe::kernels()",
        [](Request* r) { r->options.kernel = "cpu.nothing"; }},
       {kUnsupported, "dtype: got f32, allowed: bf16",
        [](Request* r) { r->options.kernel = "cpu-avx512bf16.up_proj"; }},
       {kUnsupported, "dtype: got bf16, allowed: f32", [](Request* r) {
          r->options.kernel = "cpu-avx512.up_proj";
          r->desc.experts.dtype = DType::bf16;
        }}});
}

Case make_case(const LayerDesc& desc) {
  Case c = custom_case(desc, 1);
  c.outside_dlogits = desc.router.has_logits();
  return c;
}

/// Refused with this message, and neither an output nor the workspace was touched.
void expect_forward(PlainLayer* layer, const ForwardArgs& args, Workspace workspace,
                    StatusCode code, const std::string& message) {
  const Status status = layer->plan.forward(args, workspace);
  EXPECT_EQ(status.code(), code) << message;
  EXPECT_EQ(status.message(), message);
  EXPECT_TRUE(layer->arena.outputs_untouched()) << message;
}

void expect_backward(PlainLayer* layer, const BackwardArgs& args, Workspace workspace,
                     StatusCode code, const std::string& message) {
  const Status status = layer->plan.backward(args, workspace);
  EXPECT_EQ(status.code(), code) << message;
  EXPECT_EQ(status.message(), message);
  EXPECT_TRUE(layer->arena.outputs_untouched()) << message;
}

/// A layer that needs every pointer there is, but for the lists.
LayerDesc demanding_desc() {
  LayerDesc d = router_desc();
  d.router.order = RouterOrder::score_then_select;
  d.router.logit_bias = d.router.selection_bias = d.router.expert_scale = true;
  d.experts.w1_layout = W1Layout::separate;
  d.experts.bias = true;
  return d;
}

TEST(BadLayer, ForwardPointers) {
  using A = ForwardArgs;
  const auto check = [](const LayerDesc& desc, const std::vector<PointerRow<A>>& rows) {
    PlainLayer layer(make_case(desc), 2);
    for_each_bad_pointer(layer.forward, rows, [&](const A& args, const std::string& message) {
      expect_forward(&layer, args, layer.workspace, kArgument, message);
    });
    EXPECT_TRUE(layer.plan.forward(layer.forward, layer.workspace).ok());
  };
  check(demanding_desc(),
        {pointer_row("x", &A::x, "(T, d)"), pointer_row("router_w", &A::router_w, "(E, d)"),
         pointer_row("logit_bias", &A::logit_bias, "(E) float", 4),
         pointer_row("selection_bias", &A::selection_bias, "(E) float", 4),
         pointer_row("expert_scale", &A::expert_scale, "(E) float", 4),
         pointer_row("w1", &A::w1, "the gate rows (E, n, d)"),
         pointer_row("w1_up", &A::w1_up, "the up rows (E, n, d)"),
         pointer_row("b1", &A::b1, "the gate biases (E, n)"),
         pointer_row("b1_up", &A::b1_up, "the up biases (E, n)"),
         pointer_row("w2", &A::w2, "(E, d, n)"), pointer_row("b2", &A::b2, "(E, d)"),
         pointer_row("o", &A::o, "(T, d)"), pointer_row("logits", &A::logits, "(T, E)"),
         pointer_row("counts", &A::counts, "(E) int32", 4),
         pointer_row("scores", &A::scores, "", 4, true),
         pointer_row("expert_ids", &A::expert_ids, "", 4, true),
         pointer_row("preact", &A::preact, "(R, 2n or n)"),
         pointer_row("routing", &A::routing, "saved_bytes().routing bytes")});
  LayerDesc given = given_desc();
  given.experts.bias = true;
  check(given,
        {pointer_row("w1", &A::w1, "(E, 2n or n, d)"), pointer_row("b1", &A::b1, "(E, 2n or n)"),
         pointer_row("list_tokens", &A::list_tokens, "(L) int32", 4),
         pointer_row("list_experts", &A::list_experts, "(L) int32", 4),
         pointer_row("list_scores", &A::list_scores, "(L) float", 4)});
  given.experts.w1_layout = W1Layout::transposed;
  check(given, {pointer_row("w1", &A::w1, "(E, d, 2n or n)"),
                pointer_row("b1", &A::b1, "(E, 2n or n)"), pointer_row("w2", &A::w2, "(E, n, d)")});
  const auto logits = pointer_row("given_logits", &A::given_logits, "(T, E)");
  const auto ids = pointer_row("given_ids", &A::given_ids, "(T, K) int32", 4);
  check(ids_desc(), {ids, pointer_row("given_weights", &A::given_weights, "(T, K) float", 4)});
  check(logits_desc(RouterInput::logits), {logits});
  check(logits_desc(RouterInput::logits_and_ids),
        {logits, ids, pointer_row("scores", &A::scores, "", 4, true)});
}

TEST(BadLayer, BackwardPointers) {
  using A = BackwardArgs;
  const auto check = [](const LayerDesc& desc, const std::vector<PointerRow<A>>& rows) {
    PlainLayer layer(make_case(desc), 2);
    for_each_bad_pointer(layer.backward, rows, [&](const A& args, const std::string& message) {
      expect_backward(&layer, args, layer.workspace, kArgument, message);
    });
    EXPECT_TRUE(layer.plan.forward(layer.forward, layer.workspace).ok());
    EXPECT_TRUE(layer.plan.backward(layer.backward, layer.workspace).ok());
  };
  check(demanding_desc(), {pointer_row("x", &A::x, "(T, d)"),
                           pointer_row("router_w", &A::router_w, "(E, d)"),
                           pointer_row("expert_scale", &A::expert_scale, "(E) float", 4),
                           pointer_row("dlogit_bias", &A::dlogit_bias, "", 4, true),
                           pointer_row("dexpert_scale", &A::dexpert_scale, "", 4, true),
                           pointer_row("w1", &A::w1, "the gate rows (E, n, d)"),
                           pointer_row("w1_up", &A::w1_up, "the up rows (E, n, d)"),
                           pointer_row("w2", &A::w2, "(E, d, n)"),
                           pointer_row("b2", &A::b2, "(E, d)"),
                           pointer_row("logits", &A::logits, "(T, E)"),
                           pointer_row("preact", &A::preact, "(R, 2n or n)"),
                           pointer_row("routing", &A::routing, "saved_bytes().routing bytes"),
                           pointer_row("dout", &A::dout, "(T, d)"),
                           pointer_row("dlogits", &A::dlogits, "", 4, true),
                           pointer_row("dx", &A::dx, "", 4, true),
                           pointer_row("drouter_w", &A::drouter_w, "", 4, true),
                           pointer_row("dw1", &A::dw1, "the gate rows (E, n, d)"),
                           pointer_row("dw1_up", &A::dw1_up, "the up rows (E, n, d)"),
                           pointer_row("db1", &A::db1, "the gate biases (E, n)"),
                           pointer_row("db1_up", &A::db1_up, "the up biases (E, n)"),
                           pointer_row("dw2", &A::dw2, "", 4, true),
                           pointer_row("db2", &A::db2, "(E, d)")});
  check(given_desc(), {pointer_row("dw1", &A::dw1, "", 4, true),
                       pointer_row("dscores", &A::dscores, "(T, K) or (L) float", 4)});
  check(ids_desc(), {pointer_row("dscores", &A::dscores, "(T, K) or (L) float", 4)});
  for (const RouterInput input : {RouterInput::logits, RouterInput::logits_and_ids}) {
    check(logits_desc(input), {pointer_row("logits", &A::logits, "(T, E)"),
                               pointer_row("dlogits", &A::dlogits, "", 4, true),
                               pointer_row("dgiven_logits", &A::dgiven_logits, "(T, E)")});
  }
  LayerDesc transposed = router_desc();
  transposed.experts.w1_layout = W1Layout::transposed_interleaved;
  check(transposed,
        {pointer_row("w1", &A::w1, "(E, d, 2n or n)"), pointer_row("w2", &A::w2, "(E, n, d)")});
  LayerDesc brought = router_desc();
  brought.experts.dpreact_in_workspace = false;
  check(brought, {pointer_row("dpreact", &A::dpreact, "(R, 2n or n)")});
  brought.experts.recompute = Recompute::preact;
  check(brought, {pointer_row("dpreact", &A::dpreact, "(R, 2n or n)")});
  LayerDesc again = demanding_desc();
  again.experts.recompute = Recompute::preact;
  check(again, {pointer_row("b1", &A::b1, "the gate biases (E, n)"),
                pointer_row("b1_up", &A::b1_up, "the up biases (E, n)")});
}

// Two bytes off is right for bf16, and wrong for what is fp32 beside it.
TEST(BadLayer, PointersOfFp32BesideBf16) {
  LayerDesc desc = router_desc();
  desc.experts.dtype = DType::bf16;
  desc.router.order = RouterOrder::score_then_select;
  desc.router.f32_logits = desc.router.f32_router_w = true;
  PlainLayer layer(make_case(desc), 2);
  const auto move = []<class T>(T** pointer) {
    *pointer = reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(*pointer) + 2);
  };
  const auto expect = [](const Status& status, const std::string& argument) {
    EXPECT_EQ(status.code(), kArgument) << argument;
    const std::string message = status.message();
    EXPECT_EQ(message.substr(0, argument.size() + 1), argument + ":");
    EXPECT_NE(message.find("allowed: multiples of 4 bytes"), std::string::npos) << message;
  };
  ForwardArgs router_w = layer.forward, logits = layer.forward, routing = layer.forward;
  move(&router_w.router_w), move(&logits.logits), move(&routing.routing);
  expect(layer.plan.forward(router_w, layer.workspace), "router_w");
  expect(layer.plan.forward(logits, layer.workspace), "logits");
  expect(layer.plan.forward(routing, layer.workspace), "routing");
  BackwardArgs dlogits = layer.backward, drouter_w = layer.backward, kept = layer.backward;
  dlogits.dlogits = layer.forward.logits;
  move(&dlogits.dlogits), move(&drouter_w.drouter_w), move(&kept.logits);
  expect(layer.plan.backward(dlogits, layer.workspace), "dlogits");
  expect(layer.plan.backward(drouter_w, layer.workspace), "drouter_w");
  expect(layer.plan.backward(kept, layer.workspace), "logits");
  Tensor moved = layer.problem.x;
  moved.insert(moved.begin(), 0.0);
  ForwardArgs x = layer.forward;
  x.x = layer.arena.input("x behind a number", moved, DType::bf16);
  move(&x.x);
  EXPECT_TRUE(layer.plan.forward(x, layer.workspace).ok());
}

// What a plan does not use is ignored, wherever it points (but for the error word).
TEST(BadLayer, PointersThatAPlanIgnores) {
  const auto nowhere = []<class T>(T** pointer) { *pointer = reinterpret_cast<T*>(1); };
  LayerDesc rounded = router_desc();
  rounded.rounding.tile = 2;
  for (const LayerDesc& desc :
       {router_desc(), rounded, given_desc(), ids_desc(), logits_desc(RouterInput::logits)}) {
    const RouterDesc& router = desc.router;
    const bool rounds = desc.rounding.tile > 0;
    PlainLayer layer(make_case(desc), 2);
    nowhere(&layer.forward.b1_up);
    nowhere(&layer.forward.w1_up);
    if (!rounds) {
      nowhere(&layer.forward.frequency);
      nowhere(&layer.forward.draws);
    }
    if (!router.has_logits() || rounds) {
      nowhere(&layer.forward.scores);
      nowhere(&layer.forward.expert_ids);
    }
    if (!router.projects()) {
      nowhere(&layer.forward.router_w);
      nowhere(&layer.forward.logits);
    }
    if (router.projects() || !router.has_logits()) nowhere(&layer.forward.given_logits);
    nowhere(&layer.forward.logit_bias);
    nowhere(&layer.forward.selection_bias);
    nowhere(&layer.forward.expert_scale);
    if (!router.takes_ids()) nowhere(&layer.forward.given_ids);
    if (router.has_logits() || router.takes_lists()) nowhere(&layer.forward.given_weights);
    if (!router.takes_lists()) {
      nowhere(&layer.forward.list_tokens);
      nowhere(&layer.forward.list_experts);
      nowhere(&layer.forward.list_scores);
    }
    const Status status = layer.plan.forward(layer.forward, layer.workspace);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(layer.arena.damage(), "");
  }
}

TEST(BadLayer, Workspaces) {
  PlainLayer layer(make_case(router_desc()), 2);
  const auto check = [&](std::size_t needed, auto expect) {
    const std::string bytes = std::to_string(needed);
    expect(Workspace{layer.workspace.data, needed - 1},
           "workspace: got " + std::to_string(needed - 1) + " bytes, allowed: at least " + bytes);
    expect(Workspace{nullptr, 0}, "workspace: got 0 bytes, allowed: at least " + bytes);
    expect(Workspace{nullptr, needed},
           "workspace: got null, allowed: a pointer to memory of the plan's device");
    char text[128];
    char* const misaligned = static_cast<char*>(layer.workspace.data) + 128;
    std::snprintf(text, sizeof text, "workspace: got address %p, allowed: multiples of 256 bytes",
                  static_cast<void*>(misaligned));
    expect(Workspace{misaligned, needed}, text);
  };
  check(layer.plan.forward_workspace_bytes(), [&](Workspace w, const std::string& message) {
    expect_forward(&layer, layer.forward, w, kArgument, message);
  });
  check(layer.plan.backward_workspace_bytes(), [&](Workspace w, const std::string& message) {
    expect_backward(&layer, layer.backward, w, kArgument, message);
  });
}

TEST(BadLayer, BackwardOfAnInferencePlan) {
  LayerDesc desc = router_desc();
  desc.experts.inference = true;
  PlainLayer layer(make_case(desc), 2);
  expect_backward(&layer, layer.backward, layer.workspace, kArgument,
                  "inference: got true, allowed: false: an inference plan keeps nothing");
}

TEST(BadLayer, Lists) {
  struct Row {
    const char* message;
    std::size_t position;
    std::int32_t token, expert;
    bool sorted;
  };
  const Row rows[] = {
      {"token ids: got 5 at position 0, allowed: 0 to 4", 0, 5, 0, false},
      {"token ids: got -1 at position 6, allowed: 0 to 4", 6, -1, 0, false},
      // A sentinel's token must be one too.
      {"token ids: got 7 at position 2, allowed: 0 to 4", 2, 7, 4, false},
      {"token ids: got 7 at position 2, allowed: 0 to 4", 2, 7, -1, false},
      {"token ids: got 0 after 4 at position 6, allowed: ascending ids with assume_sorted", 6, 0, 0,
       true}};
  for (const Row& row : rows) {
    LayerDesc desc = given_desc();
    desc.router.assume_sorted = row.sorted;
    PlainLayer layer(make_case(desc), 2);
    std::vector<std::int32_t> tokens = {0, 1, 1, 2, 3, 4, 4}, experts = {0, 1, 2, 3, 0, 1, 2};
    tokens[row.position] = row.token;
    experts[row.position] = row.expert;
    layer.forward.list_tokens = tokens.data();
    layer.forward.list_experts = experts.data();
    expect_forward(&layer, layer.forward, layer.workspace, kData, row.message);
  }
}

// The logits are an output of the layer itself, so they are there to be looked at; nothing else
// is.
TEST(BadLayer, Logits) {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    LayerDesc desc = router_desc();
    desc.experts.dtype = dtype;
    PlainLayer layer(make_case(desc), 2);
    layer.problem.x[3 * 16 + 5] = nan;
    layer.forward.x = layer.arena.input("x with a NaN", layer.problem.x, dtype);
    const Status status = layer.plan.forward(layer.forward, layer.workspace);
    EXPECT_EQ(status.code(), kData);
    EXPECT_STREQ(status.message(),
                 "logits: got a NaN in the row of token 3, allowed: numbers below +inf, at least "
                 "one of them finite");
    for (const char* output : {"o", "counts", "scores", "expert_ids", "preact"}) {
      EXPECT_TRUE(layer.arena[output].untouched()) << output;
    }
  }
}

// Without a softmax a row of -inf is as good as any: all its scores are 0.
TEST(BadLayer, LogitsOfOtherScores) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const RouterScore score : {RouterScore::sigmoid, RouterScore::sqrt_softplus}) {
    LayerDesc desc = logits_desc(RouterInput::logits);
    desc.tokens = 2;
    desc.router.score = score;
    desc.router.renormalize = true;
    PlainLayer layer(make_case(desc), 2);
    const auto run = [&](double bad) {
      layer.arena.replace("given_logits", encode({0, 1, 2, 3, bad, bad, bad, bad}, DType::f32));
      return layer.plan.forward(layer.forward, layer.workspace);
    };
    EXPECT_EQ(run(kInf).message(),
              std::string("logits: got +inf in the row of token 1, allowed: numbers below +inf"));
    EXPECT_EQ(run(std::numeric_limits<double>::quiet_NaN()).message(),
              std::string("logits: got a NaN in the row of token 1, allowed: numbers below +inf"));
    ASSERT_TRUE(run(-kInf).ok());
    const Tensor scores = layer.arena.tensor("scores", DType::f32);
    EXPECT_EQ(Tensor(scores.begin() + 2, scores.end()), (Tensor{0, 0}));
    EXPECT_NEAR(scores[0] + scores[1], 1, 1e-6);
  }
}

// With ids of the caller a row is refused as a whole, and so are ids of -inf that a softmax runs
// over. Renormalised probabilities of such ids are 0.
TEST(BadLayer, LogitsOfGivenIds) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const std::string allowed =
      " of token 1, allowed: numbers below +inf, at least one of them finite";
  for (const RouterOrder order : {RouterOrder::select_then_score, RouterOrder::score_then_select}) {
    LayerDesc desc = logits_desc(RouterInput::logits_and_ids);
    desc.tokens = 2;
    desc.router.order = order;
    desc.router.renormalize = order == RouterOrder::score_then_select;
    const bool over_top_k = desc.router.over_top_k();
    PlainLayer layer(make_case(desc), 2);
    const auto expect = [&](const Tensor& logits, const std::vector<std::int32_t>& ids,
                            const std::string& got) {
      layer.arena.replace("given_logits", encode(logits, DType::f32));
      layer.forward.given_ids = ids.data();
      const Status status = layer.plan.forward(layer.forward, layer.workspace);
      EXPECT_EQ(status.message(), got.empty() ? got : "logits: got " + got + allowed);
    };
    const double nan = std::numeric_limits<double>::quiet_NaN();
    expect({0, 0, 0, 0, 0, nan, 0, 0}, {0, 1, 2, 3}, "a NaN in the row");
    expect({0, 0, 0, 0, 0, kInf, 0, 0}, {0, 1, -1, -1}, "+inf in the row");
    expect({0, 0, 0, 0, 0, -kInf, 0, -kInf}, {0, 1, 1, 3},
           over_top_k ? "only -inf at the ids" : "");
    if (!over_top_k) {
      const auto scores = std::span(layer.forward.scores, 4);
      EXPECT_EQ(std::vector(scores.begin(), scores.end()), (std::vector<float>{0.5f, 0.5f, 0, 0}));
    }
    expect({0, 0, 0, 0, 0, -kInf, 0, -kInf}, {0, 1, 4, -1}, "");  // nothing but sentinels
    const auto scores = std::span(layer.forward.scores, 4);
    EXPECT_EQ(std::vector(scores.begin(), scores.end()), (std::vector<float>{0.5f, 0.5f, 0, 0}));
  }
}

TEST(BadLayer, ManyThreadsNameTheFirstBadToken) {
  LayerDesc desc = router_desc();
  desc.tokens = 1000;
  PlainLayer layer(make_case(desc), 7);
  for (const std::int64_t token : {400, 401, 700, 999}) {
    layer.problem.x[token * 16] = std::numeric_limits<double>::quiet_NaN();
  }
  layer.forward.x = layer.arena.input("x with NaNs", layer.problem.x, DType::f32);
  for (int repeat = 0; repeat < 20; ++repeat) {
    EXPECT_STREQ(layer.plan.forward(layer.forward, layer.workspace).message(),
                 "logits: got a NaN in the row of token 400, allowed: numbers below +inf, at "
                 "least one of them finite");
  }
}

// Every refusal names its argument, what it got and what is allowed. The tables above show the
// words; this holds the pattern for texts that are cut or built from user input.
TEST(BadLayer, LongNamesAreCutNotOverrun) {
  Options options;
  options.kernel = std::string(1000, 'k');
  const auto plan = make_plan(router_desc(), {}, options);
  ASSERT_FALSE(plan.ok());
  const std::string message = plan.status().message();
  EXPECT_EQ(message.size(), 255u);
  EXPECT_EQ(message.substr(0, 15), "kernel: got kkk");
}

}  // namespace
}  // namespace sonicmoe::testkit
