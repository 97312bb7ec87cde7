#pragma once

#include <string>

#include "core/kernel.h"
#include "math/convert.h"

/// What the small operations share: one body for both storage types, no scratch by default.
namespace sonicmoe::cpu {

using math::Bf16;
using math::from_float;
using math::to_float;

template <class Desc>
std::string reject_f16(const Desc& desc) {
  return desc.dtype == DType::f16 ? "dtype: got f16, allowed: f32, bf16 (on the CPU)" : "";
}

template <class Desc>
std::size_t no_workspace(const Desc&, const Exec&) {
  return 0;
}

/// f(T{}) for the storage type; f16 was rejected when the plan was made.
template <class F>
auto visit_dtype(DType dtype, F&& f) {
  return dtype == DType::f32 ? f(float{}) : f(Bf16{});
}

}  // namespace sonicmoe::cpu
