#pragma once

#include "math/activation.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// What a kernel with an activation is compiled for: SwiGLU alone, or a family chosen at run time
/// outside the element loops.
enum class ActivationKind { swiglu, gated, plain };

inline ActivationKind kind_of(Activation activation) {
  if (activation == Activation::swiglu) return ActivationKind::swiglu;
  return is_glu(activation) ? ActivationKind::gated : ActivationKind::plain;
}

/// Calls f(ActivationFn{}). Values of other kinds were refused on the host.
template <ActivationKind kKind, class F>
__device__ __forceinline__ void visit_activation(Activation activation, F&& f) {
  using namespace math;
  if constexpr (kKind == ActivationKind::swiglu) {
    f(ActivationFn<Silu, true>{});
  } else if constexpr (kKind == ActivationKind::gated) {
    switch (activation) {
      case Activation::geglu:
        return f(ActivationFn<Gelu, true>{});
      case Activation::geglu_tanh:
        return f(ActivationFn<GeluTanh, true>{});
      default:
        return f(ActivationFn<Relu, true>{});
    }
  } else {
    switch (activation) {
      case Activation::relu:
        return f(ActivationFn<Relu, false>{});
      case Activation::relu_sq:
        return f(ActivationFn<ReluSq, false>{});
      case Activation::gelu:
        return f(ActivationFn<Gelu, false>{});
      case Activation::gelu_tanh:
        return f(ActivationFn<GeluTanh, false>{});
      default:
        return f(ActivationFn<Silu, false>{});
    }
  }
}

}  // namespace sonicmoe::cuda
