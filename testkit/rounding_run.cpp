#include <numeric>

#include "testkit/buffer.h"
#include "testkit/device_memory.h"
#include "testkit/rounding.h"

namespace sonicmoe::testkit {
namespace {

/// Makes the plan and runs it with a workspace of exactly the size it asks for.
template <class Desc>
Status run(const Desc& desc, const typename Desc::Args& args, Device device, const Options& options,
           const Arena& arena) {
  const auto plan = make_plan(desc, device, options);
  if (!plan.ok()) return plan.status();
  Arena scratch(device);
  const std::size_t bytes = plan.value().workspace_bytes();
  Status status = plan.value().run(args, {scratch.output("workspace", bytes, 256), bytes});
  if (status.ok()) status = synchronize(device);
  std::string wrong = arena.damage() + scratch.damage();
  if (!status.ok() && !arena.outputs_untouched()) wrong += "wrote results although it refused";
  if (wrong.empty()) return status;
  return Status::error(StatusCode::device_error, "%s", wrong.c_str());
}

std::vector<float> floats(const Arena& arena, const std::string& name) {
  const Tensor values = arena.tensor(name, DType::f32);
  return {values.begin(), values.end()};
}

}  // namespace

Result<TokenChoice> RoundingRunner::choose(const Options& options) const {
  TokenChoice out;
  TopKDesc d;
  d.tokens = desc_.tokens;
  d.experts = desc_.experts;
  d.dtype = desc_.dtype;
  const auto top_k = [&](std::int64_t k, RouterOrder order, bool norm, auto take) {
    d.top_k = k;
    d.order = order;
    d.renormalize = norm;
    Arena arena(device_);
    TopKArgs args;
    args.logits = arena.input("logits", logits_);
    args.scores = arena.output_float("scores", d.tokens * k);
    args.ids = arena.output_int32("ids", d.tokens * k);
    const Status status = run(d, args, device_, options, arena);
    if (status.ok()) take(arena.int32("ids"), floats(arena, "scores"));
    return status;
  };
  Status status = top_k(desc_.top_k, desc_.order, desc_.renormalize, [&](auto ids, auto scores) {
    out.ids = std::move(ids);
    out.scores = std::move(scores);
  });
  if (!status.ok()) return status;
  // The best E of E experts: their probabilities, in another order.
  status = top_k(desc_.experts, RouterOrder::score_then_select, false, [&](auto ids, auto scores) {
    out.probabilities.resize(scores.size());
    for (std::size_t i = 0; i < scores.size(); ++i) {
      out.probabilities[i / desc_.experts * desc_.experts + ids[i]] = scores[i];
    }
  });
  if (!status.ok()) return status;
  return out;
}

Result<RoundedLists> RoundingRunner::round(std::uint64_t seed, std::uint64_t offset,
                                           const Options& options) const {
  Arena arena(device_);
  TokenRoundingArgs args;
  args.seed = seed;
  args.offset = offset;
  args.logits = arena.input("logits", logits_);
  args.scores = arena.output_float("scores", desc_.capacity());
  args.token_ids = arena.output_int32("token_ids", desc_.capacity());
  args.expert_ids = arena.output_int32("expert_ids", desc_.capacity());
  args.counts = arena.output_int32("counts", desc_.experts);
  args.frequency = arena.output_int32("frequency", desc_.experts);
  if (const Status status = run(desc_, args, device_, options, arena); !status.ok()) return status;
  return RoundedLists{floats(arena, "scores"), arena.int32("token_ids"), arena.int32("expert_ids"),
                      arena.int32("counts"), arena.int32("frequency")};
}

Result<Tensor> RoundingRunner::gradient(const RoundedLists& lists, const Tensor& dscores,
                                        const Tensor& dlogits_in, const Options& options,
                                        bool offsets) const {
  TokenRoundingGradDesc d;
  d.tokens = desc_.tokens;
  d.experts = desc_.experts;
  d.top_k = desc_.top_k;
  d.dtype = desc_.dtype;
  d.order = desc_.order;
  d.renormalize = desc_.renormalize;
  d.list_length = static_cast<std::int64_t>(lists.token_ids.size());
  Arena arena(device_);
  TokenRoundingGradArgs args;
  args.logits = arena.input("logits", logits_);
  args.token_ids = arena.input("token_ids", lists.token_ids);
  args.expert_ids = arena.input("expert_ids", lists.expert_ids);
  std::vector<std::int32_t> begins(d.tokens + 1);
  for (std::size_t i = 0; i < lists.token_ids.size(); ++i) {
    if (lists.expert_ids[i] < d.experts) ++begins[lists.token_ids[i] + 1];
  }
  std::partial_sum(begins.begin(), begins.end(), begins.begin());
  if (offsets) args.token_offsets = arena.input("token_offsets", begins);
  args.dscores = static_cast<const float*>(arena.input("dscores", dscores, DType::f32));
  args.dlogits_in = arena.input("dlogits_in", dlogits_in, d.dtype);
  args.dlogits = arena.output("dlogits", d.tokens * d.experts, d.dtype);
  if (const Status status = run(d, args, device_, options, arena); !status.ok()) return status;
  return arena.tensor("dlogits", d.dtype);
}

}  // namespace sonicmoe::testkit
