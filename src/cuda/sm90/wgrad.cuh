#pragma once

#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/layouts.h"

namespace sonicmoe::cuda {

/// Calls f(ConfigOf<T, kALoad, kTransposed, kPlain>{}) with the kernel of a weight gradient. Plain:
/// in the storage type, and written over what was there.
template <template <class, ALoad, bool, bool> class ConfigOf, class F>
Status visit_wgrad(const GroupedGemmDesc& d, F&& f) {
  const bool plain = !d.f32_weight_grads && !d.accumulate_weight_grads;
  return visit_storage(d.dtype, [&](auto type) {
    using T = decltype(type);
    return visit_a_load_k(d, [&](auto a_load) {
      return visit_transposed(d, [&](auto transposed) {
        constexpr ALoad kALoad = decltype(a_load)::value;
        constexpr bool kTransposed = decltype(transposed)::value;
        return plain ? f(ConfigOf<T, kALoad, kTransposed, true>{})
                     : f(ConfigOf<T, kALoad, kTransposed, false>{});
      });
    });
  });
}

}  // namespace sonicmoe::cuda
