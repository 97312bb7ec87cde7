#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "math/convert.h"

/// Products of one tile with fp32 accumulation, the only place where CPU time is spent in earnest.
///
/// An engine packs a left block (at most kBlockM x kBlockK) and a right block (kBlockK x kBlockN)
/// into scratch of its own and multiplies them into an fp32 tile:
///
///   nt: C = A B^T   A (m, k) rows, B (n, k) rows     up_proj, down_proj
///   nn: C = A B     A (m, k) rows, B (k, n) rows     the two dgrads
///   tn: C = A^T B   A (k, m) rows, B (k, n) rows     the two wgrads
///
/// Any operand's rows may be gathered. Blocks are chosen by shape alone.
namespace sonicmoe::cpu {

enum class Form { nt, nn, tn };

inline constexpr std::int64_t kBlockM = 384;
inline constexpr std::int64_t kBlockN = 512;
inline constexpr std::int64_t kBlockK = 512;

/// Rows of a row-major matrix; row i is base + index[i] * stride, or base + i * stride.
template <class T>
struct Rows {
  const T* base;
  std::int64_t stride;
  const std::int32_t* index = nullptr;

  const T* row(std::int64_t i) const { return base + (index ? index[i] : i) * stride; }
  Rows from_row(std::int64_t i) const {
    return index ? Rows{base, stride, index + i} : Rows{base + i * stride, stride, nullptr};
  }
  Rows from_column(std::int64_t j) const { return {base + j, stride, index}; }
};

/// OpenBLAS sgemm, one thread a call. fp32 rows are used in place; gathered or bf16 rows are copied
/// to fp32 scratch first.
template <class T>
class SgemmEngine {
 public:
  using Storage = T;
  static const char* missing() { return nullptr; }
  static std::size_t scratch_bytes();

  explicit SgemmEngine(void* scratch) : scratch_(static_cast<float*>(scratch)) {}

  void lhs(Form form, std::int64_t m, std::int64_t k, Rows<T> rows);
  void rhs(Form form, std::int64_t n, std::int64_t k, Rows<T> rows);
  /// C (m, n), row stride ldc; added to if `accumulate`.
  void multiply(Form form, std::int64_t m, std::int64_t n, std::int64_t k, float* c,
                std::int64_t ldc, bool accumulate);

 private:
  struct Dense {
    const float* data = nullptr;
    std::int64_t stride = 0;
  };
  static Dense dense(Rows<T> rows, std::int64_t count, std::int64_t width, float* scratch);

  float* scratch_;
  Dense lhs_;
  Dense rhs_;
};

/// Our own product with AVX-512: fp32 with fused multiply-adds, bf16 with the processor's dot
/// products (two products and their sum into fp32 in one instruction, twice the rate of fp32). It
/// reads gathered left rows in place and packs the right block straight from its layout, where
/// sgemm first needs a copy and then packs both. Figures: docs/findings/cpu-avx512.md.
template <class T>
class Avx512Engine {
 public:
  using Storage = T;
  static const char* missing();  ///< the instructions this processor lacks, null if none
  static std::size_t scratch_bytes();

  explicit Avx512Engine(void* scratch) : scratch_(static_cast<std::uint32_t*>(scratch)) {}

  void lhs(Form form, std::int64_t m, std::int64_t k, Rows<T> rows);
  void rhs(Form form, std::int64_t n, std::int64_t k, Rows<T> rows);
  void multiply(Form form, std::int64_t m, std::int64_t n, std::int64_t k, float* c,
                std::int64_t ldc, bool accumulate);

 private:
  std::uint32_t* scratch_;
  Rows<T> lhs_{};
};

}  // namespace sonicmoe::cpu
