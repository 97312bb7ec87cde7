#include <algorithm>
#include <limits>

#include "testkit/device_memory.h"
#include "testkit/rounded_layer.h"
#include "testkit/run.h"

namespace sonicmoe::testkit {
namespace {

/// The tensors of a layer, as a backend would have them, and where to run its operations.
class OpChecker {
 public:
  OpChecker(const Problem& problem, Device device, const Options& options)
      : problem_(problem),
        desc_(problem_.desc),
        routing_(own_routing(problem_, Precision::rounded)),
        g_(group(routing_, desc_.tokens, desc_.router.experts)),
        layer_(oracle_forward(problem_, routing_, Precision::rounded)),
        device_(device),
        options_(options) {
    oracle_backward(problem_, routing_, Precision::rounded, &layer_);
  }

  std::vector<Report> check_all() {
    if (!desc_.experts.gathers()) {
      check_gemms();
      if (desc_.experts.bias) check_bias_grad();
      return std::move(reports_);
    }
    if (router().projects()) check_router_gemm();
    if (router().has_logits()) check_top_k();
    check_metadata();
    check_gemms();
    if (desc_.experts.bias) check_bias_grad();
    check_aggregate("aggregate_o", layer_.expert_out, layer_.scores, {}, false);
    const bool projects = router().projects();
    check_aggregate("aggregate_dx", layer_.dx_rows, {}, projects ? problem_.x : Tensor{}, false);
    if (projects && desc_.router.top_k <= kMaxRoutedTopK) {
      check_aggregate("aggregate_routed", layer_.dx_rows, {}, {}, true);
    }
    check_score_grad();
    if (router().has_logits()) check_aux_loss();
    return std::move(reports_);
  }

 private:
  const RouterDesc& router() const { return desc_.router; }
  DType type() const { return desc_.experts.dtype; }

  /// Runs one operation; false if it went wrong.
  template <class Desc>
  bool run(const std::string& label, const Desc& desc, const typename Desc::Args& args,
           Arena* arena) {
    Report& report = reports_.emplace_back();
    report.name = label;
    const auto plan = make_plan(desc, device_, options_);
    if (!plan.ok()) {
      report.failure = plan.status().message();
      return false;
    }
    const std::size_t bytes = plan.value().workspace_bytes();
    const Workspace workspace{arena->output("workspace", bytes, 256), bytes};
    Status status = plan.value().run(args, workspace);
    if (status.ok()) status = synchronize(device_);
    report.failure = status.ok() ? arena->damage() : status.message();
    return report.failure.empty();
  }

  /// `f(oracle)` gives the expected tensor from the very inputs that the operation had.
  template <class F>
  void judge(const std::string& tensor, const Tensor& ours, F f,
             const std::vector<std::size_t>& blocks = {}, const Slack& slack = {}) {
    reports_.back().checks.push_back(
        two_times_rule(tensor, ours, f(Oracle(desc_, Precision::exact)),
                       f(Oracle(desc_, Precision::plain)), blocks, slack));
  }

  void judge_ids(const std::string& tensor, const std::vector<std::int32_t>& ours,
                 const std::vector<std::int32_t>& expected) {
    reports_.back().checks.push_back(same_values(tensor, Tensor(ours.begin(), ours.end()),
                                                 Tensor(expected.begin(), expected.end())));
  }

