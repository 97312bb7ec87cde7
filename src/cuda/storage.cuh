#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/kernel.h"

/// From a DType to the type that a kernel is compiled for. A dtype without a case does not compile
/// or is refused; it never runs as another one.
namespace sonicmoe::cuda {

/// Of tensors that tensor cores multiply, and of all that lies beside them.
inline constexpr DTypes kStorageTypes = {DType::bf16, DType::f16};
/// Of logits.
inline constexpr DTypes kLogitsTypes = {DType::f32, DType::bf16, DType::f16};

inline Status no_such_type(DType dtype, const DTypes& allowed) {
  return Status::error(StatusCode::unsupported, "dtype: got %s, allowed: %s", name(dtype),
                       allowed.text().c_str());
}

/// f(T{}) with the storage type.
template <class F>
Status visit_storage(DType dtype, F&& f) {
  switch (dtype) {
    case DType::bf16:
      return f(__nv_bfloat16{});
    case DType::f16:
      return f(__half{});
    case DType::f32:
      break;
  }
  return no_such_type(dtype, kStorageTypes);
}

/// f(T{}) with the type of logits.
template <class F>
Status visit_logits(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(__nv_bfloat16{});
    case DType::f16:
      return f(__half{});
  }
  return no_such_type(dtype, kLogitsTypes);
}

}  // namespace sonicmoe::cuda
