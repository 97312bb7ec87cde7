#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <ostream>
#include <string>

#include "verify/cases.h"

namespace sonicmoe::verify {

/// How GoogleTest shows a case.
inline void PrintTo(const Case& value, std::ostream* out) { *out << value.name; }

/// A case's name as GoogleTest allows it.
inline std::string test_name(const testing::TestParamInfo<Case>& param) {
  std::string name = param.param.name;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

}  // namespace sonicmoe::verify