  void check_router_gemm() {
    RouterGemmDesc op;
    op.tokens = desc_.tokens;
    op.hidden = desc_.experts.hidden;
    op.experts = desc_.router.experts;
    op.dtype = type();
    op.bias = router().logit_bias;
    op.f32_logits = router().f32_logits;
    op.f32_w = router().f32_router_w;
    const DType logits_type = op.logits_dtype(), w_type = op.w_dtype();
    for (const GemmPass pass : {GemmPass::forward, GemmPass::dgrad, GemmPass::wgrad}) {
      Arena arena(device_);
      RouterGemmArgs args;
      op.pass = pass;
      if (pass != GemmPass::dgrad) args.x = arena.input("x", problem_.x, type());
      if (pass != GemmPass::wgrad) args.w = arena.input("w", problem_.router_w, w_type);
      if (pass != GemmPass::forward) {
        args.dlogits = arena.input("dlogits", layer_.dlogits, logits_type);
      }
      if (pass == GemmPass::forward) {
        if (op.bias) {
          args.bias =
              static_cast<const float*>(arena.input("bias", problem_.logit_bias, DType::f32));
        }
        args.logits = arena.output("logits", layer_.logits.size(), logits_type);
        if (!run("router_gemm", op, args, &arena)) continue;
        judge(
            "logits", arena.tensor("logits", logits_type),
            [&](const Oracle& o) {
              return o.logits(problem_.x, problem_.router_w, problem_.logit_bias);
            },
            {}, logits_slack(desc_, device_));
      } else if (pass == GemmPass::dgrad) {
        args.dx = arena.output("dx", problem_.x.size(), type());
        if (!run("router_dgrad", op, args, &arena)) continue;
        judge("dx", arena.tensor("dx", type()),
              [&](const Oracle& o) { return o.router_dx(layer_.dlogits, problem_.router_w); });
      } else {
        args.dw = arena.output("dw", problem_.router_w.size(), w_type);
        if (op.bias) args.dbias = arena.output_float("dbias", op.experts);
        if (!run("router_wgrad", op, args, &arena)) continue;
        judge(
            "dw", arena.tensor("dw", w_type),
            [&](const Oracle& o) { return o.router_dw(layer_.dlogits, problem_.x); }, {},
            wgrad_slack());
        if (!op.bias) continue;
        judge("dbias", arena.tensor("dbias", DType::f32),
              [&](const Oracle& o) { return o.logit_bias_grad(layer_.dlogits); });
      }
    }
  }

  /// An fp32 gradient of the weights is summed by tensor cores from two 16-bit parts of dlogits,
  /// which leave out 2^-17 of it.
  Slack wgrad_slack() const {
    if (device_.type != DeviceType::cuda || !router().f32_router_w) return {};
    return {.relative = tensor_core_allowance(desc_.tokens) + 0x1p-17};
  }

  const float* floats(Arena* arena, const char* name, const Tensor& values) {
    return static_cast<const float*>(arena->input(name, values, DType::f32));
  }

  void check_top_k() {
    const DType logits_type = router().logits_dtype(type());
    const TopKDesc op{{router()}, desc_.tokens, logits_type};
    Arena arena(device_);
    TopKArgs args;
    args.logits = arena.input("logits", layer_.logits, logits_type);
    if (op.selection_bias) {
      args.selection_bias = floats(&arena, "selection_bias", problem_.selection_bias);
    }
    if (op.expert_scale) {
      args.expert_scale = floats(&arena, "expert_scale", problem_.expert_scale);
    }
    if (op.keeps_probabilities()) {
      args.probabilities = arena.output_float("probabilities", desc_.rows());
    }
    if (router().takes_ids()) args.given_ids = arena.input("given_ids", routing_.experts);
    args.scores = arena.output_float("scores", desc_.rows());
    args.ids = arena.output_int32("ids", desc_.rows());
    if (!run("top_k", op, args, &arena)) return;
    const std::vector<std::int32_t> ids = arena.int32("ids");
    std::string wrong = ids == routing_.experts ? "" : "not the ids that were given";
    if (router().chooses()) {
      wrong = explain_top_k(ids, layer_.logits, desc_.tokens, router(), problem_.selection_bias);
    }
    reports_.back().checks.push_back({"ids", 0, 0, wrong.empty(), wrong});
    if (!wrong.empty()) return;
    judge("scores", arena.tensor("scores", DType::f32),
          [&](const Oracle& o) { return o.scores(layer_.logits, ids, problem_.expert_scale); });
    if (!op.keeps_probabilities()) return;
    judge("probabilities", arena.tensor("probabilities", DType::f32),
          [&](const Oracle& o) { return o.probabilities(layer_.logits, ids); });
  }

