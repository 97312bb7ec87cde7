#include "core/validate.h"

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <string>

#include "core/activation_table.h"

namespace sonicmoe {
namespace {

// Row and token indices are int32. The other bounds keep every byte count inside 63 bits.
constexpr std::int64_t kMaxIndex = INT32_MAX;
constexpr std::int64_t kMaxWidth = std::int64_t{1} << 20;
constexpr std::int64_t kMaxExperts = std::int64_t{1} << 16;
constexpr const char* kRules = "nearest, stochastic, nearest_scores, balance, up, down";
constexpr std::size_t kTensorAlignment = 16;
constexpr std::size_t kWorkspaceAlignment = 256;

/// Collects checks; the first that fails is the answer.
class Checker {
 public:
  Status status() const { return status_; }

  Checker& range(const char* argument, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (!status_.ok() || (value >= low && value <= high)) return *this;
    if (low == high) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "%s: got %" PRId64 ", allowed: %" PRId64, argument, value, low);
    } else {
      status_ = Status::error(StatusCode::invalid_argument,
                              "%s: got %" PRId64 ", allowed: %" PRId64 " to %" PRId64, argument,
                              value, low, high);
    }
    return *this;
  }

  Checker& width(const char* argument, std::int64_t value) {
    if (status_.ok() && (value < 8 || value > kMaxWidth || value % 8 != 0)) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "%s: got %" PRId64 ", allowed: multiples of 8 from 8 to %" PRId64,
                              argument, value, kMaxWidth);
    }
    return *this;
  }

  Checker& tokens(std::int64_t value) { return range("tokens", value, 0, kMaxIndex); }
  Checker& experts(std::int64_t value) { return range("experts", value, 1, kMaxExperts); }

  Checker& top_k(std::int64_t value, std::int64_t experts) {
    if (status_.ok() && (value < 1 || value > experts)) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "top_k: got %" PRId64 ", allowed: 1 to experts (%" PRId64 ")", value,
                              experts);
    }
    return *this;
  }

  Checker& rows(std::int64_t tokens, std::int64_t top_k) {
    if (status_.ok() && tokens * top_k > kMaxIndex) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "tokens * top_k: got %" PRId64 ", allowed: at most %" PRId64,
                              tokens * top_k, kMaxIndex);
    }
    return *this;
  }
  /// All pairs of a router mode. The product fits once rows() has passed.
  Checker& all_rows(std::int64_t value, std::int64_t tokens, std::int64_t top_k) {
    return status_.ok() ? range("rows", value, tokens * top_k, tokens * top_k) : *this;
  }

  template <class Enum>
  Checker& known(const char* argument, Enum value, const char* allowed) {
    if (status_.ok() && name(value)[0] == '?') {
      status_ = Status::error(StatusCode::invalid_argument, "%s: got %d, allowed: %s", argument,
                              static_cast<int>(value), allowed);
    }
    return *this;
  }

  Checker& dtype(DType value) { return known("dtype", value, "f32, bf16, f16"); }
  Checker& activation(const ActivationSpec& value) {
    if (!status_.ok()) return *this;
    const std::string reason = refusal(value);
    if (!reason.empty())
      status_ = Status::error(StatusCode::invalid_argument, "%s", reason.c_str());
    return *this;
  }
  Checker& layout(W1Layout value, const ActivationSpec& activation) {
    known("w1_layout", value, "interleaved, concatenated, separate");
    require(value != W1Layout::separate || is_glu(activation), "w1_layout", "separate",
            "interleaved or concatenated for an activation without a gate");
    return *this;
  }
  Checker& router(RouterMode value) {
    return known("router", value, "softmax_over_topk, topk_over_softmax, given");
  }

  Checker& require(bool condition, const char* argument, const char* value, const char* allowed) {
    if (status_.ok() && !condition) {
      status_ = Status::error(StatusCode::invalid_argument, "%s: got %s, allowed: %s", argument,
                              value, allowed);
    }
    return *this;
  }

  /// A tensor of `elements` elements that the call reads or writes. Null is fine when it is empty.
  Checker& tensor(const char* argument, const void* pointer, std::int64_t elements,
                  const char* shape, std::size_t alignment = kTensorAlignment) {
    if (!status_.ok() || elements == 0) return *this;
    if (pointer == nullptr) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "%s: got null, allowed: a pointer to %s", argument, shape);
    } else if (reinterpret_cast<std::uintptr_t>(pointer) % alignment != 0) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "%s: got address %p, allowed: multiples of %zu bytes", argument,
                              pointer, alignment);
    }
    return *this;
  }
  Checker& ints(const char* argument, const void* pointer, std::int64_t elements,
                const char* shape) {
    return tensor(argument, pointer, elements, shape, 4);
  }
  /// May be null, but not misaligned.
  Checker& optional(const char* argument, const void* pointer, std::int64_t elements,
                    std::size_t alignment = kTensorAlignment) {
    return pointer == nullptr ? *this : tensor(argument, pointer, elements, "", alignment);
  }

  /// W1, dW1: one tensor (E, 2n or n, d), or two (E, n, d).
  Checker& up_weights(const char* argument, const char* up_argument, const void* pointer,
                      const void* up_pointer, W1Layout layout) {
    const bool two = layout == W1Layout::separate;
    tensor(argument, pointer, 1, two ? "the gate rows (E, n, d)" : "(E, 2n or n, d)");
    if (two) tensor(up_argument, up_pointer, 1, "the up rows (E, n, d)");
    return *this;
  }
  Checker& up_bias(const char* argument, const char* up_argument, const void* pointer,
                   const void* up_pointer, W1Layout layout) {
    const bool two = layout == W1Layout::separate;
    tensor(argument, pointer, 1, two ? "the gate biases (E, n)" : "(E, 2n or n)");
    if (two) tensor(up_argument, up_pointer, 1, "the up biases (E, n)");
    return *this;
  }

 private:
  Status status_;
};

