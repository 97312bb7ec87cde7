#include "tests/token_rounding_cases.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "testkit/inputs.h"

namespace sonicmoe::testkit {
namespace {

enum Kind { kNormal, kTies, kEqual, kMasked, kUnderflow, kHuge, kKinds };

/// Logits (T, E) in fp32; some experts are more popular than others.
std::vector<float> make_logits(Kind kind, std::int64_t tokens, std::int64_t experts,
                               std::uint64_t number) {
  const Random noise(number, 1), popularity(number, 2), mask(number, 3);
  std::vector<float> out(tokens * experts);
  for (std::size_t i = 0; i < out.size(); ++i) {
    double x = 2 * noise.normal(i) + 2 * popularity.normal(i % experts);
    if (kind == kTies) x = std::nearbyint(x);
    if (kind == kEqual) x = -3;
    if (kind == kUnderflow) x *= 60;
    if (kind == kHuge) x *= 2e37;  // the largest differences overflow to infinity
    if (kind == kMasked && mask.below(i, 3) == 0) x = -HUGE_VAL;
    out[i] = static_cast<float>(x);
  }
  for (std::int64_t t = 0; t < tokens; ++t) {  // a mask leaves every token an expert
    float& spared = out[t * experts + mask.below(out.size() + t, experts)];
    if (!std::isfinite(spared)) spared = 0;
  }
  return out;
}

std::vector<std::byte> stored(const std::vector<float>& values, DType type) {
  return encode(Tensor(values.begin(), values.end()), type);
}

}  // namespace

std::string RoundingCase::text() const {
  return "T " + std::to_string(desc.tokens) + ", E " + std::to_string(desc.experts) + ", K " +
         std::to_string(desc.top_k) + ", tile " + std::to_string(desc.tile) + ", " +
         name(desc.rule) + ", " + name(desc.order) + (desc.renormalize ? ", norm, " : ", ") +
         name(desc.dtype) + ", seed " + std::to_string(seed) + ", offset " + std::to_string(offset);
}

RoundingCase random_rounding_case(std::uint64_t number) {
  const Random random(number, 0);
  std::uint64_t draw = 0;
  const auto below = [&](std::int64_t bound) { return random.below(draw++, bound); };
  RoundingCase c;
  TokenRoundingDesc& d = c.desc;
  d.rule = static_cast<RoundingRule>(below(6));
  d.order = static_cast<RouterOrder>(below(2));
  d.renormalize = below(2) == 0;
  d.dtype = below(2) == 0 ? DType::f32 : DType::bf16;
  d.tile = below(40) == 0 ? 1024 : 1 + below(std::int64_t{1} << below(11));
  d.experts = 1 + below(below(4) == 0 ? 300 : 20);
  // So many tokens that some counts pass the tile and ceil passes T in some, but not in all cases.
  constexpr std::int64_t kLogits = 20000;
  d.tokens = below(16) == 0 ? below(3) : below(std::min(kLogits / d.experts, 4 * d.tile + 40));
  d.top_k = 1 + below(below(8) == 0 ? d.experts : std::min<std::int64_t>(d.experts, 6));
  c.seed = random.bits(draw++);
  c.offset = random.bits(draw++);
  const auto kind = static_cast<Kind>(below(kKinds));
  c.logits = stored(make_logits(kind, d.tokens, d.experts, number), d.dtype);
  return c;
}

RoundingCase plain_rounding_case(std::uint64_t number, const TokenRoundingDesc& desc) {
  RoundingCase c;
  c.desc = desc;
  c.desc.dtype = DType::f32;
  std::vector<float> logits = make_logits(kNormal, desc.tokens, desc.experts, number);
  for (float& x : logits) x = std::nearbyint(x * 0x1p8f) * 0x1p-8f;
  c.logits = stored(logits, DType::f32);
  c.seed = number;
  return c;
}

}  // namespace sonicmoe::testkit