  void check_metadata() {
    MetadataDesc op;
    op.tokens = desc_.tokens;
    op.experts = desc_.router.experts;
    op.top_k = desc_.router.top_k;
    op.list_length = desc_.router.list_length;
    op.assume_sorted = desc_.router.assume_sorted;
    op.row_capacity = desc_.max_rows > 0 ? desc_.rows() : 0;
    const auto slots = static_cast<std::size_t>(op.slots());
    Arena arena(device_);
    MetadataArgs args;
    args.slot_experts = arena.input("slot_experts", routing_.experts);
    args.slot_scores =
        static_cast<const float*>(arena.input("slot_scores", layer_.scores, DType::f32));
    args.counts = arena.output_int32("counts", desc_.router.experts);
    args.offsets = arena.output_int32("offsets", desc_.router.experts + 1);
    args.row_tokens = arena.output_int32("row_tokens", slots);
    args.row_slots = arena.output_int32("row_slots", slots);
    args.slot_rows = arena.output_int32("slot_rows", slots);
    args.row_scores = arena.output_float("row_scores", slots);
    if (router().takes_lists()) {
      args.slot_tokens = arena.input("slot_tokens", routing_.tokens);
      args.token_offsets = arena.output_int32("token_offsets", desc_.tokens + 1);
      args.token_slots = arena.output_int32("token_slots", slots);
    }
    if (!run("metadata", op, args, &arena)) return;
    // Rows that no expert owns have fixed contents too.
    std::vector<std::int32_t> row_tokens = g_.row_tokens, row_slots = g_.row_slots;
    Tensor scores = row_scores(g_, layer_.scores);
    row_tokens.resize(slots, 0);
    row_slots.resize(slots, -1);
    scores.resize(slots, 0);
    judge_ids("counts", arena.int32("counts"), g_.counts);
    judge_ids("offsets", arena.int32("offsets"), g_.offsets);
    judge_ids("row_tokens", arena.int32("row_tokens"), row_tokens);
    judge_ids("row_slots", arena.int32("row_slots"), row_slots);
    judge_ids("slot_rows", arena.int32("slot_rows"), g_.slot_rows);
    reports_.back().checks.push_back(
        same_values("row_scores", arena.tensor("row_scores", DType::f32), scores));
    if (!router().takes_lists()) return;
    judge_ids("token_offsets", arena.int32("token_offsets"), g_.token_offsets);
    std::vector<std::int32_t> token_slots = arena.int32("token_slots");
    token_slots.resize(g_.rows());
    judge_ids("token_slots", token_slots, g_.token_slots);
  }

  /// dS of the gemms stays in fp32, where the products and the activation show.
  Slack dscores_slack() const {
    if (device_.type == DeviceType::cpu) return {};
    // SiTU-GLU has three of Hopper's tanh, each right to 2^-18 in the mean square and 2^-16.4 at
    // worst. Together that is 2^-17.2 and 2^-14.8, and the bound lies below the worst.
    const bool tanh = desc_.experts.activation.kind == Activation::situ_glu;
    return {.relative = tensor_core_allowance(desc_.experts.hidden) + (tanh ? 0x1p-15 : 0)};
  }

