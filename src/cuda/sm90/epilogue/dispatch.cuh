#pragma once

#include <type_traits>

#include "math/activation.h"

/// What a kernel with an activation is compiled for: an `Activations` type, whose object travels in
/// the kernel's arguments. The host makes it with of(spec); in the kernel visit(f) calls f(fn) with
/// the activation's object.
namespace sonicmoe::cuda {

using SwigluFn = math::Gated<math::Silu>;

/// Does an activation have a kernel of its own in narrow tiles, too? SwiGLU does, and so does every
/// activation with parameters, since activations that share a kernel bring their kind alone.
template <class Fn>
constexpr bool kIsAlone = std::is_same_v<Fn, SwigluFn> || !std::is_empty_v<Fn>;

template <class Fn>
struct OneActivation {
  static constexpr bool kGated = Fn::kIsGlu;
  static constexpr bool kHasMembers = !std::is_empty_v<Fn>;
  Fn fn;

  static OneActivation of(const ActivationSpec& spec) {
    OneActivation one{};
    math::visit_activation(spec, [&](auto fn) {
      using Given = decltype(fn);
      if constexpr (std::is_same_v<Given, Fn>) one.fn = fn;
    });
    return one;
  }
  template <class F>
  __device__ __forceinline__ void visit(F&& f) const {
    f(fn);
  }
};

/// All activations with a gate that share a kernel, or all without one. The kernel chooses at run
/// time, outside the element loops.
template <bool kGated_>
struct AnyActivation {
  static constexpr bool kGated = kGated_;
  static constexpr bool kHasMembers = false;
  Activation kind;

  static AnyActivation of(const ActivationSpec& spec) { return {spec.kind}; }
  template <class F>
  __device__ __forceinline__ void visit(F&& f) const {
    math::visit_without_members(kind, [&](auto fn) {
      using Fn = decltype(fn);
      if constexpr (Fn::kIsGlu == kGated && !kIsAlone<Fn>) f(fn);
    });
  }
};

/// Calls f(Activations{}) with what is compiled for an activation. In wide tiles each activation
/// has a kernel: together they need more registers than those tiles leave.
template <bool kWide, class F>
auto visit_activations(const ActivationSpec& spec, F&& f) {
  return math::visit_activation(spec, [&](auto fn) {
    using Fn = decltype(fn);
    constexpr bool kAlone = kWide || kIsAlone<Fn>;
    return f(std::conditional_t<kAlone, OneActivation<Fn>, AnyActivation<Fn::kIsGlu>>{});
  });
}

}  // namespace sonicmoe::cuda
