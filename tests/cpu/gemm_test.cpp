#include "cpu/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace sonicmoe::cpu {
namespace {

// The BLAS below has scratch buffers of its own. Handed to two threads at once they give wrong
// products: without the lock of cmake/private_openblas.cpp tens to hundreds in one run of this
// test.
TEST(Sgemm, ThreadsDoNotShareBuffers) {
  constexpr int kThreads = 4;
  constexpr int kProducts = 100000;
  constexpr std::int64_t kSize = 40;  // small, for many; too large for kernels without a buffer
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 1; t <= kThreads; ++t) {
    threads.emplace_back([t, &wrong] {
      const std::vector<float> a(kSize * kSize, static_cast<float>(t));
      const std::vector<float> b(kSize * kSize, 1.0f);
      std::vector<float> c(kSize * kSize);
      std::vector<std::byte> scratch(SgemmEngine<float>::scratch_bytes());
      SgemmEngine<float> engine(scratch.data());
      for (int i = 0; i < kProducts; ++i) {
        const Form form = i % 2 ? Form::nt : Form::nn;
        engine.lhs(form, kSize, kSize, {a.data(), kSize});
        engine.rhs(form, kSize, kSize, {b.data(), kSize});
        engine.multiply(form, kSize, kSize, kSize, c.data(), kSize, false);
        wrong += std::any_of(c.begin(), c.end(),
                             [&](float value) { return value != static_cast<float>(t * kSize); });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace sonicmoe::cpu