  void check_gemms() {
    GemmInputs inputs;
    inputs.routing = routing_;
    inputs.slot_scores = layer_.scores;
    inputs.x = problem_.x;
    inputs.dout = problem_.dout;
    inputs.w1 = problem_.w1;
    inputs.b1 = problem_.b1;
    inputs.w2 = problem_.w2;
    inputs.b2 = problem_.b2;
    inputs.preact = layer_.preact;
    inputs.act = layer_.act;
    inputs.dpreact = layer_.dpreact;
    inputs.scaled_act = layer_.scaled_act;
    for (const GemmOp op : kGemmOps) {
      Report& report = reports_.emplace_back();
      report.name = name(op);
      const GemmRun run = run_gemm(op, desc_, inputs, device_, options_);
      report.failure = run.failure;
      if (!run.failure.empty()) continue;
      const LayerTensors exact = oracle_gemm(op, desc_, inputs, Precision::exact);
      const LayerTensors plain = oracle_gemm(op, desc_, inputs, Precision::plain);
      for (const GemmOutput& output : kGemmOutputs) {
        const Tensor& expected = exact.*output.member;
        const Tensor& ours = run.tensors.*output.member;
        if (expected.empty() && ours.empty()) continue;
        const bool dscores = output.member == &LayerTensors::row_dscores;
        report.checks.push_back(two_times_rule(
            output.name, ours, expected, plain.*output.member,
            expert_ends(g_, expected.size(), output.weights, dscores ? kLeastRows : 0),
            dscores ? dscores_slack() : Slack{}));
      }
    }
  }

  void check_bias_grad() {
    BiasGradDesc op;
    op.row_source = desc_.experts.row_source;
    op.score_at = desc_.experts.score_at;
    op.tokens = desc_.experts.gathers() ? desc_.tokens : 0;
    op.rows = desc_.rows();
    op.hidden = desc_.experts.hidden;
    op.intermediate = desc_.experts.intermediate;
    op.experts = desc_.router.experts;
    op.dtype = type();
    op.activation = desc_.experts.activation;
    op.w1_layout = desc_.experts.w1_layout;
    const bool separate = desc_.experts.w1_layout == W1Layout::separate;
    const std::int64_t n = desc_.experts.intermediate, W = desc_.experts.preact_width(),
                       R = op.rows;
    const Tensor scores = row_scores(g_, layer_.scores);
    // The sums over dA' alone, so without the term that this operation adds.
    const Tensor before =
        Oracle(desc_, Precision::rounded)
            .down_proj_dgrad(g_, scores, problem_.dout, problem_.w2, layer_.preact)
            .row_dscores;
    const auto padded = [&](auto values, std::int64_t width) {
      values.resize(R * width);
      return values;
    };
    Arena arena(device_);
    BiasGradArgs args;
    args.offsets = arena.input("offsets", g_.offsets);
    args.dpreact = arena.input("dpreact", padded(pack_preact(layer_.dpreact, desc_), W), type());
    if (desc_.experts.gathers()) {
      args.row_tokens = arena.input("row_tokens", padded(g_.row_tokens, 1));
      args.dout = arena.input("dout", problem_.dout, type());
    } else {
      Tensor rows;
      for (const std::int32_t token : g_.row_tokens) {
        const double* const row = &problem_.dout[token * op.hidden];
        rows.insert(rows.end(), row, row + op.hidden);
      }
      args.dout = arena.input("dout", padded(rows, op.hidden), type());
    }
    args.b2 = arena.input("b2", problem_.b2, type());
    const bool scored = desc_.experts.scores_bias();
    if (scored) {
      args.row_scores =
          static_cast<const float*>(arena.input("row_scores", padded(scores, 1), DType::f32));
      args.row_dscores = arena.output_float("row_dscores", R);
      arena["row_dscores"].put(encode(before, DType::f32));
    }
    args.db1 = arena.output("db1", desc_.router.experts * (separate ? n : W), type());
    args.db1_up = arena.output("db1_up", separate ? desc_.router.experts * n : 0, type());
    args.db2 = arena.output("db2", desc_.router.experts * desc_.experts.hidden, type());
    if (!run("bias_grad", op, args, &arena)) return;
    const auto expected = [&](const Oracle& o) {
      return o.bias_grad(g_, scores, layer_.dpreact, problem_.dout, problem_.b2, before);
    };
    const Tensor db1 =
        unpack_w1(arena.tensor("db1", type()), arena.tensor("db1_up", type()), desc_, 1);
    judge(
        "db1", db1, [&](const Oracle& o) { return expected(o).db1; },
        expert_ends(g_, db1.size(), true));
    const Tensor db2 = arena.tensor("db2", type());
    judge(
        "db2", db2, [&](const Oracle& o) { return expected(o).db2; },
        expert_ends(g_, db2.size(), true));
    if (!scored) return;
    Tensor dscores = arena.tensor("row_dscores", DType::f32);
    dscores.resize(g_.rows());
    judge("row_dscores", dscores, [&](const Oracle& o) { return expected(o).row_dscores; });
  }

