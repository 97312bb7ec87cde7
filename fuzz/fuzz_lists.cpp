// Routing lists with any ids. Those with a token id out of range are refused, without writing. The
// others are sorted into groups as the oracle does. A small layer and the gradient of rounding run
// on them.
#include <cmath>
#include <cstddef>

#include "fuzz/fuzz.h"
#include "sonicmoe/sonicmoe.h"
#include "testkit/rounding.h"
#include "testkit/run.h"

namespace sonicmoe::fuzz {
namespace {

using testkit::Arena;

struct Lists {
  std::int64_t tokens, experts;
  testkit::Routing routing;
  bool sorted = true, legal = true;

  explicit Lists(FuzzedDataProvider* in)
      : tokens(in->ConsumeIntegralInRange(0, 20)), experts(in->ConsumeIntegralInRange(1, 70)) {
    const auto id = [&](std::int64_t bound) -> std::int32_t {
      switch (in->ConsumeIntegralInRange(0, 63)) {
        case 0:
          return in->ConsumeIntegral<std::int32_t>();
        case 1:
          return in->PickValueInArray({INT32_MIN, -2, -1, INT32_MAX - 1, INT32_MAX});
        case 2:
          return static_cast<std::int32_t>(bound) + 1;
        default:
          return static_cast<std::int32_t>(in->ConsumeIntegralInRange<std::int64_t>(0, bound));
      }
    };
    const std::int64_t length = in->ConsumeIntegralInRange(0, 100);
    for (std::int64_t i = 0; i < length; ++i) {
      routing.tokens.push_back(id(tokens > 0 ? tokens - 1 : 0));
      routing.experts.push_back(id(experts));  // E is a sentinel
    }
    if (in->ConsumeBool()) std::sort(routing.tokens.begin(), routing.tokens.end());
    for (std::int64_t i = 0; i < length; ++i) {
      const std::int32_t t = routing.tokens[i];
      legal = legal && t >= 0 && t < tokens;
      sorted = sorted && (i == 0 || routing.tokens[i - 1] <= t);
    }
  }
  std::int64_t length() const { return static_cast<std::int64_t>(routing.slots()); }
};

/// Runs an operation; `legal` says whether it must succeed or refuse the data untouched.
template <class Desc>
bool run(const Desc& desc, const typename Desc::Args& args, const Options& options, bool legal,
         Arena* outputs) {
  const auto plan = make_plan(desc, {}, options);
  require(plan.ok(), plan.status().message());
  Arena scratch;
  const std::size_t bytes = plan.value().workspace_bytes();
  const Status status = plan.value().run(args, {scratch.output("workspace", bytes, 256), bytes});
  require_none(scratch.damage() + outputs->damage());
  if (legal) {
    require(status.ok(), status.message());
    return true;
  }
  require(status.code() == StatusCode::invalid_data, "bad lists were not refused as such");
  require_good_refusal(status);
  require(outputs->outputs_untouched(), "wrote although it refused");
  return false;
}

void metadata(const Lists& lists, bool assume_sorted, const Options& options) {
  MetadataDesc d;
  d.tokens = lists.tokens;
  d.experts = lists.experts;
  d.list_length = lists.length();
  d.assume_sorted = assume_sorted;
  Arena arena;
  MetadataArgs args;
  args.slot_experts = arena.input("slot_experts", lists.routing.experts);
  args.slot_tokens = arena.input("slot_tokens", lists.routing.tokens);
  args.counts = arena.output_int32("counts", d.experts);
  args.offsets = arena.output_int32("offsets", d.experts + 1);
  args.row_tokens = arena.output_int32("row_tokens", d.slots());
  args.row_slots = arena.output_int32("row_slots", d.slots());
  args.slot_rows = arena.output_int32("slot_rows", d.slots());
  args.token_offsets = arena.output_int32("token_offsets", d.tokens + 1);
  args.token_slots = arena.output_int32("token_slots", d.slots());
  const bool legal = lists.legal && (lists.sorted || !assume_sorted);
  if (!run(d, args, options, legal, &arena)) return;

  const testkit::Grouping g = testkit::group(lists.routing, d.tokens, d.experts);
  const auto in_use = [&](const char* name) {
    std::vector<std::int32_t> values = arena.int32(name);
    values.resize(g.rows());
    return values;
  };
  require(arena.int32("counts") == g.counts, "counts");
  require(arena.int32("offsets") == g.offsets, "offsets");
  require(arena.int32("slot_rows") == g.slot_rows, "slot_rows");
  require(arena.int32("token_offsets") == g.token_offsets, "token_offsets");
  require(in_use("row_tokens") == g.row_tokens, "row_tokens");
  require(in_use("row_slots") == g.row_slots, "row_slots");
  require(in_use("token_slots") == g.token_slots, "token_slots");
}

void layer(const Lists& lists, bool assume_sorted, std::uint64_t seed, const Options& options) {
  LayerDesc d;
  d.tokens = lists.tokens;
  d.experts.hidden = 8;
  d.experts.intermediate = 8;
  d.router.experts = lists.experts;
  d.router.input = RouterInput::lists;
  d.experts.dtype = seed % 2 == 0 ? DType::f32 : DType::bf16;
  d.experts.bias = seed % 3 == 0;
  testkit::Problem problem = testkit::make_problem(testkit::custom_case(d, seed));
  problem.desc.router.list_length = lists.length();
  problem.desc.router.assume_sorted = assume_sorted;
  problem.lists = lists.routing;
  for (std::int64_t i = 0; i < lists.length(); ++i) {
    problem.list_scores.push_back(testkit::Random(seed, 99).normal(i));
  }
  const testkit::LayerRun run = testkit::run_layer(problem, {}, options);
  require_none(run.damage);
  if (!lists.legal || (assume_sorted && !lists.sorted)) {
    require(run.status.code() == StatusCode::invalid_data, "bad lists were not refused as such");
    return;
  }
  require(run.status.ok(), run.status.message());
  const testkit::Grouping g = testkit::group(lists.routing, d.tokens, d.router.experts);
  require(run.counts == g.counts, "counts of the layer");
  for (const auto* tensor : {&run.tensors.o, &run.tensors.dx, &run.tensors.dw1, &run.tensors.dw2}) {
    for (const double value : *tensor) require(std::isfinite(value), "not finite");
  }
  for (std::size_t slot = 0; slot < lists.routing.slots(); ++slot) {
    require(g.slot_rows[slot] >= 0 || run.tensors.dscores[slot] == 0, "dscore of a sentinel");
  }
}

/// Lists that no forward wrote: tokens must ascend, and nothing else may go wrong.
void rounding_gradient(const Lists& lists, const Options& options) {
  TokenRoundingGradDesc d;
  d.tokens = lists.tokens;
  d.experts = lists.experts;
  d.top_k = 1 + lists.length() % lists.experts;
  d.list_length = lists.length();
  Arena arena;
  TokenRoundingGradArgs args;
  const testkit::Random random(lists.length(), 98);
  testkit::Tensor logits(d.tokens * d.experts), dscores(d.list_length);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = random.normal(i);
  for (std::size_t i = 0; i < dscores.size(); ++i) {
    const bool sentinel = testkit::is_sentinel(lists.routing.experts[i], d.experts);
    dscores[i] = sentinel ? std::nan("") : random.normal(i + logits.size());
  }
  args.logits = arena.input("logits", logits, d.dtype);
  args.token_ids = arena.input("token_ids", lists.routing.tokens);
  args.expert_ids = arena.input("expert_ids", lists.routing.experts);
  args.dscores = static_cast<const float*>(arena.input("dscores", dscores, DType::f32));
  args.dlogits = arena.output("dlogits", logits.size(), d.dtype);
  if (!run(d, args, options, lists.legal && lists.sorted, &arena)) return;
  for (const double value : arena.tensor("dlogits", d.dtype)) {
    require(std::isfinite(value), "dlogits are not finite");
  }
}

}  // namespace
}  // namespace sonicmoe::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  namespace fuzz = sonicmoe::fuzz;
  FuzzedDataProvider in(data, size);
  const sonicmoe::Options options = fuzz::few_threads(&in);
  const bool assume_sorted = in.ConsumeBool();
  const auto seed = in.ConsumeIntegral<std::uint16_t>();
  const fuzz::Lists lists(&in);
  fuzz::metadata(lists, assume_sorted, options);
  fuzz::rounding_gradient(lists, options);
  // A layer's workspace has megabytes, so this is slow.
  if (seed % 8 == 0) fuzz::layer(lists, assume_sorted, seed / 8, options);
  return 0;
}
