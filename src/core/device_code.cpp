#include "core/device_code.h"

#include <algorithm>
#include <charconv>

namespace sonicmoe {

std::string device_code_reason(std::string_view architectures, int arch) {
  std::string allowed;
  while (!architectures.empty()) {
    const std::string_view one = architectures.substr(0, architectures.find(','));
    architectures.remove_prefix(std::min(one.size() + 1, architectures.size()));
    int code = 0;
    std::from_chars(one.data(), one.data() + one.size(), code);
    const bool exact = one.ends_with('a'), ptx = one.ends_with("-virtual");
    if (exact ? arch == code : arch >= code && (ptx || arch / 10 == code / 10)) return {};
    const int major = code / 10, minor = code % 10;
    allowed += (allowed.empty() ? "" : ", ") + std::to_string(major) + "." + std::to_string(minor) +
               (exact ? ""
                : ptx ? " or later"
                      : " to " + std::to_string(major) + ".9");
  }
  return "device: got cuda of compute capability " + std::to_string(arch / 10) + "." +
         std::to_string(arch % 10) + ", allowed: " + allowed +
         " (what this build has device code for; SONICMOE_CUDA_ARCHITECTURES chooses)";
}

}  // namespace sonicmoe
