#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <string>

#include "verify/cases.h"

namespace sonicmoe::verify {

/// A case's name as GoogleTest allows it.
inline std::string test_name(const testing::TestParamInfo<Case>& param) {
  std::string name = param.param.name;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

}  // namespace sonicmoe::verify
