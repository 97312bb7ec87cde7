#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu/gemm.h"

namespace sonicmoe::cpu {
namespace {

/// Multiplies matrices of `value` and of ones; true if the product is right.
bool right(float value, SgemmEngine<float>* engine) {
  constexpr std::int64_t kSize = 40;  // past the BLAS's path for products without a buffer
  const std::vector<float> a(kSize * kSize, value), b(kSize * kSize, 1.0f);
  std::vector<float> c(kSize * kSize);
  engine->lhs(Form::nt, kSize, kSize, {a.data(), kSize});
  engine->rhs(Form::nt, kSize, kSize, {b.data(), kSize});
  engine->multiply(Form::nt, kSize, kSize, kSize, c.data(), kSize, false);
  return std::ranges::all_of(c, [&](float got) { return got == value * kSize; });
}

/// Several threads whose first products start together; true if all are right.
bool first_products_are_right() {
  constexpr int kThreads = 4;
  std::atomic<int> waiting{kThreads};
  std::atomic<bool> all_right{true};
  std::vector<std::thread> threads;
  for (int t = 1; t <= kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::byte> scratch(SgemmEngine<float>::scratch_bytes());
      SgemmEngine<float> engine(scratch.data());
      waiting.fetch_sub(1);
      while (waiting.load() > 0) std::this_thread::yield();
      for (int i = 0; i < 20; ++i) {
        if (!right(static_cast<float>(t), &engine)) all_right = false;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return all_right;
}

// The BLAS below sets up its table of scratch buffers in the first product of a process. Each child
// is a process without a product before: nothing else in this program may make one.
TEST(Sgemm, FirstProductsOfAProcessMayMeet) {
  constexpr int kProcesses = 200;
  int wrong = 0;
  for (int i = 0; i < kProcesses; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) _exit(first_products_are_right() ? 0 : 1);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    wrong += status != 0;
  }
  EXPECT_EQ(wrong, 0) << "of " << kProcesses << " processes";
}

}  // namespace
}  // namespace sonicmoe::cpu
