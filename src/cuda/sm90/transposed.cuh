#pragma once

#include <string>

#include "cuda/sm90/epilogue/dispatch.cuh"
#include "cuda/sm90/layouts.h"

/// Which kernels of the operations with activations are compiled for transposed weights.
namespace sonicmoe::cuda {

/// Is there a kernel in wide tiles? With transposed weights for the activations of models that
/// store theirs so: SwiGLU and the clamped kinds.
template <bool kTransposed, class Activations>
constexpr bool kCompiledWide =
    !kTransposed || std::is_same_v<Activations, OneActivation<SwigluFn>> ||
    std::is_same_v<Activations, OneActivation<math::ClampedGlu>>;

/// Calls f(form, Activations{}) with what is compiled for a descriptor.
template <bool kTransposed, bool kWide, class F>
Status visit_form_and_activations(const GroupedGemmDesc& d, F&& f) {
  return visit_form<kTransposed>(d, [&](auto form) {
    return visit_activations<kWide>(d.activation, [&](auto activations) {
      using Activations = decltype(activations);
      constexpr bool kAlternates = decltype(form)::value == W1Form::alternating;
      constexpr bool kOnlyNarrow = kWide && !kCompiledWide<kTransposed, Activations>;
      constexpr bool kLacksGate = kAlternates && !Activations::kGated;
      // SwiGLU stands for kernels that are not compiled: the entry rejects the descriptors of
      // kOnlyNarrow, and none has kLacksGate.
      constexpr bool kCompiled = !kOnlyNarrow && !kLacksGate;
      return f(form, std::conditional_t<kCompiled, Activations, OneActivation<SwigluFn>>{});
    });
  });
}

/// Why the wide tiles have no kernel for a descriptor, or empty.
inline std::string reject_wide_transposed(const GroupedGemmDesc& d) {
  const bool compiled = visit_activations<true>(
      d.activation, [](auto activations) { return kCompiledWide<true, decltype(activations)>; });
  if (!d.transposed() || compiled) return {};
  return std::string("w1_layout: got ") + name(d.w1_layout) +
         ", allowed: layouts that are not transposed for " + to_string(d.activation);
}

}  // namespace sonicmoe::cuda
