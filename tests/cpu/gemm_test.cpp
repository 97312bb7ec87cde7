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

// Sums of products of small whole numbers are exact in fp32, whatever the order, and the numbers
// are exact in bf16: every engine must give the same bits as three plain loops.
template <class Engine>
void expect_exact(Form form, std::int64_t m, std::int64_t n, std::int64_t k, bool gathered) {
  using T = typename Engine::Storage;
  // Rows one after the other but for a gap, in a shuffled order when gathered. A gap is not zero:
  // it would show if it were taken in.
  struct Matrix {
    Matrix(std::int64_t count, std::int64_t width, bool shuffled, int factor)
        : stride(width + 8), values(count * stride), index(count) {
      for (std::int64_t i = 0; i < count * stride; ++i) {
        values[i] = math::from_float<T>(static_cast<float>(i * factor % 17 - 8));
      }
      for (std::int64_t i = 0; i < count; ++i) {
        index[i] = static_cast<std::int32_t>(shuffled ? count - 1 - i : i);
      }
      rows = {values.data(), stride, shuffled ? index.data() : nullptr};
    }
    float at(std::int64_t i, std::int64_t j) const { return math::to_float(rows.row(i)[j]); }
    std::int64_t stride;
    std::vector<T> values;
    std::vector<std::int32_t> index;
    Rows<T> rows;
  };
  const Matrix a(form == Form::tn ? k : m, form == Form::tn ? m : k, gathered, 5);
  const Matrix b(form == Form::nt ? n : k, form == Form::nt ? k : n, gathered, 7);

  std::vector<std::byte> scratch(Engine::scratch_bytes());
  Engine engine(scratch.data());
  const std::int64_t ldc = n + 3;
  std::vector<float> c(m * ldc, 0.5f);
  engine.lhs(form, m, k, a.rows);
  engine.rhs(form, n, k, b.rows);
  for (const bool accumulate : {false, true}) {
    engine.multiply(form, m, n, k, c.data(), ldc, accumulate);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < ldc; ++j) {
        float want = 0.0f;
        for (std::int64_t l = 0; j < n && l < k; ++l) {
          want += (form == Form::tn ? a.at(l, i) : a.at(i, l)) *
                  (form == Form::nt ? b.at(j, l) : b.at(l, j));
        }
        want = j < n ? want * (accumulate ? 2.0f : 1.0f) : 0.5f;
        ASSERT_EQ(c[i * ldc + j], want)
            << "form " << static_cast<int>(form) << ", (m, n, k) = (" << m << ", " << n << ", " << k
            << "), row " << i << ", column " << j << ", accumulate " << accumulate;
      }
    }
  }
}

template <class Engine>
class EngineTest : public testing::Test {};
using Engines = testing::Types<SgemmEngine<float>, SgemmEngine<math::Bf16>, Avx512Engine<float>,
                               Avx512Engine<math::Bf16>>;
TYPED_TEST_SUITE(EngineTest, Engines);

TYPED_TEST(EngineTest, IsExactOnSmallWholeNumbers) {
  if (TypeParam::missing() != nullptr) GTEST_SKIP() << "needs " << TypeParam::missing();
  for (const Form form : {Form::nt, Form::nn, Form::tn}) {
    for (const bool gathered : {false, true}) {
      for (const std::int64_t m : {1, 6, 13}) {
        for (const std::int64_t n : {8, 64, 88, 130}) {
          // Pairs of an odd k reach past the row, as the callers' even sizes never do.
          for (const std::int64_t k : {2, 32, 88}) {
            expect_exact<TypeParam>(form, m, n, k, gathered);
          }
          if (form == Form::tn) expect_exact<TypeParam>(form, m, n, 7, gathered);
        }
      }
      expect_exact<TypeParam>(form, kBlockM, 72, kBlockK, gathered);
      expect_exact<TypeParam>(form, 7, kBlockN, 24, gathered);
    }
  }
  expect_exact<TypeParam>(Form::tn, kBlockN, 72, kBlockK, true);
}

}  // namespace
}  // namespace sonicmoe::cpu
