#pragma once

#include "sonicmoe/layer.h"
#include "testkit/run.h"
#include "tests/device.h"

namespace sonicmoe::testkit {

/// A layer with every tensor that any call may want, made once: for calls that are watched, or
/// spoilt one argument at a time.
struct PlainLayer {
  LayerPlan plan;
  Problem problem;
  Arena arena{kDevice};
  ForwardArgs forward;
  BackwardArgs backward;
  Workspace workspace;

  explicit PlainLayer(const Case& c, int threads, bool checked = true,
                      const std::string& kernel = "")
      : plan(make_plan(c.desc, kDevice, {.threads = threads, .checked = checked, .kernel = kernel})
                 .value()),
        problem(make_problem(c)) {
    const LayerDesc& d = c.desc;
    const DType type = d.experts.dtype;
    auto [w1, w1_up] = pack_w1(problem.w1, d, d.experts.hidden);
    forward.x = arena.input("x", problem.x, type);
    const DType logits_type = d.router.logits_dtype(type);
    const DType router_type = d.router.router_w_dtype(type);
    const auto floats = [&](const char* name, const Tensor& values) {
      return static_cast<const float*>(arena.input(name, values, DType::f32));
    };
    forward.router_w = arena.input("router_w", problem.router_w, router_type);
    forward.logit_bias = floats("logit_bias", problem.logit_bias);
    forward.selection_bias = floats("selection_bias", problem.selection_bias);
    forward.expert_scale = floats("expert_scale", problem.expert_scale);
    forward.w1 = arena.input("w1", w1, type);
    forward.w1_up = arena.input("w1_up", w1_up, type);
    auto [b1, b1_up] = pack_w1(problem.b1, d, 1);
    forward.b1 = arena.input("b1", b1, type);
    forward.b1_up = arena.input("b1_up", b1_up, type);
    forward.w2 = arena.input("w2", pack_w2(problem.w2, d), type);
    forward.b2 = arena.input("b2", problem.b2, type);
    forward.list_tokens = arena.input("list_tokens", problem.lists.tokens);
    forward.list_experts = arena.input("list_experts", problem.lists.experts);
    forward.list_scores = floats("list_scores", problem.list_scores);
    forward.given_logits = arena.input("given_logits", problem.logits, logits_type);
    forward.given_ids = forward.list_experts;
    forward.given_weights = forward.list_scores;
    const SavedBytes saved = plan.saved_bytes();
    forward.o = arena.output("o", problem.x.size(), type);
    forward.logits = arena.output("logits", d.tokens * d.router.experts, logits_type);
    forward.counts = arena.output_int32("counts", d.router.experts);
    forward.scores = arena.output_float("scores", d.rows());
    forward.expert_ids = arena.output_int32("expert_ids", d.rows());
    forward.preact = arena.output("preact", saved.preact);
    forward.routing = arena.output("routing", saved.routing);
    backward.x = forward.x;
    backward.router_w = forward.router_w;
    backward.expert_scale = forward.expert_scale;
    backward.w1 = forward.w1;
    backward.w1_up = forward.w1_up;
    backward.b1 = forward.b1;
    backward.b1_up = forward.b1_up;
    backward.w2 = forward.w2;
    backward.b2 = forward.b2;
    backward.logits = d.router.projects() ? forward.logits : forward.given_logits;
    backward.preact = forward.preact;
    backward.routing = forward.routing;
    backward.dout = arena.input("dout", problem.dout, type);
    backward.dx = arena.output("dx", problem.x.size(), type);
    backward.drouter_w = arena.output("drouter_w", problem.router_w.size(), router_type);
    backward.dlogit_bias = arena.output_float("dlogit_bias", problem.logit_bias.size());
    backward.dexpert_scale = arena.output_float("dexpert_scale", problem.expert_scale.size());
    backward.dw1 = arena.output("dw1", w1.size(), type);
    backward.dw1_up = arena.output("dw1_up", w1_up.size(), type);
    backward.db1 = arena.output("db1", b1.size(), type);
    backward.db1_up = arena.output("db1_up", b1_up.size(), type);
    backward.dw2 = arena.output("dw2", problem.w2.size(), type);
    backward.db2 = arena.output("db2", problem.b2.size(), type);
    if (!d.experts.dpreact_in_workspace) {
      backward.dpreact = arena.output("dpreact", d.rows() * d.experts.preact_width(), type);
    }
    backward.dscores = arena.output_float("dscores", problem.list_scores.size());
    backward.dgiven_logits = arena.output("dgiven_logits", problem.logits.size(), logits_type);
    workspace.bytes = plan.workspace_bytes();
    workspace.data = arena.output("workspace", workspace.bytes, 256);
  }
};

}  // namespace sonicmoe::testkit