/// What the grouped descriptors share.
template <class Desc>
Checker grouped(const Desc& desc) {
  Checker check;
  check.tokens(desc.tokens).range("rows", desc.rows, 0, kMaxIndex).width("hidden", desc.hidden);
  check.width("intermediate", desc.intermediate).experts(desc.experts).dtype(desc.dtype);
  check.activation(desc.activation).layout(desc.w1_layout, desc.activation);
  return check;
}

/// What the descriptors that route logits share.
template <class Desc>
Checker routed(const Desc& d) {
  Checker check;
  check.tokens(d.tokens).experts(d.experts).top_k(d.top_k, d.experts).rows(d.tokens, d.top_k);
  constexpr const char* kModes = "softmax_over_topk, topk_over_softmax";
  check.dtype(d.dtype).known("mode", d.mode, kModes);
  check.require(d.mode != RouterMode::given, "mode", "given", kModes);
  return check;
}

}  // namespace

Status validate(Device device) {
  Checker check;
  check.known("device.type", device.type, "cpu, cuda");
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
  Checker check;
  check.router(d.router.mode).tokens(d.tokens).width("hidden", d.experts.hidden);
  check.width("intermediate", d.experts.intermediate).experts(d.router.experts);
  const bool given = d.router.mode == RouterMode::given;
  if (given) {
    check.range("top_k", d.router.top_k, 0, 0)
        .range("list_length", d.router.list_length, 0, kMaxIndex);
  } else {
    check.top_k(d.router.top_k, d.router.experts).rows(d.tokens, d.router.top_k);
    check.range("list_length", d.router.list_length, 0, 0);
    check.require(!d.router.assume_sorted, "assume_sorted", "true",
                  "false unless the routing is given");
  }
  check.require(!d.router.norm_topk_probs || d.router.mode != RouterMode::given, "norm_topk_probs",
                "true", "false when the routing is given");
  check.range("rounding_tile", d.rounding.tile, 0, given ? 0 : 1024);
  check.known("rounding_rule", d.rounding.rule, kRules);
  if (check.status().ok()) check.range("rows", d.rows(), 0, kMaxIndex);
  check.dtype(d.experts.dtype)
      .activation(d.experts.activation)
      .layout(d.experts.w1_layout, d.experts.activation);
  return check.status();
}

