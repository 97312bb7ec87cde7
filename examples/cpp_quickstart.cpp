// One training step's worth of a Mixture-of-Experts layer: plan, forward, backward.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>

#include "sonicmoe/sonicmoe.h"

// All memory is the caller's. Tensors are aligned to 16 bytes, the workspace to 256.
struct Memory {
  explicit Memory(std::size_t bytes)
      : data(std::aligned_alloc(256, (bytes + 255) / 256 * 256), std::free), size(bytes) {
    if (data == nullptr) throw std::bad_alloc();
  }
  float* floats() const { return static_cast<float*>(data.get()); }
  std::unique_ptr<void, decltype(&std::free)> data;
  std::size_t size;
};

static Memory floats(std::int64_t count) {
  return Memory(static_cast<std::size_t>(count) * sizeof(float));
}

static Memory random_floats(std::int64_t count, float scale) {
  static std::mt19937 engine(0);
  std::normal_distribution<float> normal(0.0f, scale);
  Memory memory = floats(count);
  for (std::int64_t i = 0; i < count; ++i) memory.floats()[i] = normal(engine);
  return memory;
}

static int fail(const sonicmoe::Status& status) {
  std::fprintf(stderr, "%s\n", status.message());
  return 1;
}

int main() {
  const std::int64_t T = 256, d = 64, n = 32, E = 8, K = 2;
  sonicmoe::LayerDesc desc;
  desc.tokens = T, desc.experts.hidden = d, desc.experts.intermediate = n, desc.router.experts = E,
  desc.router.top_k = K;
  desc.experts.dtype = sonicmoe::DType::f32;
  desc.experts.activation = sonicmoe::Activation::swiglu;

  // Validation, kernel choice and workspace layout happen here, once.
  const auto plan = sonicmoe::make_plan(desc);
  if (!plan.ok()) return fail(plan.status());
  const sonicmoe::SavedBytes saved = plan->saved_bytes();
  const Memory scratch(plan->workspace_bytes());
  const sonicmoe::Workspace workspace{scratch.data.get(), scratch.size};

  const Memory x = random_floats(T * d, 0.2f), router_w = random_floats(E * d, 0.02f);
  const Memory w1 = random_floats(E * 2 * n * d, 0.02f), w2 = random_floats(E * d * n, 0.02f);
  const Memory o = floats(T * d), logits = floats(T * E), counts = floats(E);
  const Memory preact(saved.preact), routing(saved.routing);  // all that backward needs, beside x

  sonicmoe::ForwardArgs forward;
  forward.x = x.floats(), forward.router_w = router_w.floats();
  forward.w1 = w1.floats(), forward.w2 = w2.floats();
  forward.o = o.floats(), forward.logits = logits.floats();
  forward.counts = static_cast<std::int32_t*>(counts.data.get());
  forward.preact = preact.floats(), forward.routing = routing.data.get();
  if (const auto status = plan->forward(forward, workspace); !status.ok()) return fail(status);

  const Memory dout = random_floats(T * d, 1.0f), dx = floats(T * d), drouter_w = floats(E * d);
  const Memory dw1 = floats(E * 2 * n * d), dw2 = floats(E * d * n);
  sonicmoe::BackwardArgs backward;
  backward.x = x.floats(), backward.router_w = router_w.floats();
  backward.w1 = w1.floats(), backward.w2 = w2.floats();
  backward.preact = preact.floats(), backward.routing = routing.data.get();
  backward.dout = dout.floats(), backward.dx = dx.floats();
  backward.drouter_w = drouter_w.floats();
  backward.dw1 = dw1.floats(), backward.dw2 = dw2.floats();
  if (const auto status = plan->backward(backward, workspace); !status.ok()) return fail(status);

  std::printf("tokens per expert:");
  for (std::int64_t e = 0; e < E; ++e) std::printf(" %d", forward.counts[e]);
  std::printf("\no[0] = %g, dx[0] = %g, kept for backward: %zu bytes\n",
              static_cast<double>(o.floats()[0]), static_cast<double>(dx.floats()[0]),
              saved.total());
  return 0;
}
