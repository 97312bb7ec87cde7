// One forward and backward pass whose answer is known: two experts, each the identity behind a
// relu, chosen with score 1/2 each. So o = relu(x), and dx = do where x > 0.
#include <sonicmoe/sonicmoe.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

using Tensor = std::vector<float>;

// The 16-byte alignment that tensors need is what operator new gives; workspaces need more.
struct alignas(256) Page {
  std::byte bytes[256];
};

int main() {
  constexpr std::int64_t T = 4, d = 8, n = 8, E = 2, K = 2;
  const sonicmoe::LayerDesc desc{.tokens = T,
                                 .router = {.experts = E, .top_k = K},
                                 .experts = {.hidden = d,
                                             .intermediate = n,
                                             .dtype = sonicmoe::DType::f32,
                                             .activation = sonicmoe::Activation::relu}};
  const auto plan = sonicmoe::make_plan(desc);
  if (!plan.ok()) return std::fprintf(stderr, "%s\n", plan.status().message()), 1;

  Tensor x(T * d, 3), router_w(E * d, 0), w1(E * n * d, 0), w2(E * d * n, 0), o(T * d), dx(T * d);
  Tensor logits(T * E), dout(T * d, 5), drouter_w(E * d), dw1(E * n * d), dw2(E * d * n);
  for (std::int64_t i = 0; i < E * n; ++i) w1[i * d + i % n] = w2[i * n + i % d] = 1;
  std::vector<std::int32_t> counts(E);
  const sonicmoe::SavedBytes saved = plan->saved_bytes();
  std::vector<Page> preact(saved.preact / 256 + 1), routing(saved.routing / 256 + 1);
  std::vector<Page> workspace(plan->workspace_bytes() / 256 + 1);
  const sonicmoe::Workspace lent{workspace.data(), plan->workspace_bytes()};

  sonicmoe::Status status = plan->forward({.x = x.data(),
                                           .router_w = router_w.data(),
                                           .w1 = w1.data(),
                                           .w2 = w2.data(),
                                           .o = o.data(),
                                           .logits = logits.data(),
                                           .counts = counts.data(),
                                           .preact = preact.data(),
                                           .routing = routing.data()},
                                          lent);
  if (status.ok()) {
    status = plan->backward({.x = x.data(),
                             .router_w = router_w.data(),
                             .w1 = w1.data(),
                             .w2 = w2.data(),
                             .logits = logits.data(),
                             .preact = preact.data(),
                             .routing = routing.data(),
                             .dout = dout.data(),
                             .dx = dx.data(),
                             .drouter_w = drouter_w.data(),
                             .dw1 = dw1.data(),
                             .dw2 = dw2.data()},
                            lent);
  }
  // One operation by itself.
  const auto top_k =
      sonicmoe::make_plan(sonicmoe::TopKDesc{{.experts = E, .top_k = 1}, T, desc.experts.dtype});
  if (!top_k.ok()) return std::fprintf(stderr, "%s\n", top_k.status().message()), 1;
  std::vector<std::int32_t> ids(T, -1);
  Tensor scores(T);
  if (status.ok()) {
    workspace.resize(top_k->workspace_bytes() / 256 + 1);
    status = top_k->run({.logits = logits.data(), .scores = scores.data(), .ids = ids.data()},
                        {workspace.data(), top_k->workspace_bytes()});
  }
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message()), 1;

  const bool right = o == Tensor(T * d, 3) && dx == Tensor(T * d, 5) && scores == Tensor(T, 1) &&
                     ids == std::vector<std::int32_t>(T, 0);
  std::printf("sonicmoe %s: o = %g, dx = %g: %s\n", sonicmoe::version(), o[0], dx[0],
              right ? "as expected" : "expected 3 and 5");
  return right ? 0 : 1;
}
