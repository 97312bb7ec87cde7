#pragma once

#include <string>

#include "core/kernel.h"
#include "math/convert.h"

/// Shared by the operations without a tile engine: one body serves both storage types.
namespace sonicmoe::cpu {

using math::Bf16;
using math::from_float;
using math::to_float;

inline constexpr DTypes kStorageTypes = {DType::f32, DType::bf16};

/// Calls f(T{}) with the storage type of `dtype` and returns f's status. A dtype that the CPU does
/// not have is refused, and an enumerator without a case does not compile.
template <class F>
Status visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(Bf16{});
    case DType::f16:
      break;
  }
  return Status::error(StatusCode::unsupported, "dtype: got %s, allowed: %s (on the CPU)",
                       name(dtype), kStorageTypes.text().c_str());
}

}  // namespace sonicmoe::cpu