Status validate(const RouterGemmDesc& d) {
  Checker check;
  check.range("pass", static_cast<int>(d.pass), 0, 2).tokens(d.tokens).width("hidden", d.hidden);
  return check.experts(d.experts).dtype(d.dtype).status();
}

Status validate(const TopKDesc& d) { return routed(d).status(); }

Status validate(const MetadataDesc& d) {
  Checker check;
  check.tokens(d.tokens).experts(d.experts).range("top_k", d.top_k, 0, d.experts);
  check.rows(d.tokens, d.top_k).range("list_length", d.list_length, 0, d.top_k > 0 ? 0 : kMaxIndex);
  check.require(!d.assume_sorted || d.top_k == 0, "assume_sorted", "true",
                "false unless top_k is 0 (lists)");
  return check.status();
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
  if (d.top_k > 0) check.all_rows(d.rows, d.tokens, d.top_k);
  check.range("experts", d.experts, 0, kMaxExperts);
  if (d.experts > 0) check.range("top_k", d.top_k, 1, std::min(d.experts, kMaxRoutedTopK));
  return check.dtype(d.dtype).status();
}

Status validate(const ScoreGradDesc& d) {
  Checker check;
  check.tokens(d.tokens).experts(d.experts).router(d.mode).dtype(d.dtype);
  if (d.mode == RouterMode::given) {
    check.range("top_k", d.top_k, 0, 0).range("rows", d.rows, 0, kMaxIndex);
  } else {
    check.top_k(d.top_k, d.experts).rows(d.tokens, d.top_k).all_rows(d.rows, d.tokens, d.top_k);
  }
  return check.status();
}

Status validate(const AuxLossDesc& d) {
  return Checker().tokens(d.tokens).experts(d.experts).dtype(d.dtype).status();
}

Status validate(const TokenRoundingDesc& d) {
  Checker check = routed(d);
  check.known("rule", d.rule, kRules);
  check.range("tile", d.tile, 1, 1024);
  if (check.status().ok()) check.range("capacity", d.capacity(), 0, kMaxIndex);
  return check.status();
}

Status validate(const TokenRoundingGradDesc& d) {
  return Checker(routed(d)).range("list_length", d.list_length, 0, kMaxIndex).status();
}

Status validate(const LayerDesc& d, const ForwardArgs& a) {
  const bool given = d.router.mode == RouterMode::given;
  Checker check;
  check.tensor("x", a.x, d.tokens, "(T, d)");
  if (given) {
    check.ints("list_tokens", a.list_tokens, d.router.list_length, "(L) int32");
    check.ints("list_experts", a.list_experts, d.router.list_length, "(L) int32");
    check.ints("list_scores", a.list_scores, d.router.list_length, "(L) float");
  } else {
    check.tensor("router_w", a.router_w, 1, "(E, d)");
  }
  check.up_weights("w1", "w1_up", a.w1, a.w1_up, d.experts.w1_layout)
      .tensor("w2", a.w2, 1, "(E, d, n)");
  if (d.experts.bias) {
    check.up_bias("b1", "b1_up", a.b1, a.b1_up, d.experts.w1_layout)
        .tensor("b2", a.b2, 1, "(E, d)");
  }
  check.tensor("o", a.o, d.tokens, "(T, d)");
  if (!given) {
    check.tensor("logits", a.logits, d.tokens, "(T, E)");
    if (d.rounding.tile > 0) {
      check.optional("frequency", a.frequency, 1, 4).optional("draws", a.draws, 1, 8);
    } else {
      check.optional("scores", a.scores, d.tokens, 4);
      check.optional("expert_ids", a.expert_ids, d.tokens, 4);
    }
  }
  check.optional("error_word", a.error_word, 1, 4);
  check.ints("counts", a.counts, 1, "(E) int32");
  if (!d.experts.inference) {
    check.tensor("preact", a.preact, d.rows(), "(R, 2n or n)");
    check.tensor("routing", a.routing, 1, "saved_bytes().routing bytes");
  }
  return check.status();
}

