// The text form of a description: what to_string() writes, parse_layer() reads back, and no text
// does any harm.
#include <sonicmoe/layer.h>

#include "fuzz.h"

namespace sonicmoe::fuzz {
namespace {

void same_again(const LayerDesc& desc) {
  const std::string text = to_string(desc);
  const auto parsed = parse_layer(text);
  require(parsed.ok(), "refused: " + text);
  require(parsed.value() == desc, "another layer: " + text);
  require(to_string(parsed.value()) == text, "another text: " + text);
}

/// Anything that a caller can write down, plausible or not, with enums that have names.
LayerDesc any_layer(FuzzedDataProvider* in) {
  const auto choose = [&](auto* value, int count) {
    using Enum = std::remove_reference_t<decltype(*value)>;
    *value = static_cast<Enum>(in->ConsumeIntegralInRange(0, count - 1));
  };
  LayerDesc d;
  d.tokens = number(in, 100);
  d.router.experts = number(in, 100);
  d.router.top_k = number(in, 100);
  d.router.list_length = number(in, 100);
  d.router.renormalize = in->ConsumeBool();
  d.router.assume_sorted = in->ConsumeBool();
  choose(&d.router.input, 5);
  choose(&d.router.score, 3);
  choose(&d.router.order, 2);
  choose(&d.router.group_score, 2);
  d.router.eps = in->ConsumeFloatingPoint<float>();
  d.router.scale = in->ConsumeFloatingPoint<float>();
  d.router.logit_bias = in->ConsumeBool();
  d.router.selection_bias = in->ConsumeBool();
  d.router.expert_scale = in->ConsumeBool();
  d.router.groups = number(in, 100);
  d.router.kept_groups = number(in, 100);
  d.router.f32_logits = in->ConsumeBool();
  d.router.f32_router_w = in->ConsumeBool();
  d.rounding.tile = number(in, 100);
  choose(&d.rounding.rule, 6);
  d.experts.hidden = number(in, 100);
  d.experts.intermediate = number(in, 100);
  choose(&d.experts.dtype, 3);
  choose(&d.experts.w1_layout, 5);
  d.experts.activation = in->PickValueInArray(
      {Activation::swiglu, Activation::geglu, Activation::relu_sq, Activation::silu});
  d.experts.bias = in->ConsumeBool();
  d.experts.inference = in->ConsumeBool();
  d.experts.f32_weight_grads = in->ConsumeBool();
  d.experts.accumulate_weight_grads = in->ConsumeBool();
  d.experts.dpreact_in_workspace = in->ConsumeBool();
  choose(&d.experts.recompute, 2);
  return d;
}

/// Keys and values that exist, in an order that need not, among others.
std::string any_text(FuzzedDataProvider* in) {
  std::string text;
  const auto fields = layer_fields();
  while (in->remaining_bytes() > 0 && text.size() < 500) {
    const auto& field = fields[in->ConsumeIntegralInRange<std::size_t>(0, fields.size() - 1)];
    switch (in->ConsumeIntegralInRange(0, 3)) {
      case 0:
        text += field.key;
        break;
      case 1:
        text += std::string(" ") + field.key + "=" + field.initial;
        break;
      case 2:
        text += std::string(" ") + field.key + "=" + std::to_string(number(in, 100));
        break;
      default:
        text += in->ConsumeRandomLengthString(20);
    }
  }
  return text;
}

}  // namespace
}  // namespace sonicmoe::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sonicmoe::fuzz;  // NOLINT: one program
  FuzzedDataProvider in(data, size);
  if (in.ConsumeBool()) {
    same_again(any_layer(&in));
    return 0;
  }
  const auto parsed = sonicmoe::parse_layer(any_text(&in));
  if (parsed.ok()) {
    same_again(parsed.value());
  } else {
    require_good_refusal(parsed.status());
  }
  return 0;
}
