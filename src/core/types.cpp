#include "sonicmoe/types.h"

#include <cstddef>
#include <string_view>
#include <utility>

#include "core/enum_names.h"

namespace sonicmoe {
const char* name(DType value) noexcept {
  switch (value) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
  }
  return "?";
}

const char* name(W1Layout value) noexcept {
  switch (value) {
    case W1Layout::interleaved:
      return "interleaved";
    case W1Layout::concatenated:
      return "concatenated";
    case W1Layout::separate:
      return "separate";
    case W1Layout::transposed:
      return "transposed";
    case W1Layout::transposed_interleaved:
      return "transposed_interleaved";
  }
  return "?";
}

const char* name(RouterScore value) noexcept {
  switch (value) {
    case RouterScore::softmax:
      return "softmax";
    case RouterScore::sigmoid:
      return "sigmoid";
    case RouterScore::sqrt_softplus:
      return "sqrt_softplus";
  }
  return "?";
}

const char* name(RouterLoss value) noexcept {
  switch (value) {
    case RouterLoss::balance:
      return "balance";
    case RouterLoss::z:
      return "z";
  }
  return "?";
}

const char* name(GroupScore value) noexcept {
  switch (value) {
    case GroupScore::largest:
      return "largest";
    case GroupScore::sum_of_two:
      return "sum_of_two";
  }
  return "?";
}

const char* name(RouterOrder value) noexcept {
  switch (value) {
    case RouterOrder::select_then_score:
      return "select_then_score";
    case RouterOrder::score_then_select:
      return "score_then_select";
  }
  return "?";
}

const char* name(RouterInput value) noexcept {
  switch (value) {
    case RouterInput::projection:
      return "projection";
    case RouterInput::logits:
      return "logits";
    case RouterInput::logits_and_ids:
      return "logits_and_ids";
    case RouterInput::ids_and_weights:
      return "ids_and_weights";
    case RouterInput::lists:
      return "lists";
  }
  return "?";
}

const char* name(RowSource value) noexcept {
  switch (value) {
    case RowSource::gathered:
      return "gathered";
    case RowSource::contiguous:
      return "contiguous";
  }
  return "?";
}

const char* name(ScoreAt value) noexcept {
  switch (value) {
    case ScoreAt::combine:
      return "combine";
    case ScoreAt::none:
      return "none";
    case ScoreAt::before_down:
      return "before_down";
    case ScoreAt::after_down:
      return "after_down";
  }
  return "?";
}

const char* name(Recompute value) noexcept {
  switch (value) {
    case Recompute::none:
      return "none";
    case Recompute::preact:
      return "preact";
  }
  return "?";
}

const char* name(IndexType value) noexcept {
  switch (value) {
    case IndexType::i32:
      return "i32";
    case IndexType::i64:
      return "i64";
  }
  return "?";
}

const char* name(DeviceType value) noexcept {
  switch (value) {
    case DeviceType::cpu:
      return "cpu";
    case DeviceType::cuda:
      return "cuda";
  }
  return "?";
}

std::size_t size_of(DType value) noexcept {
  switch (value) {
    case DType::f32:
      return 4;
    case DType::bf16:
      return 2;
    case DType::f16:
      return 2;
  }
  return 0;
}

bool parse(const std::string& text, DType* out) { return parse_name(text, out); }

const char* name(RoundingRule value) noexcept {
  switch (value) {
    case RoundingRule::nearest:
      return "nearest";
    case RoundingRule::stochastic:
      return "stochastic";
    case RoundingRule::nearest_scores:
      return "nearest_scores";
    case RoundingRule::balance:
      return "balance";
    case RoundingRule::up:
      return "up";
    case RoundingRule::down:
      return "down";
  }
  return "?";
}

bool parse(const std::string& text, RoundingRule* out) {
  constexpr std::pair<std::string_view, RoundingRule> kShort[] = {
      {"nr", RoundingRule::nearest},
      {"sr", RoundingRule::stochastic},
      {"nr_s", RoundingRule::nearest_scores}};
  for (const auto& [word, rule] : kShort) {
    if (text != word) continue;
    *out = rule;
    return true;
  }
  return parse_name(text, out);
}

}  // namespace sonicmoe
