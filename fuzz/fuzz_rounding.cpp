// Token rounding of any logits: refused where a row has no finite maximum; else every promise is
// kept, the lists are those of the reference, and the gradient is finite.
#include <cmath>
#include <cstddef>

#include "fuzz/fuzz.h"
#include "testkit/inputs.h"
#include "testkit/rounding.h"

namespace sonicmoe::fuzz {
namespace {

using testkit::RoundingRunner;

TokenRoundingDesc rounding_desc(FuzzedDataProvider* in) {
  TokenRoundingDesc d;
  // A piece of work has 64 tokens, a word of the membership table 64 experts.
  d.tokens = in->ConsumeIntegralInRange(0, in->ConsumeBool() ? 12 : 70);
  d.experts = in->ConsumeIntegralInRange(1, in->ConsumeBool() ? 5 : 70);
  d.top_k = in->ConsumeIntegralInRange<std::int64_t>(1, d.experts);
  d.dtype = in->ConsumeBool() ? DType::f32 : DType::bf16;
  d.order = in->ConsumeBool() ? RouterOrder::select_then_score : RouterOrder::score_then_select;
  d.renormalize = in->ConsumeBool();
  d.rule = static_cast<RoundingRule>(in->ConsumeIntegralInRange(0, 5));
  d.tile = in->ConsumeIntegralInRange(1, in->ConsumeBool() ? 16 : 1024);
  return d;
}

/// Elements drawn from the bytes that are left, so that a short input fills any number of tokens.
std::vector<std::byte> make_logits(FuzzedDataProvider* in, const TokenRoundingDesc& d) {
  const std::size_t size = size_of(d.dtype);
  const testkit::Random random(in->ConsumeIntegral<std::uint16_t>(), 0);
  std::vector<std::byte> palette = in->ConsumeRemainingBytes<std::byte>();
  palette.resize(std::max(size, palette.size() / size * size));
  std::vector<std::byte> logits;
  for (std::int64_t i = 0; i < d.tokens * d.experts; ++i) {
    const auto colours = static_cast<std::int64_t>(palette.size() / size);
    const auto from =
        palette.begin() + static_cast<std::ptrdiff_t>(random.below(i, colours) * size);
    logits.insert(logits.end(), from, from + static_cast<std::ptrdiff_t>(size));
  }
  return logits;
}

bool legal(const TokenRoundingDesc& d, const testkit::Tensor& logits) {
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    double max = -HUGE_VAL;
    for (std::int64_t e = 0; e < d.experts; ++e) {
      const double x = logits[t * d.experts + e];
      if (std::isnan(x)) return false;
      max = std::max(max, x);
    }
    if (!std::isfinite(max)) return false;
  }
  return true;
}

void round(FuzzedDataProvider* in) {
  const Options options = few_threads(in);
  const TokenRoundingDesc desc = rounding_desc(in);
  const auto seed = in->ConsumeIntegral<std::uint64_t>();
  const auto offset = in->ConsumeIntegral<std::uint64_t>();
  const RoundingRunner runner(desc, make_logits(in, desc));
  const auto lists = runner.round(seed, offset, options);
  const auto choice = runner.choose(options);
  if (!legal(desc, runner.logits())) {
    for (const Status& status : {lists.status(), choice.status()}) {
      require(status.code() == StatusCode::invalid_data, "bad logits were not refused as such");
      require_good_refusal(status);
    }
    return;
  }
  require(lists.ok(), lists.status().message());
  require(choice.ok(), choice.status().message());
  require_none(testkit::explain_rounding(desc, choice.value(), lists.value()));
  const std::string differs = testkit::first_difference(
      lists.value(), testkit::round_tokens(desc, choice.value(), seed, offset));
  require(differs.empty(), differs + " differ from the reference");

  testkit::Tensor dscores(lists.value().scores.size());
  for (std::size_t i = 0; i < dscores.size(); ++i) {
    dscores[i] = testkit::Random(seed, 1).normal(i);
  }
  const auto gradient = runner.gradient(lists.value(), dscores, {}, options);
  require(gradient.ok(), gradient.status().message());
  for (const double value : gradient.value()) require(std::isfinite(value), "gradient not finite");
}

}  // namespace
}  // namespace sonicmoe::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider in(data, size);
  sonicmoe::fuzz::round(&in);
  return 0;
}
