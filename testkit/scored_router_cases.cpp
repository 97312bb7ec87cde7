#include <cstdint>
#include <string>
#include <vector>

#include "testkit/case_list.h"

namespace sonicmoe::testkit {
namespace {

struct NamedRouter {
  const char* name;
  RouterDesc router;
};

constexpr RouterOrder kScored = RouterOrder::score_then_select;
constexpr RouterScore kSigmoid = RouterScore::sigmoid, kSoftplus = RouterScore::sqrt_softplus;

RouterDesc grouped(RouterDesc d, std::int64_t kept, GroupScore score) {
  d.groups = 4;
  d.kept_groups = kept;
  d.group_score = score;
  return d;
}

RouterDesc deepseek_v3() {
  return grouped({.score = kSigmoid,
                  .order = kScored,
                  .renormalize = true,
                  .eps = 1e-20f,
                  .scale = 2.5f,
                  .selection_bias = true},
                 2, GroupScore::sum_of_two);
}

/// Of E = 16 experts; every option occurs, and each one alone or with others that act on it.
std::vector<NamedRouter> scored_routers() {
  const RouterDesc deepseek_v4 = {.score = kSoftplus,
                                  .order = kScored,
                                  .renormalize = true,
                                  .eps = 1e-20f,
                                  .scale = 1.5f,
                                  .selection_bias = true};
  const RouterDesc gemma4 = {.order = kScored, .renormalize = true, .expert_scale = true};
  RouterDesc f32 = deepseek_v3();
  f32.f32_logits = true;
  RouterDesc f32_w = f32;
  f32_w.f32_router_w = f32_w.logit_bias = f32_w.expert_scale = true;
  return {{"sigmoid", {.score = kSigmoid}},
          {"sigmoid-scored-norm", {.score = kSigmoid, .order = kScored, .renormalize = true}},
          {"sqrt_softplus", {.score = kSoftplus, .order = kScored, .expert_scale = true}},
          {"deepseek_v3", deepseek_v3()},
          {"deepseek_v4", deepseek_v4},
          {"gemma4", gemma4},
          {"gpt_oss", {.logit_bias = true}},
          {"scaled-biased", {.scale = 0.5f, .logit_bias = true, .selection_bias = true}},
          {"eps", {.order = kScored, .renormalize = true, .eps = 0.125f, .scale = 3.0f}},
          {"softmax-groups",
           grouped({.order = kScored, .selection_bias = true}, 3, GroupScore::largest)},
          {"f32_logits", {.order = kScored, .f32_logits = true}},
          {"f32_logits-topk", {.f32_logits = true}},
          {"f32_router", {.logit_bias = true, .f32_logits = true, .f32_router_w = true}},
          {"deepseek_v3-f32_logits", f32},
          {"deepseek_v3-f32_router", f32_w}};
}

}  // namespace

/// Once with the layer's own product and a loss on the logits, once without the loss, and with
/// logits or ids of the caller where the router allows it.
void add_scored_routers(CaseList* list) {
  for (const NamedRouter& named : scored_routers()) {
    const auto desc_of = [&](LayerDesc desc) {
      const RouterDesc sizes = desc.router;
      desc.router = named.router;
      desc.router.experts = sizes.experts;
      desc.router.top_k = sizes.top_k;
      return desc;
    };
    const std::string name = std::string("router/") + named.name;
    LayerDesc desc = desc_of(shape(61, 72, 40, 16, 3));
    list->add(name + "-dlogits", desc, RoutingKind::random, true);
    desc.experts.bias = true;
    list->add(name, desc);
    list->add(name + "-all_equal", desc_of(shape(33, 24, 16, 16, 5)), RoutingKind::all_equal);
    list->add(name + "-t0", desc_of(shape(0, 24, 16, 16, 2)));
    if (named.router.groups == 1) {
      list->add(name + "-one_expert", desc_of(shape(33, 24, 16, 9, 2)), RoutingKind::one_expert,
                true);
    }
    desc.router.logit_bias = desc.router.f32_router_w = false;
    desc.router.input = RouterInput::logits;
    list->add(name + "-logits", desc, RoutingKind::random, true);
    desc.router.input = RouterInput::logits_and_ids;
    desc.router.selection_bias = false;
    desc.router.groups = desc.router.kept_groups = 1;
    desc.router.group_score = GroupScore::largest;
    list->add(name + "-ids", desc, RoutingKind::hostile);
  }
  LayerDesc many = shape(40, 24, 16, 1200, 70);  // rows that do not fit a warp on CUDA
  many.router.score = kSigmoid;
  many.router.order = kScored;
  many.router.selection_bias = many.router.renormalize = true;
  many.router.groups = 100;
  many.router.kept_groups = 20;
  list->add("router/many_groups", many);
  many = shape(70, 24, 16, 256, 8);  // DeepSeek-V3's sizes
  many.router = deepseek_v3();
  many.router.experts = 256;
  many.router.top_k = 8;
  many.router.groups = 8;
  many.router.kept_groups = 4;
  list->add("router/deepseek_v3-e256", many);
}

}  // namespace sonicmoe::testkit
