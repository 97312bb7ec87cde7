#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "sonicmoe/status.h"
#include "sonicmoe/types.h"

/// What the fuzz programs share. Each defines LLVMFuzzerTestOneInput; bytes of input become a
/// descriptor and data, and anything that the library must not do ends in abort().
namespace sonicmoe::fuzz {

/// libFuzzer takes the abort for a crash and keeps the input.
inline void require(bool condition, const std::string& broken) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", broken.c_str());
  std::abort();
}
/// A promise that comes with its own text: "" is fine.
inline void require_none(const std::string& wrong) { require(wrong.empty(), wrong); }

/// A refusal names the argument, what it got and what is allowed.
inline void require_good_refusal(const Status& status) {
  const std::string text = status.message();
  require(!status.ok(), "ok, though refused");
  require(text.find(": got ") != std::string::npos && text.find("allowed: ") != std::string::npos,
          "refusal without reason: " + text);
}

/// Seven times in eight 0 to `usual`, else a limit or anything at all.
inline std::int64_t number(FuzzedDataProvider* in, std::int64_t usual) {
  switch (in->ConsumeIntegralInRange(0, 15)) {
    case 0:
      return in->ConsumeIntegral<std::int64_t>();
    case 1:
      return in->PickValueInArray<std::int64_t>(
          {INT64_MIN, INT64_MIN + 1, INT32_MIN, -1, 65536, 65537, INT32_MAX - 1, INT32_MAX,
           std::int64_t{INT32_MAX} + 1, UINT32_MAX, INT64_MAX - 1, INT64_MAX});
    default:
      return in->ConsumeIntegralInRange<std::int64_t>(0, usual);
  }
}

/// A multiple of 8, mostly.
inline std::int64_t width(FuzzedDataProvider* in) {
  return in->ConsumeIntegralInRange(0, 15) == 0
             ? number(in, 100)
             : 8 * in->ConsumeIntegralInRange<std::int64_t>(1, 5);
}

/// One of `count` values, now and then none of them.
template <class Enum>
Enum pick(FuzzedDataProvider* in, int count) {
  return static_cast<Enum>(in->ConsumeIntegralInRange(0, 31) == 0
                               ? in->ConsumeIntegral<std::int32_t>()
                               : in->ConsumeIntegralInRange(0, count - 1));
}

inline Options few_threads(FuzzedDataProvider* in) {
  Options options;
  options.threads = in->ConsumeIntegralInRange(0, 7) == 0 ? 3 : 1;
  return options;
}

}  // namespace sonicmoe::fuzz
