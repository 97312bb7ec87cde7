// Sizes, enums and combinations of a descriptor.
#include "core/validate.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/activation_table.h"
#include "core/checker.h"

namespace sonicmoe {
namespace {

constexpr std::size_t kWorkspaceAlignment = 256;

/// Checks of where rows come from, where their scores enter, and what is kept of them.
void row_source(const ExpertsDesc& desc, Checker* check) {
  check->known("recompute", desc.recompute);
  check->known("row_source", desc.row_source).known("score_at", desc.score_at);
  check->known("index_type", desc.index_type);
  const bool combines = desc.score_at == ScoreAt::combine;
  check->require(!desc.gathers() || combines, "score_at", name(desc.score_at),
                 "combine with gathered rows");
  check->require(desc.gathers() || !combines, "score_at", "combine",
                 "none, before_down, after_down with contiguous rows");
  check->require(!desc.gathers() || desc.index_type == IndexType::i32, "index_type", "i64",
                 "i32 with gathered rows");
  check->require(!desc.gathers() || !desc.zero_tail, "zero_tail", "true",
                 "false with gathered rows");
  check->range("expected_rows", desc.expected_rows, 0, desc.gathers() ? 0 : kMaxIndex);
}

/// Checks of every descriptor with grouped rows.
Checker grouped(const GroupedDesc& desc) {
  Checker check;
  row_source(desc, &check);
  check.range("tokens", desc.tokens, 0, desc.gathers() ? kMaxIndex : 0);
  check.range("rows", desc.rows, 0, kMaxIndex).width("hidden", desc.hidden);
  check.width("intermediate", desc.intermediate).experts(desc.experts).dtype(desc.dtype);
  check.activation(desc.activation).layout(desc.w1_layout, desc.activation);
  return check;
}

/// Which group of a token's choices wins, and whether enough experts stay.
void groups(const RouterDesc& d, Checker* check) {
  check->range("groups", d.groups, 1, kMaxGroups).range("kept_groups", d.kept_groups, 1, d.groups);
  check->known("group_score", d.group_score);
  if (!check->status().ok()) return;
  const std::int64_t of_group = d.experts / d.groups;
  check->require(d.experts % d.groups == 0, "groups", std::to_string(d.groups).c_str(),
                 ("divisors of experts (" + std::to_string(d.experts) + ")").c_str());
  check->require(d.groups == 1 || d.top_k <= d.kept_groups * of_group, "kept_groups",
                 std::to_string(d.kept_groups).c_str(),
                 "so many that top_k experts stay: top_k at most kept_groups * experts / groups");
  const bool two = d.group_score == GroupScore::sum_of_two;
  check->require(!two || d.groups == 1 || of_group >= 2, "group_score", "sum_of_two",
                 "largest with one expert a group");
}

/// What turns logits into experts and scores; without logits every option has its default.
void options(const RouterDesc& d, Checker* check) {
  check->known("router_score", d.score).known("router_order", d.order);
  if (!d.has_logits()) {
    check->require(d.score == RouterScore::softmax, "router_score", name(d.score),
                   "softmax (the default) without logits");
    check->require(d.order == RouterOrder::select_then_score, "router_order", name(d.order),
                   "select_then_score (the default) without logits");
    check->require(!d.renormalize, "renormalize", "true", "false without logits");
    check->require(d.scale == 1.0f, "scale", text_of(d.scale).c_str(),
                   "the default without logits");
    check->require(!d.expert_scale, "expert_scale", "true", "false without logits");
    check->require(!d.f32_logits, "f32_logits", "true", "false without logits");
  }
  check->require(std::isfinite(d.eps) && d.eps >= 0, "eps", text_of(d.eps).c_str(),
                 "finite numbers from 0 on");
  check->require(d.eps == 0 || (d.renormalize && !d.over_top_k()), "eps", text_of(d.eps).c_str(),
                 "0 unless renormalize divides by a sum (a softmax over the top-K adds up to 1)");
  check->require(std::isfinite(d.scale) && d.scale > 0, "scale", text_of(d.scale).c_str(),
                 "finite numbers above 0");
  check->require(!d.logit_bias || d.projects(), "logit_bias", "true",
                 "false unless router_input is projection");
  check->require(!d.f32_router_w || d.projects(), "f32_router_w", "true",
                 "false unless router_input is projection");
  check->require(!d.f32_router_w || d.f32_logits, "f32_router_w", "true",
                 "false without f32_logits");
  check->require(!d.selection_bias || d.chooses(), "selection_bias", "true",
                 "false unless router_input is projection, logits");
  check->require(d.groups == 1 || d.chooses(), "groups", std::to_string(d.groups).c_str(),
                 "1 unless router_input is projection, logits");
  groups(d, check);
}

/// Token rounding knows the softmax alone.
void roundable(const RouterDesc& d, Checker* check) {
  check->require(d.score == RouterScore::softmax, "router_score", name(d.score),
                 "softmax with token rounding");
  check->require(d.eps == 0, "eps", text_of(d.eps).c_str(), "0 with token rounding");
  check->require(d.scale == 1, "scale", text_of(d.scale).c_str(), "1 with token rounding");
  check->require(!d.logit_bias, "logit_bias", "true", "false with token rounding");
  check->require(!d.selection_bias, "selection_bias", "true", "false with token rounding");
  check->require(!d.expert_scale, "expert_scale", "true", "false with token rounding");
  check->require(d.groups == 1, "groups", std::to_string(d.groups).c_str(),
                 "1 with token rounding");
}

/// Checks of every descriptor of an operation that chooses experts. top_k also scores ids of the
/// caller.
template <class Desc>
Checker routed(const Desc& d, bool may_take_ids = false) {
  Checker check;
  check.tokens(d.tokens).experts(d.experts).top_k(d.top_k, d.experts).rows(d.tokens, d.top_k);
  const char* const allowed =
      may_take_ids ? "projection, logits, logits_and_ids" : "projection, logits";
  check.dtype(d.dtype).known("router_input", d.input, allowed);
  check.require(d.chooses() || (may_take_ids && d.has_logits()), "router_input", name(d.input),
                allowed);
  check.require(!d.assume_sorted, "assume_sorted", "true", "false");
  options(d, &check);
  return check;
}

/// Checks of a router's input and of what depends on it.
Checker router(const RouterDesc& d) {
  Checker check;
  check.known("router_input", d.input);
  options(d, &check);
  return check;
}

/// Checks of a router, alone or in a layer.
Checker routing(const RoutingDesc& d) {
  Checker check = router(d);
  check.tokens(d.tokens).width("hidden", d.hidden).experts(d.experts);
  if (d.takes_lists()) {
    check.range("top_k", d.top_k, 0, 0).range("list_length", d.list_length, 0, kMaxIndex);
  } else {
    check.top_k(d.top_k, d.experts).rows(d.tokens, d.top_k);
    check.range("list_length", d.list_length, 0, 0);
    check.require(!d.assume_sorted, "assume_sorted", "true", "false unless router_input is lists");
  }
  check.range("rounding_tile", d.rounding.tile, 0, 1024).known("rounding_rule", d.rounding.rule);
  check.require(d.rounding.tile == 0 || d.chooses(), "router_input", name(d.input),
                "projection, logits with token rounding");
  if (d.rounding.tile > 0) roundable(d, &check);
  const bool gives_ids = d.input == RouterInput::ids_and_weights;
  check.range("max_rows", d.max_rows, 0, gives_ids ? kMaxIndex : 0);
  if (check.status().ok()) check.range("rows", d.slots(), 0, kMaxIndex);
  return check.dtype(d.dtype);
}

}  // namespace

Status validate(Device device) {
  Checker check;
  check.known("device.type", device.type);
  if (device.type == DeviceType::cpu) check.range("device.index", device.index, 0, 0);
  return check.range("device.index", device.index, 0, kMaxIndex).status();
}

Status validate(const Options& options) {
  if (options.kernel.find('\0') != std::string::npos) {
    return Status::error(StatusCode::invalid_argument,
                         "kernel: got a name with a zero byte, allowed: a name or backend of "
                         "sonicmoe::kernels()");
  }
  return Checker().range("threads", options.threads, 0, 4096).status();
}

Status validate(Workspace workspace, std::size_t needed) {
  if (needed == 0) return {};
  if (workspace.bytes < needed) {
    return Status::error(StatusCode::invalid_argument,
                         "workspace: got %zu bytes, allowed: at least %zu", workspace.bytes,
                         needed);
  }
  return Checker()
      .tensor("workspace", workspace.data, 1, "memory of the plan's device", kWorkspaceAlignment)
      .status();
}

Status validate(const LayerDesc& d) {
  Checker check = routing(d.routing());
  check.width("intermediate", d.experts.intermediate).activation(d.experts.activation);
  check.known("row_source", d.experts.row_source);
  check.require(d.experts.gathers(), "row_source", "contiguous", "gathered in a layer");
  row_source(d.experts, &check);
  return check.layout(d.experts.w1_layout, d.experts.activation).status();
}

Status validate(const RoutingDesc& d) { return routing(d).status(); }

Status validate(const GroupedDesc& d) { return grouped(d).status(); }

Status validate_backward(bool inference) {
  return Checker()
      .require(!inference, "inference", "true", "false: an inference plan keeps nothing")
      .status();
}

Status validate(const RouterGemmDesc& d) {
  Checker check;
  check.range("pass", static_cast<int>(d.pass), 0, 2).tokens(d.tokens).width("hidden", d.hidden);
  check.require(!d.f32_w || d.f32_logits, "f32_w", "true", "false without f32_logits");
  return check.experts(d.experts).dtype(d.dtype).status();
}

Status validate(const TopKDesc& d) {
  return Checker(routed(d, true)).range("list_length", d.list_length, 0, 0).status();
}

Status validate(const MetadataDesc& d) {
  Checker check;
  check.tokens(d.tokens).experts(d.experts).range("top_k", d.top_k, 0, d.experts);
  check.rows(d.tokens, d.top_k).range("list_length", d.list_length, 0, d.top_k > 0 ? 0 : kMaxIndex);
  check.require(!d.assume_sorted || d.top_k == 0, "assume_sorted", "true",
                "false unless top_k is 0 (lists)");
  if (!check.status().ok()) return check.status();  // the product may overflow
  return check.range("row_capacity", d.row_capacity, 0, d.top_k > 0 ? d.slots() : 0).status();
}

Status validate(const SegmentsDesc& d) {
  Checker check;
  check.range("rows", d.rows, 0, kMaxIndex).experts(d.experts).known("index_type", d.index_type);
  return check.range("expected_rows", d.expected_rows, 0, kMaxIndex).status();
}

Status validate(const ZeroTailDesc& d) {
  Checker check;
  check.range("rows", d.rows, 0, kMaxIndex).width("hidden", d.hidden).experts(d.experts);
  return check.dtype(d.dtype).status();
}

Status validate(const GroupedGemmDesc& d) {
  Checker check(grouped(d));
  return check.range("op", static_cast<int>(d.op), 0, 5).status();
}

Status validate(const BiasGradDesc& d) { return grouped(d).status(); }

Status validate(const AggregateDesc& d) {
  Checker check;
  check.tokens(d.tokens).range("rows", d.rows, 0, kMaxIndex).width("hidden", d.hidden);
  check.range("top_k", d.top_k, 0, kMaxExperts).rows(d.tokens, d.top_k);
  if (d.top_k > 0) check.some_rows(d.rows, d.tokens, d.top_k);
  check.range("experts", d.experts, 0, kMaxExperts);
  if (d.experts > 0) check.range("top_k", d.top_k, 1, std::min(d.experts, kMaxRoutedTopK));
  check.require(!d.f32_dlogits || d.experts > 0, "f32_dlogits", "true", "false without experts");
  check.require(!d.f32_router_w || d.f32_dlogits, "f32_router_w", "true",
                "false without f32_dlogits");
  return check.dtype(d.dtype).status();
}

Status validate(const CombineDesc& d) {
  return validate(AggregateDesc{d.tokens, d.rows, d.hidden, d.top_k, d.dtype, d.experts,
                                d.f32_dlogits, d.f32_router_w});
}

Status validate(const ScoreGradDesc& d) {
  Checker check = router(d);
  check.tokens(d.tokens).experts(d.experts).dtype(d.dtype);
  if (d.takes_lists()) {
    check.range("top_k", d.top_k, 0, 0).range("rows", d.rows, 0, kMaxIndex);
  } else {
    check.top_k(d.top_k, d.experts).rows(d.tokens, d.top_k).all_rows(d.rows, d.tokens, d.top_k);
  }
  return check.status();
}

Status validate(const AuxLossDesc& d) {
  Checker check;
  check.tokens(d.tokens).experts(d.experts).dtype(d.dtype).known("loss", d.loss);
  check.known("score", d.score);
  const bool balance = d.loss == RouterLoss::balance;
  check.require(balance || d.score == RouterScore::softmax, "score", name(d.score),
                "softmax (the default) with loss z");
  check.range("sequences", d.sequences, 1, balance ? std::max<std::int64_t>(d.tokens, 1) : 1);
  if (!check.status().ok()) return check.status();
  return check
      .require(d.tokens % d.sequences == 0, "sequences", std::to_string(d.sequences).c_str(),
               "divisors of tokens")
      .status();
}

Status validate(const UpdateSelectionBiasDesc& d) { return Checker().experts(d.experts).status(); }

Status validate(const TokenRoundingDesc& d) {
  Checker check = routed(d);
  check.range("list_length", d.list_length, 0, 0).known("rule", d.rule);
  check.range("tile", d.tile, 1, 1024);
  roundable(d, &check);
  if (check.status().ok()) check.range("capacity", d.capacity(), 0, kMaxIndex);
  return check.status();
}

Status validate(const TokenRoundingGradDesc& d) {
  Checker check = routed(d);
  roundable(d, &check);
  return check.range("list_length", d.list_length, 0, kMaxIndex).status();
}

Status validate(const TokenDispatchDesc& d) {
  Checker check;
  check.tokens(d.tokens).range("ranks", d.ranks, 1, 1024);
  check.experts(d.experts).range("top_k", d.top_k, 1, kMaxExperts).rows(d.tokens, d.top_k);
  if (!check.status().ok()) return check.status();  // the products may overflow
  check.range("experts * ranks", d.experts * d.ranks, 1, kMaxExperts);
  return check.range("rows * min(top_k, experts)", d.rows() * d.columns(), 0, kMaxIndex - 1)
      .status();
}

Status validate(const SendRowsDesc& d) {
  Checker check;
  check.tokens(d.tokens).width("hidden", d.hidden).range("ranks", d.ranks, 1, d.kMostRanks);
  check.dtype(d.dtype);
  if (!check.status().ok()) return check.status();  // the product may overflow
  return check.range("tokens * ranks", d.tokens * d.ranks, 0, kMaxIndex).status();
}

}  // namespace sonicmoe