  /// `routed`: and the router's part of dX, from the slots' experts.
  void check_aggregate(const std::string& label, const Tensor& rows, const Tensor& slot_scores,
                       const Tensor& addend, bool routed) {
    AggregateDesc op;
    op.tokens = desc_.tokens;
    op.rows = desc_.rows();
    op.hidden = desc_.experts.hidden;
    op.top_k = desc_.router.top_k;
    op.dtype = type();
    if (routed) op.experts = desc_.router.experts;
    op.f32_dlogits = routed && router().f32_logits;
    op.f32_router_w = routed && router().f32_router_w;
    Arena arena(device_);
    AggregateArgs args;
    Tensor all_rows = rows;
    all_rows.resize(op.rows * desc_.experts.hidden, std::numeric_limits<double>::quiet_NaN());
    args.rows = arena.input("rows", all_rows, type());
    args.slot_rows = arena.input("slot_rows", g_.slot_rows);
    if (router().takes_lists()) {
      std::vector<std::int32_t> token_slots = g_.token_slots;
      token_slots.resize(op.rows, std::numeric_limits<std::int32_t>::max());
      args.token_offsets = arena.input("token_offsets", g_.token_offsets);
      args.token_slots = arena.input("token_slots", token_slots);
    }
    args.slot_scores =
        static_cast<const float*>(arena.input("slot_scores", slot_scores, DType::f32));
    args.addend = arena.input("addend", addend, type());
    // What the token's other experts have must not be read.
    const Tensor& dlogits = layer_.dlogits;
    if (routed) {
      const std::int64_t E = desc_.router.experts;
      Tensor own(dlogits.size(), std::numeric_limits<double>::quiet_NaN());
      for (std::size_t slot = 0; slot < routing_.experts.size(); ++slot) {
        const std::int64_t at =
            static_cast<std::int64_t>(slot) / desc_.router.top_k * E + routing_.experts[slot];
        own[at] = dlogits[at];
      }
      args.slot_experts = arena.input("slot_experts", routing_.experts);
      args.dlogits = arena.input("dlogits", own, router().logits_dtype(type()));
      args.router_w = arena.input("router_w", problem_.router_w, router().router_w_dtype(type()));
    }
    args.out = arena.output("out", desc_.tokens * desc_.experts.hidden, type());
    if (!run(label, op, args, &arena)) return;
    judge("out", arena.tensor("out", type()), [&](const Oracle& o) {
      const Tensor extra =
          routed ? o.routed_dx(routing_.experts, dlogits, problem_.router_w) : addend;
      return o.aggregate(g_, rows, slot_scores, extra);
    });
  }

