// What a layer keeps, what it needs while it runs, and that it never allocates.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <thread>

#include "testkit/run.h"
#include "testkit/run_experts.h"
#include "tests/plain_layer.h"
#include "tests/test_names.h"

// Every way to get heap memory in this process, counted. The sanitizers bring their own malloc, and
// there the count stays zero; this test has its meaning in the ordinary build.
static std::atomic<std::size_t> allocations{0};
#if !defined(__SANITIZE_ADDRESS__)
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t size) {
  ++allocations;
  return __libc_malloc(size);
}
void* calloc(std::size_t count, std::size_t size) {
  ++allocations;
  return __libc_calloc(count, size);
}
void* realloc(void* old, std::size_t size) {
  ++allocations;
  return __libc_realloc(old, size);
}
void* memalign(std::size_t alignment, std::size_t size) {
  ++allocations;
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) { return memalign(alignment, size); }
int posix_memalign(void** out, std::size_t alignment, std::size_t size) {
  *out = memalign(alignment, size);
  return *out == nullptr ? ENOMEM : 0;
}
}
#endif

namespace sonicmoe::testkit {
namespace {

/// The cases that are whole layers, not experts alone.
std::vector<Case> layers(std::vector<Case> cases) {
  std::erase_if(cases, [](const Case& c) { return !c.desc.experts.gathers(); });
  return cases;
}

LayerPlan plan_of(const LayerDesc& desc) { return make_plan(desc).value(); }

class Memory : public testing::TestWithParam<Case> {};

// The terms of the semantics, with the sizes written out. Guard bands right behind each of these
// blocks (testkit/run.h) show in every layer test that no byte more is written.
TEST_P(Memory, SavedBytesAreWithinTheirBounds) {
  const LayerDesc& d = GetParam().desc;
  const SavedBytes saved = plan_of(d).saved_bytes();
  if (d.experts.inference) {
    EXPECT_EQ(saved.total(), 0u);
    return;
  }
  const auto T = static_cast<std::size_t>(d.tokens), E = static_cast<std::size_t>(d.router.experts);
  const auto R = static_cast<std::size_t>(d.rows()), size = size_of(d.experts.dtype);
  const auto S = static_cast<std::size_t>(d.routing().slots());
  const auto n = static_cast<std::size_t>(d.experts.intermediate);
  EXPECT_EQ(saved.x, T * static_cast<std::size_t>(d.experts.hidden) * size);
  const std::size_t kept = d.experts.recompute == Recompute::none ? 1 : 0;
  EXPECT_EQ(saved.preact, kept * R * (is_glu(d.experts.activation) ? 2 : 1) * n * size);
  EXPECT_LE(saved.routing, 24 * S + 8 * (E + 1) + 4 * (T + 1));
  if (d.router.input == RouterInput::ids_and_weights) {
    EXPECT_EQ(saved.routing, 12 * S + 4 * (2 * E + 1));
  }
  // Scores of experts beyond the K largest have a gradient too.
  const RouterDesc& r = d.router;
  const bool all_probabilities =
      (r.has_logits() && r.score == RouterScore::softmax &&
       r.order == RouterOrder::score_then_select && (!r.renormalize || r.eps > 0)) ||
      d.rounding.tile > 0;
  EXPECT_EQ(saved.logits, all_probabilities ? T * E * (r.f32_logits ? 4 : size) : 0u);
  EXPECT_EQ(saved.total(), saved.x + saved.preact + saved.routing + saved.logits);
}

TEST_P(Memory, WorkspaceIsTheLargerOfTwo) {
  const LayerPlan plan = plan_of(GetParam().desc);
  EXPECT_EQ(plan.workspace_bytes(),
            std::max(plan.forward_workspace_bytes(), plan.backward_workspace_bytes()));
  if (GetParam().desc.experts.inference) {
    EXPECT_EQ(plan.backward_workspace_bytes(), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Memory, testing::ValuesIn(layers(full_cases())), test_name);

TEST(Memory, CallsDoNotAllocate) {
  for (const Case& c : layers(smoke_cases())) {
    if (c.desc.experts.inference) continue;
    for (const int threads : {1, 2, 3}) {
      PlainLayer layer(c, threads);
      // The first calls of a process set up what belongs to it and not to a call: the threads.
      ASSERT_TRUE(layer.plan.forward(layer.forward, layer.workspace).ok());
      ASSERT_TRUE(layer.plan.backward(layer.backward, layer.workspace).ok());
      const std::size_t before = allocations;
      const Status forward = layer.plan.forward(layer.forward, layer.workspace);
      const Status backward = layer.plan.backward(layer.backward, layer.workspace);
      const std::size_t after = allocations;
      EXPECT_TRUE(forward.ok() && backward.ok());
      EXPECT_EQ(after, before) << repro_command(c, threads);
    }
  }
}

TEST(Memory, CallsOfExpertsAloneDoNotAllocate) {
  for (const char* name : {"rows/after_down-bias-hostile/f32", "rows/before_down/bf16"}) {
    ExpertsCall call(make_problem(*find_case(name)), {}, {.threads = 2});
    ASSERT_TRUE(call.run_forward().ok() && call.run_backward().ok());
    const std::size_t before = allocations;
    const Status forward = call.run_forward(), backward = call.run_backward();
    const std::size_t after = allocations;
    EXPECT_TRUE(forward.ok() && backward.ok());
    EXPECT_EQ(after, before) << name;
  }
}

#if !defined(__SANITIZE_ADDRESS__)
TEST(Memory, TheCounterCounts) {
  const std::size_t before = allocations;
  void* volatile a = std::malloc(1);
  int* volatile b = new int;
  EXPECT_EQ(allocations, before + 2);
  std::free(a);
  delete b;
}
#endif

// dH in memory of its own, which is not H's: H stays, and the gradients are the same.
TEST(Memory, DpreactInTheCallersMemory) {
  Case c = *find_case("activation/swiglu-interleaved/f32");
  PlainLayer within(c, 2);
  c.desc.experts.dpreact_in_workspace = false;
  PlainLayer brought(c, 2);
  for (PlainLayer* layer : {&within, &brought}) {
    ASSERT_TRUE(layer->plan.forward(layer->forward, layer->workspace).ok());
    const Tensor kept = layer->arena.tensor("preact", c.desc.experts.dtype);
    ASSERT_TRUE(layer->plan.backward(layer->backward, layer->workspace).ok());
    EXPECT_EQ(layer->arena.tensor("preact", c.desc.experts.dtype), kept);
    EXPECT_EQ(layer->arena.damage(), "");
  }
  for (const char* name : {"dx", "dw1", "dw2", "drouter_w"}) {
    EXPECT_EQ(brought.arena.tensor(name, c.desc.experts.dtype),
              within.arena.tensor(name, c.desc.experts.dtype));
  }
  const std::size_t saved = within.plan.saved_bytes().preact;
  EXPECT_GE(within.plan.backward_workspace_bytes(),
            brought.plan.backward_workspace_bytes() + saved);
  for (const double value : brought.arena.tensor("dpreact", c.desc.experts.dtype)) {
    ASSERT_FALSE(std::isnan(value));  // as the memory came
  }
}

// Refusals do not allocate either: a Status carries its text inside.
TEST(Memory, RefusalsDoNotAllocate) {
  PlainLayer layer(*find_case("activation/swiglu-interleaved/f32"), 1);
  layer.workspace.bytes = layer.plan.forward_workspace_bytes() - 1;
  const std::size_t before = allocations;
  const Status status = layer.plan.forward(layer.forward, layer.workspace);
  const std::size_t after = allocations;
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_EQ(after, before);
}

// An inference plan writes nothing but its outputs, whatever the pointers for backward are.
TEST(Memory, InferenceKeepsNothing) {
  for (const Case& c : layers(full_cases())) {
    if (!c.desc.experts.inference) continue;
    PlainLayer layer(c, 2);
    const GuardedBuffer decoy(1 << 16);
    layer.forward.preact = decoy.data();
    layer.forward.routing = decoy.data();
    ASSERT_TRUE(layer.plan.forward(layer.forward, layer.workspace).ok()) << c.name;
    EXPECT_TRUE(decoy.untouched()) << c.name;
    const Tensor with_decoy = layer.arena.tensor("o", c.desc.experts.dtype);
    layer.forward.preact = nullptr;
    layer.forward.routing = nullptr;
    ASSERT_TRUE(layer.plan.forward(layer.forward, layer.workspace).ok()) << c.name;
    EXPECT_EQ(layer.arena.tensor("o", c.desc.experts.dtype), with_decoy) << c.name;
  }
}

// Inference computes the same bits as training.
TEST(Memory, InferenceGivesTheSameOutput) {
  for (const char* name : {"inference/topk/f32", "inference/bias/bf16", "inference/given/bf16"}) {
    Problem problem = make_problem(*find_case(name));
    const LayerRun inference = run_layer(problem);
    problem.desc.experts.inference = false;
    const LayerRun training = run_layer(problem);
    ASSERT_TRUE(inference.status.ok() && training.status.ok());
    EXPECT_EQ(inference.tensors.o, training.tensors.o);
  }
}

// Pointers that a plan does not use are not looked at, let alone followed.
TEST(Memory, UnusedPointersAreIgnored) {
  PlainLayer layer(*find_case("activation/swiglu-interleaved/f32"), 2);
  void* const wild = reinterpret_cast<void*>(0x7);  // neither mapped nor aligned
  ForwardArgs& f = layer.forward;
  f.w1_up = f.b1 = f.b1_up = f.b2 = wild;
  f.list_tokens = f.list_experts = static_cast<const std::int32_t*>(wild);
  f.list_scores = static_cast<const float*>(wild);
  EXPECT_TRUE(layer.plan.forward(f, layer.workspace).ok());
  BackwardArgs& b = layer.backward;
  b.w1_up = b.b2 = b.logits = wild;  // softmax over the top-K needs no logits
  b.dw1_up = b.db1 = b.db1_up = b.db2 = wild;
  b.dscores = static_cast<float*>(wild);
  EXPECT_TRUE(layer.plan.backward(b, layer.workspace).ok());
}

TEST(Memory, OptionalTensorsMayBeMissing) {
  PlainLayer layer(*find_case("router/topk_over_softmax-dlogits/f32"), 2);
  const auto outputs = [&] {
    EXPECT_TRUE(layer.plan.forward(layer.forward, layer.workspace).ok());
    EXPECT_TRUE(layer.plan.backward(layer.backward, layer.workspace).ok());
    return std::pair(layer.arena.tensor("o", DType::f32), layer.arena.tensor("dw1", DType::f32));
  };
  const auto with_all = outputs();
  layer.forward.scores = nullptr;
  layer.forward.expert_ids = nullptr;
  layer.backward.dlogits = nullptr;
  EXPECT_EQ(outputs(), with_all);  // neither depends on dlogits
}

// A workspace full of what the last call left is as good as a fresh one.
TEST(Memory, WorkspaceContentsDoNotMatter) {
  PlainLayer layer(*find_case("given/hostile-bias-swiglu/bf16"), 2);
  const auto run = [&] {
    EXPECT_TRUE(layer.plan.forward(layer.forward, layer.workspace).ok());
    EXPECT_TRUE(layer.plan.backward(layer.backward, layer.workspace).ok());
    return std::pair(layer.arena.tensor("dx", DType::bf16), layer.arena.tensor("dw1", DType::bf16));
  };
  const auto first = run();
  EXPECT_EQ(run(), first);
}

// Several threads may use one plan at once, each with its own workspace and tensors.
TEST(Memory, PlansAreShared) {
  for (const char* name : {"activation/swiglu-interleaved-bias/f32", "given/hostile/bf16"}) {
    const Case& c = *find_case(name);
    std::deque<PlainLayer> layers;
    for (int i = 0; i < 4; ++i) layers.emplace_back(c, 2).plan = layers.front().plan;
    {
      std::vector<std::jthread> callers;
      for (PlainLayer& layer : layers) {
        callers.emplace_back([&layer] {
          for (int repeat = 0; repeat < 20; ++repeat) {
            EXPECT_TRUE(layer.plan.forward(layer.forward, layer.workspace).ok());
            EXPECT_TRUE(layer.plan.backward(layer.backward, layer.workspace).ok());
          }
        });
      }
    }
    for (const PlainLayer& layer : layers) {
      for (const char* tensor : {"o", "preact", "dx", "dw1", "dw2"}) {
        EXPECT_TRUE(
            std::ranges::equal(layer.arena[tensor].bytes(), layers.front().arena[tensor].bytes()))
            << tensor;
      }
    }
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
