#include "core/activation_table.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <string_view>
#include <system_error>

namespace sonicmoe {
namespace {

struct Field {
  const char* name;
  float ActivationSpec::*member;
};
constexpr Field kFields[] = {{"alpha", &ActivationSpec::alpha},
                             {"beta", &ActivationSpec::beta},
                             {"limit", &ActivationSpec::limit}};

constexpr auto kKinds = [] {
  std::array<Activation, std::size(kActivationTable)> kinds{};
  for (std::size_t i = 0; i < kinds.size(); ++i) kinds[i] = kActivationTable[i].kind;
  return kinds;
}();

const ActivationParameter* find_parameter(const ActivationRow& row, const Field& field) {
  for (const ActivationParameter& parameter : row.parameters) {
    if (parameter.member == field.member) return &parameter;
  }
  return nullptr;
}

bool allows(Allowed allowed, float value) {
  switch (allowed) {
    case Allowed::finite:
      return std::isfinite(value);
    case Allowed::positive:
      return std::isfinite(value) && value > 0;
    case Allowed::positive_or_inf:
      break;
  }
  return value > 0;
}

const char* text_of(Allowed allowed) {
  switch (allowed) {
    case Allowed::finite:
      return "finite numbers";
    case Allowed::positive:
      return "finite numbers above 0";
    case Allowed::positive_or_inf:
      break;
  }
  return "numbers above 0, or inf";
}

}  // namespace

const ActivationRow* find_row(Activation kind, ActivationTable table) noexcept {
  for (const ActivationRow& row : table) {
    if (row.kind == kind) return &row;
  }
  return nullptr;
}

ActivationSpec defaults(const ActivationRow& row) noexcept {
  ActivationSpec spec;
  spec.kind = row.kind;
  for (const ActivationParameter& parameter : row.parameters) {
    spec.*parameter.member = parameter.initial;
  }
  return spec;
}

std::string to_string(const ActivationSpec& spec, ActivationTable table) {
  const ActivationRow* row = find_row(spec.kind, table);
  const ActivationSpec usual = row == nullptr ? ActivationSpec{} : defaults(*row);
  std::string text = row == nullptr ? "?" : row->name;
  char before = '(';
  for (const Field& field : kFields) {
    if (spec.*field.member == usual.*field.member) continue;
    text += before + std::string(field.name) + '=' + text_of(spec.*field.member);
    before = ',';
  }
  return before == '(' ? text : text + ')';
}

bool parse(const std::string& text, ActivationTable table, ActivationSpec* out) {
  const std::string_view name = std::string_view(text).substr(0, text.find('('));
  std::string_view rest = std::string_view(text).substr(name.size());
  const ActivationRow* found = nullptr;
  for (const ActivationRow& row : table) {
    if (name == row.name) found = &row;
  }
  if (found == nullptr) return false;
  ActivationSpec spec = defaults(*found);
  if (!rest.empty()) {
    // "(alpha=1,limit=7)": a parameter after the parenthesis and after each comma.
    bool seen[std::size(kFields)] = {};
    do {
      rest.remove_prefix(1);
      const std::string_view word = rest.substr(0, rest.find('='));
      std::size_t i = 0;
      while (i < std::size(kFields) && word != kFields[i].name) ++i;
      if (i == std::size(kFields) || seen[i] || word.size() == rest.size()) return false;
      seen[i] = true;
      rest.remove_prefix(word.size() + 1);
      const auto [end, error] =
          std::from_chars(rest.data(), rest.data() + rest.size(), spec.*kFields[i].member);
      if (error != std::errc{}) return false;
      rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
    } while (rest.starts_with(','));
    if (rest != ")") return false;
  }
  *out = spec;
  return true;
}

std::string text_of(float value) {
  char text[32];
  return {text, std::to_chars(text, std::end(text), value).ptr};
}

std::string refusal(const ActivationSpec& spec, ActivationTable table) {
  const ActivationRow* row = find_row(spec.kind, table);
  if (row == nullptr) {
    std::string allowed;
    for (const ActivationRow& other : table) {
      allowed += (allowed.empty() ? "" : ", ") + std::string(other.name);
    }
    return "activation: got " + std::to_string(static_cast<int>(spec.kind)) +
           ", allowed: " + allowed;
  }
  for (const Field& field : kFields) {
    const float value = spec.*field.member;
    const float neutral = ActivationSpec{}.*field.member;
    const ActivationParameter* parameter = find_parameter(*row, field);
    if (parameter == nullptr ? value == neutral : allows(parameter->allowed, value)) continue;
    const std::string allowed =
        parameter == nullptr ? text_of(neutral) + " (" + row->name + " has no " + field.name + ")"
                             : text_of(parameter->allowed);
    return "activation." + std::string(field.name) + ": got " + text_of(value) +
           ", allowed: " + allowed;
  }
  return "";
}

ActivationSpec::ActivationSpec(Activation value) noexcept {
  const ActivationRow* row = find_row(value, kActivationTable);
  if (row != nullptr) *this = defaults(*row);
  kind = value;
}

const char* name(Activation value) noexcept {
  const ActivationRow* row = find_row(value, kActivationTable);
  return row == nullptr ? "?" : row->name;
}

bool is_glu(Activation value) noexcept {
  const ActivationRow* row = find_row(value, kActivationTable);
  return row != nullptr && row->gated;
}

std::span<const Activation> activations() noexcept { return kKinds; }

std::string to_string(const ActivationSpec& value) { return to_string(value, kActivationTable); }

bool parse(const std::string& text, ActivationSpec* out) {
  return parse(text, kActivationTable, out);
}

}  // namespace sonicmoe
