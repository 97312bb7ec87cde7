#pragma once

#include <array>

#include "sonicmoe/types.h"
#include "testkit/cases.h"

/// Where the tests of a binary run. A file of tests that every backend must pass is compiled once
/// for each of them.
namespace sonicmoe::testkit {

#if SONICMOE_TEST_CUDA
inline constexpr Device kDevice{DeviceType::cuda, 0};
inline constexpr std::array kTypes = {DType::bf16, DType::f16};
#else
inline constexpr Device kDevice{DeviceType::cpu, 0};
inline constexpr std::array kTypes = {DType::f32, DType::bf16};
#endif
inline constexpr bool kOnCpu = kDevice.type == DeviceType::cpu;

/// Refuses bad data on every device.
inline const Options kChecked{.threads = 0, .checked = true, .kernel = ""};

/// A case of the list by its name without the type.
inline const Case& case_named(const std::string& name, DType type) {
  return *find_case(name + "/" + sonicmoe::name(type));
}

}  // namespace sonicmoe::testkit
