// The text form of a description: one table of fields, which to_string() and parse_layer() read.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "core/activation_table.h"
#include "core/enum_names.h"
#include "sonicmoe/layer.h"

namespace sonicmoe {
namespace {

// For each type of field: the text of a value, the value of a text, and the allowed values.

std::string write(std::int64_t value) { return std::to_string(value); }
bool read(const std::string& text, std::int64_t* out) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *out);
  return error == std::errc() && stop == end;
}
std::string allowed(const std::int64_t&) { return "an integer"; }

std::string write(float value) { return text_of(value); }
bool read(const std::string& text, float* out) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *out);
  return error == std::errc() && stop == end;
}
std::string allowed(const float&) { return "a number"; }

std::string write(bool value) { return value ? "true" : "false"; }
bool read(const std::string& text, bool* out) {
  *out = text == "true";
  return *out || text == "false";
}
std::string allowed(const bool&) { return "true, false"; }

std::string write(const ActivationSpec& value) { return to_string(value); }
bool read(const std::string& text, ActivationSpec* out) { return parse(text, out); }
std::string allowed(const ActivationSpec&) { return all_names<Activation>(); }

template <class Enum, class = std::enable_if_t<std::is_enum_v<Enum>>>
std::string write(Enum value) {  // a value that is no enumerator becomes its number
  const std::string text = name(value);
  return text == "?" ? std::to_string(static_cast<int>(value)) : text;
}
template <class Enum, class = std::enable_if_t<std::is_enum_v<Enum>>>
bool read(const std::string& text, Enum* out) {
  return parse_name(text, out);
}
bool read(const std::string& text, RoundingRule* out) { return parse(text, out); }
template <class Enum, class = std::enable_if_t<std::is_enum_v<Enum>>>
std::string allowed(const Enum&) {
  return all_names<Enum>();
}

struct Row {
  const char* key;
  const char* help;
  std::string (*write)(const LayerDesc& desc);
  bool (*read)(const std::string& text, LayerDesc* desc);
  std::string (*allowed)();
};

/// `Select` returns the field: [](auto& d) -> auto& { return d.tokens; }.
template <class Select>
constexpr Row row(const char* key, const char* help, Select) {
  return {key, help, [](const LayerDesc& desc) { return sonicmoe::write(Select{}(desc)); },
          [](const std::string& text, LayerDesc* desc) {
            return sonicmoe::read(text, &Select{}(*desc));
          },
          [] {
            const LayerDesc desc;
            return sonicmoe::allowed(Select{}(desc));
          }};
}

#define FIELD(path) \
  [](auto& d) -> auto& { return d.path; }

