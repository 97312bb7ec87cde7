#include <cstdio>
#include <cstring>

#include "testkit/device_memory.h"
#include "testkit/inputs.h"
#include "testkit/rounded_layer.h"
#include "testkit/run.h"
#include "testkit/run_experts.h"

namespace sonicmoe::testkit {
namespace {

/// Records a failed step. Returns whether the run can go on.
bool proceed(const char* step, Status status, const Arena& arena, Device device, LayerRun* run) {
  if (status.ok()) status = synchronize(device);
  run->status = status;
  run->damage = arena.damage();
  if (!run->damage.empty()) run->damage = std::string(step) + " " + run->damage;
  return status.ok() && run->damage.empty();
}

void run_forward(const Problem& p, const LayerPlan& plan, Device device, Arena* arena,
                 LayerRun* run) {
  const LayerDesc& desc = p.desc;
  const DType type = desc.experts.dtype;
  const SavedBytes saved = plan.saved_bytes();
  const RouterDesc& router = desc.router;
  const DType logits_type = router.logits_dtype(type);
  const bool scores = router.has_logits() && desc.rounding.tile == 0;  // the layer makes them
  ForwardArgs args;
  args.x = arena->input("x", p.x, type);
  auto [w1, w1_up] = pack_w1(p.w1, desc, desc.experts.hidden);
  args.w1 = arena->input("w1", w1, type);
  args.w1_up = arena->input("w1_up", w1_up, type);
  auto [b1, b1_up] = pack_w1(p.b1, desc, 1);
  args.b1 = arena->input("b1", b1, type);
  args.b1_up = arena->input("b1_up", b1_up, type);
  args.w2 = arena->input("w2", pack_w2(p.w2, desc), type);
  args.b2 = arena->input("b2", p.b2, type);
  const auto given_scores = [&](const char* name) {
    return static_cast<const float*>(arena->input(name, p.list_scores, DType::f32));
  };
  if (router.projects()) {
    args.router_w = arena->input("router_w", p.router_w, router.router_w_dtype(type));
    args.logits = arena->output("logits", desc.tokens * router.experts, logits_type);
  } else if (router.has_logits()) {
    args.given_logits = arena->input("logits", p.logits, logits_type);
  }
  const auto floats = [&](const char* name, const Tensor& values) {
    return static_cast<const float*>(arena->input(name, values, DType::f32));
  };
  if (router.logit_bias) args.logit_bias = floats("logit_bias", p.logit_bias);
  if (router.selection_bias) args.selection_bias = floats("selection_bias", p.selection_bias);
  if (router.expert_scale) args.expert_scale = floats("expert_scale", p.expert_scale);
  if (router.takes_ids()) args.given_ids = arena->input("given_ids", p.lists.experts);
  if (router.takes_ids() && !router.has_logits()) args.given_weights = given_scores("weights");
  if (router.takes_lists()) {
    args.list_tokens = arena->input("list_tokens", p.lists.tokens);
    args.list_experts = arena->input("list_experts", p.lists.experts);
    args.list_scores = given_scores("list_scores");
  }
  if (desc.rounding.tile > 0) {
    args.seed = kRoundingSeed;
    args.offset = kRoundingOffset;
    args.frequency = arena->output_int32("frequency", router.experts);
  }
  if (scores) {
    args.scores = arena->output_float("scores", desc.rows());
    args.expert_ids = arena->output_int32("expert_ids", desc.rows());
  }
  args.o = arena->output("o", desc.tokens * desc.experts.hidden, type);
  args.counts = arena->output_int32("counts", desc.router.experts);
  args.preact = arena->output("preact", saved.preact);
  args.routing = arena->output("routing", saved.routing);
  const std::size_t bytes = plan.forward_workspace_bytes();
  const Workspace workspace{arena->output("forward workspace", bytes, 256), bytes};
  if (!proceed("forward", plan.forward(args, workspace), *arena, device, run)) return;

  LayerTensors& out = run->tensors;
  run->routing = p.lists;
  out.scores = p.list_scores;
  if (router.projects()) out.logits = arena->tensor("logits", logits_type);
  if (!router.projects()) out.logits = p.logits;
  if (scores) {
    run->routing = routing_of_ids(arena->int32("expert_ids"), desc.router.top_k);
    out.scores = arena->tensor("scores", DType::f32);
  }
  if (desc.rounding.tile > 0) run->frequency = arena->int32("frequency");
  run->counts = arena->int32("counts");
  out.o = arena->tensor("o", type);
  if (desc.experts.keeps_preact()) out.preact = unpack_preact(arena->tensor("preact", type), desc);
}

void run_backward(const Problem& p, const LayerPlan& plan, Device device, Arena* arena,
                  LayerRun* run) {
  const LayerDesc& desc = p.desc;
  const DType type = desc.experts.dtype;
  const DType grad_type = desc.experts.f32_weight_grads ? DType::f32 : type;
  const RouterDesc& router = desc.router;
  const DType logits_type = router.logits_dtype(type), router_type = router.router_w_dtype(type);
  const bool separate = desc.experts.w1_layout == W1Layout::separate;
  const std::int64_t E = desc.router.experts, d = desc.experts.hidden,
                     n = desc.experts.intermediate;
  const std::int64_t first = separate ? n : desc.experts.preact_width(), second = separate ? n : 0;
  const auto data = [&](const char* name) { return (*arena)[name].data(); };
  BackwardArgs args;
  args.x = data("x");
  args.w1 = data("w1");
  args.w1_up = data("w1_up");
  args.w2 = data("w2");
  args.b2 = data("b2");
  if (desc.experts.keeps_preact()) args.preact = data("preact");
  if (!desc.experts.keeps_preact() && desc.experts.bias) {
    args.b1 = data("b1");
    args.b1_up = data("b1_up");
  }
  if (!desc.experts.dpreact_in_workspace) {
    args.dpreact = desc.experts.keeps_preact()
                       ? data("preact")
                       : arena->output("dpreact", desc.rows() * desc.experts.preact_width(), type);
  }
  args.routing = data("routing");
  args.dout = arena->input("dout", p.dout, type);
  const WantedGradients& wanted = p.wanted;
  if (wanted.dx) args.dx = arena->output("dx", desc.tokens * d, type);
  if (wanted.dw1) {
    args.dw1 = arena->output("dw1", E * first * d, grad_type);
    args.dw1_up = arena->output("dw1_up", E * second * d, grad_type);
  }
  if (wanted.dw2) args.dw2 = arena->output("dw2", E * d * n, grad_type);
  if (desc.experts.accumulate_weight_grads) {
    const auto [dw1, dw1_up] = pack_w1(p.dw1, desc, d);
    if (wanted.dw1) (*arena)["dw1"].put(encode(dw1, grad_type));
    if (wanted.dw1) (*arena)["dw1_up"].put(encode(dw1_up, grad_type));
    if (wanted.dw2) (*arena)["dw2"].put(encode(pack_w2(p.dw2, desc), grad_type));
  }
  if (desc.experts.bias) {
    args.db1 = arena->output("db1", E * first, type);
    args.db1_up = arena->output("db1_up", E * second, type);
    args.db2 = arena->output("db2", E * d, type);
  }
  // Only where the plan says that it needs them: nothing else may be read.
  if (plan.saved_bytes().logits > 0) args.logits = data("logits");
  if (router.has_logits()) args.dlogits = arena->input("dlogits", p.dlogits, logits_type);
  if (router.expert_scale) {
    args.expert_scale = static_cast<const float*>(data("expert_scale"));
    args.dexpert_scale = arena->output_float("dexpert_scale", E);
  }
  if (router.logit_bias) args.dlogit_bias = arena->output_float("dlogit_bias", E);
  if (router.projects()) {
    args.router_w = data("router_w");
    if (wanted.drouter_w) args.drouter_w = arena->output("drouter_w", E * d, router_type);
  } else if (router.has_logits()) {
    args.dgiven_logits = arena->output("dgiven_logits", desc.tokens * E, logits_type);
  } else {
    args.dscores = arena->output_float("dscores", desc.routing().slots());
  }
  const std::size_t bytes = plan.backward_workspace_bytes();
  const Workspace workspace{arena->output("backward workspace", bytes, 256), bytes};
  if (!proceed("backward", plan.backward(args, workspace), *arena, device, run)) return;

  LayerTensors& out = run->tensors;
  if (wanted.dx) out.dx = arena->tensor("dx", type);
  if (wanted.dw1) {
    out.dw1 =
        unpack_w1(arena->tensor("dw1", grad_type), arena->tensor("dw1_up", grad_type), desc, d);
  }
  if (wanted.dw2) out.dw2 = unpack_w2(arena->tensor("dw2", grad_type), desc);
  if (desc.experts.bias) {
    out.db1 = unpack_w1(arena->tensor("db1", type), arena->tensor("db1_up", type), desc, 1);
    out.db2 = arena->tensor("db2", type);
  }
  if (router.projects()) {
    if (wanted.drouter_w) out.drouter_w = arena->tensor("drouter_w", router_type);
  } else if (router.has_logits()) {
    out.dlogits = arena->tensor("dgiven_logits", logits_type);
  } else {
    out.dscores = arena->tensor("dscores", DType::f32);
  }
  if (router.logit_bias) out.dlogit_bias = arena->tensor("dlogit_bias", DType::f32);
  if (router.expert_scale) out.dexpert_scale = arena->tensor("dexpert_scale", DType::f32);
}

}  // namespace

std::vector<std::size_t> expert_ends(const Grouping& g, std::size_t size, bool weights,
                                     std::int64_t least_rows) {
  const std::size_t experts = g.counts.size();
  std::vector<std::size_t> ends;
  std::int64_t together = 0;  // rows since the last end
  for (std::size_t e = 1; e <= experts; ++e) {
    const std::size_t rows = g.rows() == 0 ? 1 : g.rows();
    together += g.counts[e - 1];
    if (together < least_rows && e < experts) continue;
    together = 0;
    ends.push_back(weights ? size / experts * e : size / rows * g.offsets[e]);
  }
  return ends;
}

Slack logits_slack(const LayerDesc& desc, Device device) {
  if (device.type != DeviceType::cuda || !desc.router.f32_logits) return {};
  const std::int64_t products = desc.experts.hidden;
  constexpr std::int64_t kOfASum = 256;
  return {.relative = tensor_core_allowance(desc.router.f32_router_w ? std::min(products, kOfASum)
                                                                     : products)};
}

LayerRun run_layer(const Problem& problem, Device device, const Options& options) {
  if (!problem.desc.experts.gathers()) return run_experts(problem, device, options);
  LayerRun run;
  const Result<LayerPlan> plan = make_plan(problem.desc, device, options);
  run.status = plan.status();
  if (!plan.ok()) return run;
  Arena arena(device);
  run_forward(problem, plan.value(), device, &arena, &run);
  if (!run.status.ok() || !run.damage.empty() || problem.desc.experts.inference) return run;
  run_backward(problem, plan.value(), device, &arena, &run);
  return run;
}

Result<std::string> explain(const LayerDesc& desc, Device device, const Options& options) {
  if (desc.experts.gathers()) {
    const Result<LayerPlan> plan = make_plan(desc, device, options);
    if (!plan.ok()) return plan.status();
    return plan->explain();
  }
  const GroupedDesc grouped{desc.experts, 0, desc.tokens, desc.router.experts};
  const Result<ExpertsPlan> plan = make_plan(grouped, device, options);
  if (!plan.ok()) return plan.status();
  return plan->explain();
}

std::string first_difference(const LayerRun& a, const LayerRun& b) {
  const auto same = [](const Tensor& p, const Tensor& q) {
    return p.size() == q.size() &&
           (p.empty() || std::memcmp(p.data(), q.data(), p.size() * sizeof(double)) == 0);
  };
  if (a.routing.experts != b.routing.experts) return "expert_ids";
  if (a.counts != b.counts) return "counts";
  if (a.frequency != b.frequency) return "frequency";
  const LayerTensors &p = a.tensors, &q = b.tensors;
  if (!same(p.logits, q.logits)) return "logits";
  if (!same(p.scores, q.scores)) return "scores";
  if (!same(p.preact, q.preact)) return "preact";
  if (!same(p.o, q.o)) return "o";
  if (!same(p.dx, q.dx)) return "dx";
  if (!same(p.dw1, q.dw1)) return "dw1";
  if (!same(p.db1, q.db1)) return "db1";
  if (!same(p.dw2, q.dw2)) return "dw2";
  if (!same(p.db2, q.db2)) return "db2";
  if (!same(p.drouter_w, q.drouter_w)) return "drouter_w";
  if (!same(p.dlogits, q.dlogits)) return "dlogits";
  if (!same(p.dscores, q.dscores)) return "dscores";
  if (!same(p.dlogit_bias, q.dlogit_bias)) return "dlogit_bias";
  if (!same(p.dexpert_scale, q.dexpert_scale)) return "dexpert_scale";
  return "";
}

bool Report::pass() const {
  for (const Check& check : checks) {
    if (!check.pass) return false;
  }
  return failure.empty();
}

std::string Report::text() const {
  if (!failure.empty()) return name + ": " + failure + "\n";
  std::string out;
  for (const Check& check : checks) {
    char figures[80];
    std::snprintf(figures, sizeof figures, " error %.3e bound %.3e ", check.error, check.bound);
    out += name + "." + check.tensor + figures + (check.pass ? "ok" : "FAILED");
    out += check.note.empty() ? "\n" : " (" + check.note + ")\n";
  }
  return out;
}

Report check_layer(const Case& test_case, Device device, const Options& options) {
  const LayerDesc& desc = test_case.desc;
  if (desc.rounding.tile > 0) return check_rounded_layer(test_case, device, options);
  const Problem problem = make_problem(test_case);
  const LayerRun run = run_layer(problem, device, options);
  Report report{"layer", run.damage, {}};
  if (!run.status.ok()) report.failure = run.status.message();
  if (!report.failure.empty()) return report;

  // The library's choice of experts is right for its own logits, and then held fixed.
  if (desc.router.takes_ids() && desc.router.has_logits()) {
    report.checks.push_back({"expert_ids", 0, 0, run.routing.experts == problem.lists.experts, ""});
  }
  if (desc.router.chooses()) {
    const std::string wrong = explain_top_k(run.routing.experts, run.tensors.logits, desc.tokens,
                                            desc.router, problem.selection_bias);
    report.checks.push_back({"expert_ids", 0, 0, wrong.empty(), wrong});
    if (!wrong.empty()) return report;
  }
  const Grouping all = group(run.routing, desc.tokens, desc.router.experts);
  report.checks.push_back({"counts", 0, 0, run.counts == all.counts, ""});
  const Routing routing = limited(run.routing, desc);
  const Grouping g = group(routing, desc.tokens, desc.router.experts);

  LayerTensors exact = oracle_forward(problem, routing, Precision::exact);
  LayerTensors plain = oracle_forward(problem, routing, Precision::plain);
  const auto compare = [&](const char* name, Tensor LayerTensors::*member,
                           const std::vector<std::size_t>& blocks = {}, const Slack& slack = {}) {
    report.checks.push_back(
        two_times_rule(name, run.tensors.*member, exact.*member, plain.*member, blocks, slack));
  };
  const auto by_expert = [&](Tensor LayerTensors::*member) {
    return expert_ends(g, (exact.*member).size(), true);
  };
  if (desc.router.projects())
    compare("logits", &LayerTensors::logits, {}, logits_slack(desc, device));
  if (desc.router.has_logits()) {
    // A score moves by at most twice its logits' errors, relative to it; logits are of size one.
    compare("scores", &LayerTensors::scores, {},
            {.relative = desc.router.projects() ? 2 * logits_slack(desc, device).relative : 0});
  }
  compare("o", &LayerTensors::o);
  if (desc.experts.inference) return report;

  if (desc.experts.keeps_preact()) {
    Tensor rows_in_use = run.tensors.preact;
    rows_in_use.resize(exact.preact.size());
    report.checks.push_back(two_times_rule("preact", rows_in_use, exact.preact, plain.preact,
                                           expert_ends(g, exact.preact.size(), false)));
  }
  oracle_backward(problem, routing, Precision::exact, &exact);
  oracle_backward(problem, routing, Precision::plain, &plain);
  compare("dx", &LayerTensors::dx);
  // An error of an element of dH or A' comes back in a whole line of its expert's gradient.
  const auto errors_of_rows = [&](std::int64_t width) {
    return Slack{.independent = static_cast<double>(g.rows() * static_cast<std::size_t>(width))};
  };
  compare("dw1", &LayerTensors::dw1, by_expert(&LayerTensors::dw1),
          errors_of_rows(desc.experts.preact_width()));
  compare("dw2", &LayerTensors::dw2, by_expert(&LayerTensors::dw2),
          errors_of_rows(desc.experts.intermediate));
  if (desc.experts.bias) {
    compare("db1", &LayerTensors::db1, by_expert(&LayerTensors::db1));
    compare("db2", &LayerTensors::db2, by_expert(&LayerTensors::db2));
  }
  if (!desc.experts.scored()) return report;
  if (desc.router.expert_scale) compare("dexpert_scale", &LayerTensors::dexpert_scale);
  if (desc.router.logit_bias) compare("dlogit_bias", &LayerTensors::dlogit_bias);
  if (!desc.router.has_logits()) {
    report.checks.push_back(two_times_rule(
        "dscores", run.tensors.dscores, exact.dscores, plain.dscores, {},
        {.relative =
             device.type == DeviceType::cuda ? tensor_core_allowance(desc.experts.hidden) : 0}));
  } else if (!desc.router.projects()) {
    const Tensor terms = Oracle(desc, Precision::exact)
                             .score_grad(exact.logits, run.routing.experts, exact.dscores, {},
                                         problem.expert_scale, true);
    compare("dlogits", &LayerTensors::dlogits, {}, {.absolute = cancellation_allowance(terms)});
  } else {
    compare("drouter_w", &LayerTensors::drouter_w,
            expert_ends(g, exact.drouter_w.size(), true, kLeastRows), router_slack(g, desc.tokens));
  }
  return report;
}

}  // namespace sonicmoe::testkit