Status validate(const LayerDesc& d, const BackwardArgs& a) {
  const bool given = d.router.mode == RouterMode::given;
  Checker check;
  check.require(!d.experts.inference, "inference", "true",
                "false: an inference plan keeps nothing");
  check.tensor("x", a.x, d.tokens, "(T, d)");
  if (!given) check.tensor("router_w", a.router_w, 1, "(E, d)");
  check.up_weights("w1", "w1_up", a.w1, a.w1_up, d.experts.w1_layout)
      .tensor("w2", a.w2, 1, "(E, d, n)");
  if (d.experts.bias) check.tensor("b2", a.b2, 1, "(E, d)");
  if (d.needs_logits()) {
    check.tensor("logits", a.logits, d.tokens, "(T, E)");
  }
  check.tensor("preact", a.preact, d.rows(), "(R, 2n or n)");
  check.tensor("routing", a.routing, 1, "saved_bytes().routing bytes");
  check.tensor("dout", a.dout, d.tokens, "(T, d)");
  if (!given) check.optional("dlogits", a.dlogits, d.tokens);
  check.optional("dx", a.dx, d.tokens);
  if (given) {
    check.ints("dscores", a.dscores, d.router.list_length, "(L) float");
  } else {
    check.optional("drouter_w", a.drouter_w, 1);
  }
  const bool separate = d.experts.w1_layout == W1Layout::separate;
  if (a.dw1 != nullptr || (separate && a.dw1_up != nullptr)) {
    check.up_weights("dw1", "dw1_up", a.dw1, a.dw1_up, d.experts.w1_layout);
  }
  check.optional("dw2", a.dw2, 1);
  if (d.experts.bias) {
    check.up_bias("db1", "db1_up", a.db1, a.db1_up, d.experts.w1_layout)
        .tensor("db2", a.db2, 1, "(E, d)");
  }
  if (!d.experts.dpreact_in_workspace) check.tensor("dpreact", a.dpreact, d.rows(), "(R, 2n or n)");
  return check.status();
}

Status validate(const RouterGemmDesc& d, const RouterGemmArgs& a) {
  Checker check;
  if (d.pass != GemmPass::dgrad) check.tensor("x", a.x, d.tokens, "(T, d)");
  if (d.pass != GemmPass::wgrad) check.tensor("w", a.w, 1, "(E, d)");
  if (d.pass != GemmPass::forward) check.tensor("dlogits", a.dlogits, d.tokens, "(T, E)");
  if (d.pass == GemmPass::forward) check.tensor("logits", a.logits, d.tokens, "(T, E)");
  if (d.pass == GemmPass::dgrad) check.tensor("dx", a.dx, d.tokens, "(T, d)");
  if (d.pass == GemmPass::wgrad) check.tensor("dw", a.dw, 1, "(E, d)");
  return check.status();
}

Status validate(const TopKDesc& d, const TopKArgs& a) {
  Checker check;
  check.tensor("logits", a.logits, d.tokens, "(T, E)");
  check.ints("scores", a.scores, d.tokens, "(T, K) float");
  check.ints("ids", a.ids, d.tokens, "(T, K) int32");
  check.optional("block_counts", a.block_counts, d.tokens);
  return check.optional("error_word", a.error_word, 1, 4).status();
}

Status validate(const MetadataDesc& d, const MetadataArgs& a) {
  const std::int64_t slots = d.slots();
  Checker check;
  check.ints("slot_experts", a.slot_experts, slots, "(S) int32");
  if (d.top_k == 0) check.ints("slot_tokens", a.slot_tokens, slots, "(S) int32");
  check.ints("counts", a.counts, 1, "(E) int32").ints("offsets", a.offsets, 1, "(E+1) int32");
  check.ints("row_tokens", a.row_tokens, slots, "(S) int32");
  check.ints("row_slots", a.row_slots, slots, "(S) int32");
  check.ints("slot_rows", a.slot_rows, slots, "(S) int32");
  if (a.row_scores != nullptr) check.ints("slot_scores", a.slot_scores, slots, "(S) float");
  check.optional("row_scores", a.row_scores, slots, 4);
  if (d.top_k == 0) {
    check.ints("token_offsets", a.token_offsets, 1, "(T+1) int32");
    check.ints("token_slots", a.token_slots, slots, "(S) int32");
  }
  check.optional("expert_order", a.expert_order, 1, 4)
      .optional("next_tile_counter", a.next_tile_counter, 1, 4);
  check.optional("block_counts", a.block_counts, slots);
  return check.optional("error_word", a.error_word, 1, 4).status();
}

