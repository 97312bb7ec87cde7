#pragma once

#include <string>
#include <string_view>

namespace sonicmoe {

/// Why device code that was compiled for `architectures` does not run on a CUDA device of compute
/// capability `arch` (10 major + minor), or empty. `architectures` is as CMake's
/// SONICMOE_CUDA_ARCHITECTURES has it, with commas: "80,90a". Code for 80 runs on 8.0 and later
/// devices of its generation. Code for 90a runs on 9.0 alone. PTX ("80-virtual") runs on 8.0 and
/// all later devices. Source: CUDA C++ Programming Guide, "Application Compatibility".
std::string device_code_reason(std::string_view architectures, int arch);

}  // namespace sonicmoe
