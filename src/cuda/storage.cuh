#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/kernel.h"

/// Maps a DType to the C++ type that a kernel is compiled for. A dtype without a case
/// fails to compile or returns an error; it never runs as another type.
namespace sonicmoe::cuda {

/// The dtypes of tensors that tensor cores multiply, and of the biases and sums beside them.
inline constexpr DTypes kStorageTypes = {DType::bf16, DType::f16};
/// The dtypes of logits.
inline constexpr DTypes kLogitsTypes = {DType::f32, DType::bf16, DType::f16};

inline Status no_such_type(DType dtype, const DTypes& allowed) {
  return Status::error(StatusCode::unsupported, "dtype: got %s, allowed: %s", name(dtype),
                       allowed.text().c_str());
}

/// Calls f(T{}) with the type T of `dtype`; unsupported for a dtype that is no storage type.
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

/// Calls f(T{}) with the type T of `dtype`, a dtype of logits.
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