  void check_score_grad() {
    const DType logits_type = router().logits_dtype(type());
    const ScoreGradDesc op{{router()}, desc_.tokens, desc_.routing().slots(), logits_type};
    Tensor row_dscores = layer_.row_dscores;
    row_dscores.resize(op.rows, std::numeric_limits<double>::quiet_NaN());
    Arena arena(device_);
    ScoreGradArgs args;
    args.row_dscores =
        static_cast<const float*>(arena.input("row_dscores", row_dscores, DType::f32));
    args.slot_rows = arena.input("slot_rows", g_.slot_rows);
    if (!router().has_logits()) {
      args.dscores = arena.output_float("dscores", op.rows);
      if (!run("score_grad", op, args, &arena)) return;
      reports_.back().checks.push_back(
          same_values("dscores", arena.tensor("dscores", DType::f32),
                      Oracle(desc_, Precision::rounded).slot_dscores(g_, layer_.row_dscores)));
      return;
    }
    if (op.keeps_probabilities()) {
      const Tensor p =
          Oracle(desc_, Precision::rounded).probabilities(layer_.logits, routing_.experts);
      args.slot_probabilities = floats(&arena, "slot_probabilities", p);
    } else {
      args.slot_scores = floats(&arena, "slot_scores", layer_.scores);
    }
    args.slot_experts = arena.input("slot_experts", routing_.experts);
    if (op.reaches_all_experts()) args.logits = arena.input("logits", layer_.logits, logits_type);
    if (op.expert_scale) {
      args.expert_scale = floats(&arena, "expert_scale", problem_.expert_scale);
      args.offsets = arena.input("offsets", g_.offsets);
      args.dexpert_scale = arena.output_float("dexpert_scale", op.experts);
    }
    args.dlogits_in = arena.input("dlogits_in", problem_.dlogits, logits_type);
    args.dlogits = arena.output("dlogits", layer_.logits.size(), logits_type);
    if (!run("score_grad", op, args, &arena)) return;
    const auto gradient = [&](const Oracle& o, bool magnitudes) {
      return o.score_grad(layer_.logits, routing_.experts, layer_.dscores, problem_.dlogits,
                          problem_.expert_scale, magnitudes);
    };
    judge("dlogits", arena.tensor("dlogits", logits_type),
          [&](const Oracle& o) { return gradient(o, false); }, {},
          {.absolute = cancellation_allowance(gradient(Oracle(desc_, Precision::exact), true))});
    if (!op.expert_scale) return;
    judge("dexpert_scale", arena.tensor("dexpert_scale", DType::f32), [&](const Oracle& o) {
      return o.expert_scale_grad(layer_.logits, routing_.experts, layer_.dscores);
    });
  }

  void check_aux_loss() {
    AuxLossDesc op;
    op.tokens = desc_.tokens;
    op.experts = desc_.router.experts;
    op.dtype = router().logits_dtype(type());
    {
      Arena arena(device_);
      AuxLossArgs args;
      args.logits = arena.input("logits", layer_.logits, router().logits_dtype(type()));
      args.counts = arena.input("counts", g_.counts);
      args.loss = arena.output_float("loss", 1);
      if (run("aux_loss", op, args, &arena)) {
        judge("loss", arena.tensor("loss", DType::f32),
              [&](const Oracle& o) { return Tensor{o.aux_loss(layer_.logits, g_.counts)}; });
      }
    }
    op.backward = true;
    constexpr double kDloss = 0.75;
    Arena arena(device_);
    AuxLossArgs args;
    args.logits = arena.input("logits", layer_.logits, router().logits_dtype(type()));
    args.counts = arena.input("counts", g_.counts);
    args.dloss = static_cast<const float*>(arena.input("dloss", {kDloss}, DType::f32));
    args.dlogits = arena.output("dlogits", layer_.logits.size(), op.dtype);
    if (!run("aux_loss_grad", op, args, &arena)) return;
    judge("dlogits", arena.tensor("dlogits", op.dtype),
          [&](const Oracle& o) { return o.aux_loss_grad(layer_.logits, g_.counts, kDloss); }, {},
          {.absolute =
               cancellation_allowance(Oracle(desc_, Precision::exact)
                                          .aux_loss_grad(layer_.logits, g_.counts, kDloss, true))});
  }

  Problem problem_;
  LayerDesc desc_;
  Routing routing_;
  Grouping g_;
  LayerTensors layer_;
  Device device_;
  Options options_;
  std::vector<Report> reports_;
};

}  // namespace

std::vector<Report> check_ops(const Case& test_case, Device device, const Options& options) {
  if (test_case.desc.rounding.tile > 0) return check_rounded_ops(test_case, device, options);
  return check_ops(make_problem(test_case), device, options);
}

std::vector<Report> check_ops(const Problem& problem, Device device, const Options& options) {
  return OpChecker(problem, device, options).check_all();
}

}  // namespace sonicmoe::testkit
