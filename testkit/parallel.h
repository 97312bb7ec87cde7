#pragma once

#include <cstdint>

namespace sonicmoe::testkit {

/// Calls f(i) for every i below `count`, in any order, by several threads where that repays waking
/// them: for the large tensors that GPUs are tried with.
template <class F>
void for_each_index(std::int64_t count, F f) {
#pragma omp parallel for if (count > 1'000'000)
  for (std::int64_t i = 0; i < count; ++i) f(i);
}

}  // namespace sonicmoe::testkit
