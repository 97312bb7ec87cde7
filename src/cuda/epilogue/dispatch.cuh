#pragma once

#include <type_traits>

#include "math/activation.h"

/// What a kernel with an activation is compiled for. visit(activation, f) calls f(ActivationFn{})
/// in the kernel.
namespace sonicmoe::cuda {

using SwigluFn = math::ActivationFn<math::Silu, true>;

template <class Fn>
struct OneActivation {
  static constexpr bool kGated = Fn::kIsGlu;
  template <class F>
  static __device__ __forceinline__ void visit(Activation, F&& f) {
    f(Fn{});
  }
};

/// All with a gate but SwiGLU, or all without one: chosen at run time, outside the element loops.
template <bool kGated_>
struct AnyActivation {
  static constexpr bool kGated = kGated_;
  template <class F>
  static __device__ __forceinline__ void visit(Activation activation, F&& f) {
    math::visit_activation(activation, [&](auto fn) {
      using Fn = decltype(fn);
      if constexpr (Fn::kIsGlu == kGated && !std::is_same_v<Fn, SwigluFn>) f(fn);
    });
  }
};

/// Calls f(Activations{}) with what is compiled for an activation. In wide tiles each is by itself:
/// together they need more registers than those leave. In narrow ones SwiGLU is.
template <bool kWide, class F>
auto visit_activations(Activation activation, F&& f) {
  return math::visit_activation(activation, [&](auto fn) {
    using Fn = decltype(fn);
    constexpr bool kAlone = kWide || std::is_same_v<Fn, SwigluFn>;
    return f(std::conditional_t<kAlone, OneActivation<Fn>, AnyActivation<Fn::kIsGlu>>{});
  });
}

}  // namespace sonicmoe::cuda
