#pragma once

#include <limits>
#include <span>
#include <string>

#include "sonicmoe/types.h"

/// Every activation, one row each. Names, defaults, the text form and the ranges that validation
/// allows come from this table. math/activation.h has the formulas.
namespace sonicmoe {

enum class Allowed { finite, positive, positive_or_inf };

struct ActivationParameter {
  float ActivationSpec::*member;
  float initial;  ///< the value of a spec made from the kind alone
  Allowed allowed;
};

struct ActivationRow {
  Activation kind;
  const char* name;
  bool gated;  ///< has a gate and an up part
  std::span<const ActivationParameter> parameters{};
};

using ActivationTable = std::span<const ActivationRow>;

inline constexpr ActivationParameter kLimit[] = {
    {&ActivationSpec::limit, std::numeric_limits<float>::infinity(), Allowed::positive_or_inf}};
inline constexpr ActivationParameter kOai[] = {
    {&ActivationSpec::alpha, 1.702f, Allowed::finite},
    {&ActivationSpec::limit, 7.0f, Allowed::positive_or_inf}};
inline constexpr ActivationParameter kSitu[] = {{&ActivationSpec::alpha, 4.0f, Allowed::positive},
                                                {&ActivationSpec::beta, 25.0f, Allowed::positive}};

inline constexpr ActivationRow kActivationTable[] = {
    {Activation::swiglu, "swiglu", true, kLimit},
    {Activation::geglu, "geglu", true},
    {Activation::geglu_tanh, "geglu_tanh", true},
    {Activation::reglu, "reglu", true},
    {Activation::relu, "relu", false},
    {Activation::relu_sq, "relu_sq", false},
    {Activation::gelu, "gelu", false},
    {Activation::gelu_tanh, "gelu_tanh", false},
    {Activation::silu, "silu", false},
    {Activation::swiglu_clamp_after, "swiglu_clamp_after", true, kLimit},
    {Activation::swiglu_oai, "swiglu_oai", true, kOai},
    {Activation::situ_glu, "situ_glu", true, kSitu},
    {Activation::quick_geglu, "quick_geglu", true},
};

// The public functions call these with kActivationTable. Tests call them with other tables.

const ActivationRow* find_row(Activation kind, ActivationTable table) noexcept;  ///< null if none
ActivationSpec defaults(const ActivationRow& row) noexcept;
std::string to_string(const ActivationSpec& spec, ActivationTable table);
bool parse(const std::string& text, ActivationTable table, ActivationSpec* out);

/// The shortest text that reads back as the same bits.
std::string text_of(float value);

/// Why validation refuses an activation; empty if validation accepts it.
std::string refusal(const ActivationSpec& spec, ActivationTable table = kActivationTable);

}  // namespace sonicmoe