Status validate(const GroupedGemmDesc& d, const GroupedGemmArgs& a) {
  const GemmOp op = d.op;
  const bool gathers = op != GemmOp::down_proj && op != GemmOp::up_proj_dgrad;
  const bool up = op == GemmOp::up_proj || op == GemmOp::up_proj_wgrad;
  Checker check;
  check.ints("offsets", a.offsets, 1, "(E+1) int32");
  check.optional("expert_order", a.expert_order, 1, 4);
  check.optional("tile_counter", a.tile_counter, 1, 4);
  check.optional("next_tile_counter", a.next_tile_counter, 1, 4);
  check.require(a.next_tile_counter == nullptr || a.next_tile_counter != a.tile_counter,
                "next_tile_counter", "tile_counter", "another word, or null");
  if (gathers) {
    check.ints("row_tokens", a.row_tokens, d.rows, "(R) int32");
    check.tensor(up ? "x" : "dout", up ? a.x : a.dout, d.rows * d.tokens, "(T, d)");
  }
  switch (op) {
    case GemmOp::up_proj:
      check.up_weights("w1", "w1_up", a.w1, a.w1_up, d.w1_layout);
      if (d.bias) check.up_bias("b1", "b1_up", a.b1, a.b1_up, d.w1_layout);
      if (!d.inference) check.tensor("preact", a.preact, d.rows, "(R, 2n or n)");
      check.tensor("act", a.act, d.rows, "(R, n)");
      break;
    case GemmOp::down_proj:
      check.tensor("act", a.act, d.rows, "(R, n)").tensor("w2", a.w2, 1, "(E, d, n)");
      if (d.bias) check.tensor("b2", a.b2, 1, "(E, d)");
      check.tensor("expert_out", a.expert_out, d.rows, "(R, d)");
      break;
    case GemmOp::down_proj_dgrad:
      check.ints("row_scores", a.row_scores, d.rows, "(R) float");
      check.tensor("w2", a.w2, 1, "(E, d, n)").tensor("preact", a.preact, d.rows, "(R, 2n or n)");
      check.tensor("dpreact", a.dpreact, d.rows, "(R, 2n or n)");
      check.tensor("scaled_act", a.scaled_act, d.rows, "(R, n)");
      check.ints("row_dscores", a.row_dscores, d.rows, "(R) float");
      break;
    case GemmOp::up_proj_dgrad:
      check.tensor("dpreact", a.dpreact, d.rows, "(R, 2n or n)");
      check.up_weights("w1", "w1_up", a.w1, a.w1_up, d.w1_layout);
      check.tensor("dx_rows", a.dx_rows, d.rows, "(R, d)");
      break;
    case GemmOp::down_proj_wgrad:
      check.tensor("scaled_act", a.scaled_act, d.rows, "(R, n)");
      check.tensor("dw2", a.dw2, 1, "(E, d, n)");
      break;
    case GemmOp::up_proj_wgrad:
      check.tensor("dpreact", a.dpreact, d.rows, "(R, 2n or n)");
      check.up_weights("dw1", "dw1_up", a.dw1, a.dw1_up, d.w1_layout);
      break;
  }
  return check.status();
}

Status validate(const BiasGradDesc& d, const BiasGradArgs& a) {
  Checker check;
  check.ints("offsets", a.offsets, 1, "(E+1) int32");
  check.ints("row_tokens", a.row_tokens, d.rows, "(R) int32");
  check.ints("row_scores", a.row_scores, d.rows, "(R) float");
  check.tensor("dpreact", a.dpreact, d.rows, "(R, 2n or n)");
  check.tensor("dout", a.dout, d.rows * d.tokens, "(T, d)").tensor("b2", a.b2, 1, "(E, d)");
  check.ints("row_dscores", a.row_dscores, d.rows, "(R) float");
  check.up_bias("db1", "db1_up", a.db1, a.db1_up, d.w1_layout);
  return check.tensor("db2", a.db2, 1, "(E, d)").status();
}

