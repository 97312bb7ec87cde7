#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "sonicmoe/info.h"
#include "testkit/cases.h"

namespace sonicmoe {

/// How GoogleTest shows a kernel.
inline void PrintTo(const KernelInfo& value, std::ostream* out) { *out << value.name; }

}  // namespace sonicmoe

namespace sonicmoe::testkit {

/// What this build has for these operations on a kind of device.
inline std::vector<KernelInfo> kernels_of(Device device, const std::set<std::string>& ops) {
  std::vector<KernelInfo> out;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.device == device.type && ops.contains(kernel.op)) out.push_back(kernel);
  }
  return out;
}

/// Whether this build has the kernels made for Hopper, or runs the portable ones there.
inline bool made_for_hopper() {
  const std::vector<KernelInfo> all = kernels();
  return std::ranges::any_of(all, [](const KernelInfo& k) { return k.name.starts_with("sm90."); });
}

/// How GoogleTest shows a case.
inline void PrintTo(const Case& value, std::ostream* out) { *out << value.name; }

/// A name as GoogleTest allows it.
inline std::string label_of(std::string name) {
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}
inline std::string test_name(const testing::TestParamInfo<Case>& param) {
  return label_of(param.param.name);
}

}  // namespace sonicmoe::testkit