constexpr Row kRows[] = {
    row("tokens", "T", FIELD(tokens)),
    row("hidden", "d, a multiple of 8", FIELD(experts.hidden)),
    row("intermediate", "n, a multiple of 8", FIELD(experts.intermediate)),
    row("experts", "E", FIELD(router.experts)),
    row("top_k", "K; 0 for lists", FIELD(router.top_k)),
    row("dtype", "of every tensor but scores, ids and counts", FIELD(experts.dtype)),
    row("activation", "with its parameters: name(limit=7)", FIELD(experts.activation)),
    row("w1_layout", "how W1 holds gate and up, and whether the weights are transposed",
        FIELD(experts.w1_layout)),
    row("router_input", "what the caller hands over", FIELD(router.input)),
    row("router_score", "how a logit becomes a score", FIELD(router.score)),
    row("router_order", "whether logits or scores choose", FIELD(router.order)),
    row("renormalize", "divide a token's scores by their sum", FIELD(router.renormalize)),
    row("eps", "added to that sum", FIELD(router.eps)),
    row("scale", "multiplies the scores", FIELD(router.scale)),
    row("logit_bias", "added to the logits, trained", FIELD(router.logit_bias)),
    row("selection_bias", "added to what chooses", FIELD(router.selection_bias)),
    row("expert_scale", "multiplies the scores of an expert, trained", FIELD(router.expert_scale)),
    row("groups", "of neighbouring experts", FIELD(router.groups)),
    row("kept_groups", "groups whose experts a token may go to", FIELD(router.kept_groups)),
    row("group_score", "of what chooses, for the value of a group", FIELD(router.group_score)),
    row("f32_logits", "logits and their gradients are fp32", FIELD(router.f32_logits)),
    row("f32_router_w", "the router's weights are fp32", FIELD(router.f32_router_w)),
    row("list_length", "L, lists only", FIELD(router.list_length)),
    row("assume_sorted", "lists only: token ids ascend", FIELD(router.assume_sorted)),
    row("rounding_tile", "token rounding to multiples of it; 0: none", FIELD(rounding.tile)),
    row("rounding_rule", "which multiple", FIELD(rounding.rule)),
    row("max_rows", "rows of a call with ids and weights, at most; 0: T*K", FIELD(max_rows)),
    row("bias", "experts have biases", FIELD(experts.bias)),
    row("inference", "nothing is kept for backward", FIELD(experts.inference)),
    row("f32_weight_grads", "dw1 and dw2 are fp32", FIELD(experts.f32_weight_grads)),
    row("accumulate_weight_grads", "backward adds to dw1 and dw2",
        FIELD(experts.accumulate_weight_grads)),
    row("row_source", "gathered by token, or contiguous (experts alone)",
        FIELD(experts.row_source)),
    row("score_at", "where the rows' scores enter", FIELD(experts.score_at)),
    row("index_type", "contiguous rows: of counts and offsets", FIELD(experts.index_type)),
    row("zero_tail", "contiguous rows: rows of no expert get zeros", FIELD(experts.zero_tail)),
    row("expected_rows", "contiguous rows: for the choice of tiles; 0: the capacity",
        FIELD(experts.expected_rows)),
    row("dpreact_in_workspace", "backward needs no memory for dH",
        FIELD(experts.dpreact_in_workspace)),
    row("recompute", "what backward makes again in place of keeping it", FIELD(experts.recompute)),
};

#undef FIELD

const Row* find_row(std::string_view key) {
  for (const Row& row : kRows) {
    if (row.key == key) return &row;
  }
  return nullptr;
}

/// The beginning of a text, since a Status holds only 255 characters.
std::string shown(std::string_view text) {
  constexpr std::size_t kMost = 60;
  return std::string(text.substr(0, kMost)) + (text.size() > kMost ? "..." : "");
}

Status refuse(const std::string& argument, const std::string& got, const std::string& allowed) {
  return Status::error(StatusCode::invalid_argument, "%s: got %s, allowed: %s", argument.c_str(),
                       got.c_str(), allowed.c_str());
}

}  // namespace

std::vector<LayerField> layer_fields() {
  std::vector<LayerField> fields;
  for (const Row& row : kRows) fields.push_back({row.key, row.help, row.write({}), row.allowed()});
  return fields;
}

std::string layer_field(const LayerDesc& desc, const std::string& key) {
  const Row* const row = find_row(key);
  return row == nullptr ? std::string() : row->write(desc);
}

std::string to_string(const LayerDesc& desc) {
  std::string text;
  for (const Row& row : kRows) {
    const std::string value = row.write(desc);
    if (value == row.write({})) continue;
    if (!text.empty()) text += ' ';
    text.append(row.key).append("=").append(value);
  }
  return text;
}

Result<LayerDesc> parse_layer(const std::string& text) {
  LayerDesc desc;
  std::uint64_t seen = 0;
  static_assert(std::size(kRows) <= 64);
  for (std::size_t at = text.find_first_not_of(' '); at != std::string::npos;) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    const std::string item = text.substr(at, end - at);
    at = text.find_first_not_of(' ', end);
    const std::size_t equals = std::min(item.find('='), item.size());
    const Row* const row = find_row(item.substr(0, equals));
    if (row == nullptr || equals == item.size()) {
      return refuse("layer", "'" + shown(item) + "'",
                    "KEY=VALUE with a key of layer_fields(): tokens, hidden, ...");
    }
    const std::uint64_t bit = std::uint64_t{1} << (row - kRows);
    if ((seen & bit) != 0) return refuse("layer", std::string(row->key) + " twice", "once");
    seen |= bit;
    const std::string value = item.substr(equals + 1);
    if (!row->read(value, &desc)) {
      return refuse(row->key, "'" + shown(value) + "'", row->allowed());
    }
  }
  return desc;
}

}  // namespace sonicmoe
