#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "testkit/device_memory.h"
#include "testkit/run_experts.h"
#include "tests/plain_layer.h"

/// A layer recorded once in a CUDA graph and replayed with other inputs and other routing, for
/// launches must not depend on what is in memory.
namespace sonicmoe::testkit {

inline void start(const PlainLayer& layer, Stream stream) {
  const Status forward = layer.plan.forward(layer.forward, layer.workspace, stream);
  ASSERT_TRUE(forward.ok()) << forward.message();
  const Status backward = layer.plan.backward(layer.backward, layer.workspace, stream);
  ASSERT_TRUE(backward.ok()) << backward.message();
}

/// With `kernel` (see Options::kernel) where its operation is.
inline void expect_replays(const Case& c, const std::string& kernel = "") {
  SCOPED_TRACE(c.name);
  constexpr const char* kInputs[] = {"x",
                                     "router_w",
                                     "w1",
                                     "w1_up",
                                     "b1",
                                     "b1_up",
                                     "w2",
                                     "b2",
                                     "dout",
                                     "list_tokens",
                                     "list_experts",
                                     "list_scores",
                                     "given_logits",
                                     "logit_bias",
                                     "selection_bias",
                                     "expert_scale"};
  constexpr const char* kOutputs[] = {
      "o",      "logits",     "counts",  "preact",        "dx",          "dw1",
      "dw1_up", "db1",        "db1_up",  "drouter_w",     "dw2",         "db2",
      "scores", "expert_ids", "dscores", "dgiven_logits", "dlogit_bias", "dexpert_scale"};
  const OwnStream stream(kDevice);
  PlainLayer layer(c, 1, false, kernel);
  start(layer, stream);  // loads the kernels
  ASSERT_TRUE(synchronize(kDevice).ok());
  Graph::begin(kDevice, stream);
  start(layer, stream);
  const Graph graph(kDevice, stream);

  const bool chooses = c.desc.router.chooses();
  const RoutingKind kinds[] = {RoutingKind::one_expert,
                               chooses ? RoutingKind::all_equal : RoutingKind::sentinels_only,
                               chooses ? RoutingKind::empty_ends : RoutingKind::hostile};
  for (const RoutingKind kind : kinds) {
    SCOPED_TRACE(static_cast<int>(kind));
    Case other = c;
    other.routing = kind;
    other.seed += 1000 + static_cast<int>(kind);
    const PlainLayer eager(other, 1, false, kernel);
    start(eager, stream);
    ASSERT_TRUE(synchronize(kDevice).ok());
    for (const char* name : kInputs) layer.arena.replace(name, eager.arena[name].bytes());
    for (const char* name : kOutputs) layer.arena[name].poison();
    layer.arena["routing"].poison();
    layer.arena["workspace"].poison();
    graph.launch(stream);
    const Status status = synchronize(kDevice);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(layer.arena.damage(), "");
    for (const char* name : kOutputs) {
      // Rows of H that no expert owns keep their poison in both.
      EXPECT_TRUE(std::ranges::equal(layer.arena[name].bytes(), eager.arena[name].bytes())) << name;
    }
  }
}

/// The same of the experts alone: other counts and offsets for a graph that was recorded once.
inline void expect_rows_replay(Case c, const std::string& kernel = "") {
  SCOPED_TRACE(to_string(c.desc));
  c.desc.router.experts += 2 - c.desc.router.experts % 3;  // ExpertsCall then gives both arrays
  const Options options{.kernel = kernel};
  const OwnStream stream(kDevice);
  const auto start = [&](ExpertsCall& call) {
    const Status forward = call.run_forward(stream);
    ASSERT_TRUE(forward.ok()) << forward.message();
    const Status backward = call.run_backward(stream);
    ASSERT_TRUE(backward.ok()) << backward.message();
  };
  ExpertsCall recorded(make_problem(c), kDevice, options);
  ASSERT_TRUE(recorded.status().ok()) << recorded.status().message();
  start(recorded);  // loads the kernels
  ASSERT_TRUE(synchronize(kDevice).ok());
  Graph::begin(kDevice, stream);
  start(recorded);
  const Graph graph(kDevice, stream);
  for (const RoutingKind kind :
       {RoutingKind::one_expert, RoutingKind::sentinels_only, RoutingKind::hostile}) {
    SCOPED_TRACE(static_cast<int>(kind));
    Case other = c;
    other.routing = kind;
    other.seed += 1000 + static_cast<int>(kind);
    ExpertsCall eager(make_problem(other), kDevice, options);
    start(eager);
    ASSERT_TRUE(synchronize(kDevice).ok());
    for (const char* name : {"counts", "row_offsets", "x", "row_scores", "w1", "w1_up", "b1",
                             "b1_up", "w2", "b2", "dout"}) {
      recorded.arena.replace(name, eager.arena[name].bytes());
    }
    constexpr const char* kOutputs[] = {"expert_out", "preact", "segments", "dx",  "dscores", "dw1",
                                        "dw1_up",     "db1",    "db1_up",   "dw2", "db2"};
    for (const char* name : kOutputs) recorded.arena[name].poison();
    recorded.arena["forward workspace"].poison();
    recorded.arena["backward workspace"].poison();
    graph.launch(stream);
    const Status status = synchronize(kDevice);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(recorded.arena.damage(), "");
    for (const char* name : kOutputs) {
      // Rows that no expert owns keep their poison in both, or are zero in both.
      EXPECT_TRUE(std::ranges::equal(recorded.arena[name].bytes(), eager.arena[name].bytes()))
          << name;
    }
  }
}

}  // namespace sonicmoe::testkit