Status validate(const AggregateDesc& d, const AggregateArgs& a) {
  Checker check;
  check.tensor("rows", a.rows, d.rows, "(R, d)");
  check.ints("slot_rows", a.slot_rows, d.rows, "(R) int32");
  if (d.top_k == 0) {
    check.ints("token_offsets", a.token_offsets, 1, "(T+1) int32");
    check.ints("token_slots", a.token_slots, d.rows, "(R) int32");
  }
  check.optional("slot_scores", a.slot_scores, d.rows, 4);
  check.optional("addend", a.addend, d.tokens);
  if (a.router_w != nullptr) {
    check.require(d.experts > 0, "router_w", "a pointer", "null without experts");
    check.require(a.slot_scores == nullptr, "slot_scores", "a pointer", "null with router_w");
    check.tensor("router_w", a.router_w, d.experts, "(E, d)");
    check.ints("slot_experts", a.slot_experts, d.rows, "(R) int32");
    check.tensor("dlogits", a.dlogits, d.tokens, "(T, E)");
  }
  return check.tensor("out", a.out, d.tokens, "(T, d)").status();
}

Status validate(const ScoreGradDesc& d, const ScoreGradArgs& a) {
  Checker check;
  check.ints("row_dscores", a.row_dscores, d.rows, "(R) float");
  check.ints("slot_rows", a.slot_rows, d.rows, "(R) int32");
  if (d.mode == RouterMode::given) {
    return check.ints("dscores", a.dscores, d.rows, "(R) float").status();
  }
  check.ints("slot_scores", a.slot_scores, d.rows, "(R) float");
  check.ints("slot_experts", a.slot_experts, d.rows, "(R) int32");
  if (d.reaches_all_experts()) {
    check.tensor("logits", a.logits, d.tokens, "(T, E)");
  }
  check.optional("dlogits_in", a.dlogits_in, d.tokens);
  return check.tensor("dlogits", a.dlogits, d.tokens, "(T, E)").status();
}

Status validate(const AuxLossDesc& d, const AuxLossArgs& a) {
  Checker check;
  check.tensor("logits", a.logits, d.tokens, "(T, E)").ints("counts", a.counts, 1, "(E) int32");
  if (d.backward) {
    check.ints("dloss", a.dloss, 1, "(1) float");
    check.tensor("dlogits", a.dlogits, d.tokens, "(T, E)");
  } else {
    check.ints("loss", a.loss, 1, "(1) float");
  }
  return check.status();
}

Status validate(const TokenRoundingDesc& d, const TokenRoundingArgs& a) {
  Checker check;
  check.tensor("logits", a.logits, d.tokens, "(T, E)");
  check.ints("scores", a.scores, d.tokens, "(capacity) float");
  check.ints("token_ids", a.token_ids, d.tokens, "(capacity) int32");
  check.ints("expert_ids", a.expert_ids, d.tokens, "(capacity) int32");
  check.ints("counts", a.counts, 1, "(E) int32");
  check.optional("draws", a.draws, 1, 8).optional("frequency", a.frequency, 1, 4);
  return check.optional("error_word", a.error_word, 1, 4).status();
}

Status validate(const TokenRoundingGradDesc& d, const TokenRoundingGradArgs& a) {
  Checker check;
  check.tensor("logits", a.logits, d.tokens, "(T, E)");
  check.ints("token_ids", a.token_ids, d.list_length, "(capacity) int32");
  check.ints("expert_ids", a.expert_ids, d.list_length, "(capacity) int32");
  check.ints("dscores", a.dscores, d.list_length, "(capacity) float");
  check.optional("dlogits_in", a.dlogits_in, d.tokens);
  return check.tensor("dlogits", a.dlogits, d.tokens, "(T, E)").status();
}

}  // namespace sonicmoe
