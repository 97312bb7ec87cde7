#include "testkit/rounded_layer.h"

#include <cstring>
#include <utility>

#include "testkit/device_memory.h"

namespace sonicmoe::testkit {
namespace {

TokenRoundingDesc rounding_of(const LayerDesc& d) {
  return {{d.router}, d.tokens, d.experts.dtype, d.rounding.rule, d.rounding.tile};
}

/// The same layer with its entries given.
Problem with_lists(const Problem& problem, const RoundedLists& lists, Tensor scores) {
  Problem out = problem;
  out.desc.router.input = RouterInput::lists;
  out.desc.router.order = RouterOrder::select_then_score;
  out.desc.router.top_k = 0;
  out.desc.router.renormalize = false;
  out.desc.rounding.tile = 0;
  out.desc.router.list_length = static_cast<std::int64_t>(lists.token_ids.size());
  out.desc.router.assume_sorted = true;
  out.router_w.clear();
  out.logits.clear();
  out.dlogits.clear();
  out.lists = {lists.token_ids, lists.expert_ids};
  out.list_scores = std::move(scores);
  return out;
}

Problem with_lists(const Problem& problem, const RoundedLists& lists) {
  return with_lists(problem, lists, Tensor(lists.scores.begin(), lists.scores.end()));
}

/// What the layer did, and what rounding does to its logits.
struct Rounded {
  std::string failure;
  LayerRun run;
  TokenChoice choice;
  RoundedLists lists;
};

Rounded run_rounded(const Problem& problem, Device device, const Options& options) {
  Rounded out;
  out.run = run_layer(problem, device, options);
  out.failure = out.run.status.ok() ? out.run.damage : out.run.status.message();
  if (!out.failure.empty()) return out;
  const DType type = problem.desc.experts.dtype;
  const RoundingRunner runner(rounding_of(problem.desc), encode(out.run.tensors.logits, type),
                              device);
  auto choice = runner.choose();
  auto lists = runner.round(kRoundingSeed, kRoundingOffset, options);
  if (!choice.ok() || !lists.ok()) {
    out.failure = (choice.ok() ? lists.status() : choice.status()).message();
    return out;
  }
  out.choice = std::move(choice).value();
  out.lists = std::move(lists).value();
  return out;
}

/// Everything that the layer computes, with the entries held fixed.
LayerTensors oracle_rounded(const Problem& p, const Rounded& rounded, Precision precision) {
  const Oracle op(p.desc, precision);
  const TokenRoundingDesc rounding = rounding_of(p.desc);
  const auto stored = [&](Tensor values, DType type) {
    if (precision == Precision::exact) return values;
    return decode(encode(values, type), type);
  };
  const bool projects = p.desc.router.projects();
  const Tensor logits = projects ? op.logits(p.x, p.router_w) : p.logits;
  const Problem given = with_lists(
      p, rounded.lists,
      stored(rounded_scores(rounding, logits, rounded.choice.ids, rounded.lists), DType::f32));
  LayerTensors out = oracle_forward(given, given.lists, precision);
  out.logits = logits;
  if (p.desc.experts.inference) return out;
  oracle_backward(given, given.lists, precision, &out);
  Tensor dlogits =
      rounded_scores_grad(rounding, logits, rounded.choice.ids, rounded.lists, out.dscores).value;
  for (std::size_t i = 0; i < p.dlogits.size(); ++i) dlogits[i] += p.dlogits[i];
  out.dlogits = stored(std::move(dlogits), p.desc.experts.dtype);
  if (!projects) return out;
  out.drouter_w = op.router_dw(out.dlogits, p.x);
  const Grouping g = group(given.lists, p.desc.tokens, p.desc.router.experts);
  out.dx = op.aggregate(g, out.dx_rows, {}, op.router_dx(out.dlogits, p.router_w));
  return out;
}

/// What is wrong with one step of the composition; "" if it went through.
template <class Desc>
std::string run_step(const Desc& desc, const typename Desc::Args& args, Arena* arena, Device device,
                     const Options& options) {
  const auto plan = make_plan(desc, device, options);
  if (!plan.ok()) return plan.status().message();
  const std::size_t bytes = plan.value().workspace_bytes();
  Status status = plan.value().run(args, {arena->output("workspace", bytes, 256), bytes});
  if (status.ok()) status = synchronize(device);
  return status.ok() ? arena->damage() : status.message();
}

/// The gradients of the logits, of x and of the router's weights from operations by themselves.
struct RouterGrads {
  std::string failure;
  Tensor dlogits, drouter_w, dx;
};

RouterGrads router_grads(const Problem& p, const LayerRun& run, const LayerRun& as_given,
                         const RoundedLists& lists, Device device, const Options& options) {
  const LayerDesc& d = p.desc;
  RouterGrads out;
  const auto fail = [&out](std::string failure) { return !(out.failure = failure).empty(); };

  const RoundingRunner runner(rounding_of(d), encode(run.tensors.logits, d.experts.dtype), device);
  const auto dlogits = runner.gradient(lists, as_given.tensors.dscores, p.dlogits, options);
  if (!dlogits.ok() && fail(dlogits.status().message())) return out;
  out.dlogits = dlogits.value();
  Tensor router_dx;
  for (const GemmPass pass : {GemmPass::dgrad, GemmPass::wgrad}) {
    if (!d.router.projects()) continue;
    Arena arena(device);
    RouterGemmArgs args;
    args.dlogits = arena.input("dlogits", dlogits.value(), d.experts.dtype);
    args.x = arena.input("x", p.x, d.experts.dtype);
    args.w = arena.input("w", p.router_w, d.experts.dtype);
    args.dx = arena.output("dx", pass == GemmPass::dgrad ? p.x.size() : 0, d.experts.dtype);
    args.dw = arena.output("dw", pass == GemmPass::wgrad ? p.router_w.size() : 0, d.experts.dtype);
    const RouterGemmDesc op{pass, d.tokens, d.experts.hidden, d.router.experts, d.experts.dtype};
    if (fail(run_step(op, args, &arena, device, options))) return out;
    if (pass == GemmPass::dgrad) router_dx = arena.tensor("dx", d.experts.dtype);
    if (pass == GemmPass::wgrad) out.drouter_w = arena.tensor("dw", d.experts.dtype);
  }

  const Problem given = with_lists(p, lists);
  const Grouping g = group(given.lists, d.tokens, d.router.experts);
  GemmInputs inputs;
  inputs.routing = given.lists;
  inputs.slot_scores = given.list_scores;
  inputs.x = p.x, inputs.dout = p.dout;
  inputs.w1 = p.w1, inputs.b1 = p.b1, inputs.w2 = p.w2, inputs.b2 = p.b2;
  inputs.preact = run.tensors.preact;
  GemmRun gemm;
  if (!d.experts.keeps_preact()) {
    gemm = run_gemm(GemmOp::up_proj, given.desc, inputs, device, options);
    if (fail(gemm.failure)) return out;
    inputs.preact = std::move(gemm.tensors.preact);
  }
  inputs.preact.resize(g.rows() * static_cast<std::size_t>(d.experts.preact_width()));
  gemm = run_gemm(GemmOp::down_proj_dgrad, given.desc, inputs, device, options);
  if (fail(gemm.failure)) return out;
  inputs.dpreact = std::move(gemm.tensors.dpreact);
  gemm = run_gemm(GemmOp::up_proj_dgrad, given.desc, inputs, device, options);
  if (fail(gemm.failure)) return out;

  const auto rows = static_cast<std::size_t>(d.rows());
  std::vector<std::int32_t> token_slots = g.token_slots;
  token_slots.resize(rows);
  gemm.tensors.dx_rows.resize(rows * static_cast<std::size_t>(d.experts.hidden));
  Arena arena(device);
  AggregateArgs args;
  args.rows = arena.input("rows", gemm.tensors.dx_rows, d.experts.dtype);
  args.slot_rows = arena.input("slot_rows", g.slot_rows);
  args.token_offsets = arena.input("token_offsets", g.token_offsets);
  args.token_slots = arena.input("token_slots", token_slots);
  args.addend = arena.input("addend", router_dx, d.experts.dtype);
  args.out = arena.output("out", p.x.size(), d.experts.dtype);
  const AggregateDesc op{d.tokens, d.rows(), d.experts.hidden, 0, d.experts.dtype};
  if (fail(run_step(op, args, &arena, device, options))) return out;
  out.dx = arena.tensor("out", d.experts.dtype);
  return out;
}

}  // namespace

Report check_rounded_layer(const Case& test_case, Device device, const Options& options) {
  const LayerDesc& desc = test_case.desc;
  const Problem problem = make_problem(test_case);
  const Rounded rounded = run_rounded(problem, device, options);
  Report report{"layer", rounded.failure, {}};
  if (!rounded.failure.empty()) return report;
  const auto verdict = [&report](const char* name, const std::string& wrong) {
    report.checks.push_back({name, 0, 0, wrong.empty(), wrong});
    return wrong.empty();
  };

  const auto& [failure, run, choice, lists] = rounded;
  if (!verdict("expert_ids",
               explain_top_k(choice.ids, run.tensors.logits, desc.tokens, desc.router))) {
    return report;
  }
  const TokenRoundingDesc rounding = rounding_of(desc);
  if (!verdict("lists", first_difference(lists, round_tokens(rounding, choice, kRoundingSeed,
                                                             kRoundingOffset)))) {
    return report;
  }
  verdict("counts", run.counts == lists.counts ? "" : "not those of the lists");
  verdict("frequency", run.frequency == lists.frequency ? "" : "not those of top-K");

  const LayerTensors exact = oracle_rounded(problem, rounded, Precision::exact);
  const LayerTensors plain = oracle_rounded(problem, rounded, Precision::plain);
  const Grouping g =
      group(Routing{lists.token_ids, lists.expert_ids}, desc.tokens, desc.router.experts);
  LayerTensors ours = run.tensors;
  ours.scores.assign(lists.scores.begin(), lists.scores.end());
  ours.preact.resize(exact.preact.size());  // rows in use
  struct Output {
    const char* name;
    Tensor LayerTensors::*member;
    bool weights;
    std::int64_t least_rows = 0;  // see expert_ends
  };
  std::vector<Output> outputs = {{"scores", &LayerTensors::scores, false},
                                 {"o", &LayerTensors::o, false}};
  if (desc.router.projects()) outputs.push_back({"logits", &LayerTensors::logits, false});
  if (!desc.experts.inference) {
    if (desc.experts.keeps_preact()) outputs.push_back({"preact", &LayerTensors::preact, false});
    outputs.insert(outputs.end(), {{"dx", &LayerTensors::dx, false},
                                   {"dw1", &LayerTensors::dw1, true},
                                   {"dw2", &LayerTensors::dw2, true}});
    if (desc.router.projects()) {
      outputs.push_back({"drouter_w", &LayerTensors::drouter_w, true, kLeastRows});
    } else {
      outputs.push_back({"dlogits", &LayerTensors::dlogits, false});
    }
    if (desc.experts.bias) {
      outputs.push_back({"db1", &LayerTensors::db1, true});
      outputs.push_back({"db2", &LayerTensors::db2, true});
    }
  }
  for (const auto& [name, member, weights, least_rows] : outputs) {
    std::vector<std::size_t> blocks;
    const std::size_t size = (exact.*member).size();
    if (weights || member == &LayerTensors::preact) {
      blocks = expert_ends(g, size, weights, least_rows);
    }
    const bool repeats = member == &LayerTensors::drouter_w;
    report.checks.push_back(two_times_rule(name, ours.*member, exact.*member, plain.*member, blocks,
                                           repeats ? router_slack(g, desc.tokens) : Slack{}));
  }
  return report;
}

Report check_rounding_as_given(const Problem& problem, const LayerRun& run,
                               const RoundedLists& lists, Device device, const Options& options) {
  Report report{"as_given", "", {}};
  const Problem given = with_lists(problem, lists);
  const LayerRun as_given = run_layer(given, device, options);
  report.failure = as_given.status.ok() ? as_given.damage : as_given.status.message();
  if (!report.failure.empty()) return report;
  const auto compare = [&](const char* name, const Tensor& ours, const Tensor& theirs) {
    report.checks.push_back(same_values(name, ours, theirs));
  };
  const auto as_tensor = [](const std::vector<std::int32_t>& v) {
    return Tensor(v.begin(), v.end());
  };
  const LayerTensors &a = run.tensors, &b = as_given.tensors;
  compare("counts", as_tensor(run.counts), as_tensor(as_given.counts));
  compare("o", a.o, b.o);
  if (problem.desc.experts.inference) return report;
  if (problem.desc.experts.keeps_preact()) {
    Tensor ours = a.preact, theirs = b.preact;
    const Grouping g = group(given.lists, given.desc.tokens, given.desc.router.experts);
    ours.resize(g.rows() * static_cast<std::size_t>(given.desc.experts.preact_width()));
    theirs.resize(ours.size());
    compare("preact", ours, theirs);
  }
  compare("dw1", a.dw1, b.dw1);
  compare("dw2", a.dw2, b.dw2);
  if (problem.desc.experts.bias) {
    compare("db1", a.db1, b.db1);
    compare("db2", a.db2, b.db2);
  }
  const RouterGrads expected = router_grads(problem, run, as_given, lists, device, options);
  report.failure = expected.failure;
  if (!report.failure.empty()) return report;
  compare("drouter_w", a.drouter_w, expected.drouter_w);
  if (!problem.desc.router.projects()) compare("dlogits", a.dlogits, expected.dlogits);
  compare("dx", a.dx, expected.dx);
  return report;
}

std::vector<Report> check_rounded_ops(const Case& test_case, Device device,
                                      const Options& options) {
  const Problem problem = make_problem(test_case);
  const Rounded rounded = run_rounded(problem, device, options);
  if (!rounded.failure.empty()) return {{"as_given", rounded.failure, {}}};
  std::vector<Report> reports = {
      check_rounding_as_given(problem, rounded.run, rounded.lists, device, options)};
  for (Report& report : check_ops(with_lists(problem, rounded.lists), device, options)) {
    reports.push_back(std::move(report));
  }
  return reports;
}

}  // namespace sonicmoe::testkit
