#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "math/convert.h"

/// Products of one tile with fp32 accumulation. The CPU backend spends nearly all of its time here.
///
/// lhs() takes a block of operand A and rhs() a block of operand B; each packs its block into the
/// engine's scratch if it has to. multiply() writes their product to an fp32 tile C (m, n), or adds
/// it to C:
///
///     nt: C = A B^T   A (m, k) rows, B (n, k) rows     up_proj, down_proj
///     nn: C = A B     A (m, k) rows, B (k, n) rows     the two dgrads
///     tn: C = A^T B   A (k, m) rows, B (k, n) rows     the two wgrads
///
/// router_gemm's three passes use one form each. m is at most kBlockM (kBlockN with tn), n at most
/// kBlockN, k at most kBlockK. The rows of both operands may be gathered. Operations choose blocks
/// by shape alone.
namespace sonicmoe::cpu {

enum class Form { nt, nn, tn };

inline constexpr std::int64_t kBlockM = 384;
inline constexpr std::int64_t kBlockN = 512;
inline constexpr std::int64_t kBlockK = 512;

/// Rows of a row-major matrix. Row i is base + index[i] * stride, or base + i * stride without an
/// index. `stride` is in elements.
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

/// OpenBLAS sgemm, one thread a call. It reads contiguous fp32 rows in place. Gathered or bf16 rows
/// are copied to fp32 scratch first.
template <class T>
class SgemmEngine {
 public:
  using Storage = T;
  static const char* missing() { return nullptr; }
  static std::size_t scratch_bytes();

  explicit SgemmEngine(void* scratch) : scratch_(static_cast<float*>(scratch)) {}

  /// Sets the blocks that multiply() reads. Their rows must stay valid until then.
  void lhs(Form form, std::int64_t m, std::int64_t k, Rows<T> rows);
  void rhs(Form form, std::int64_t n, std::int64_t k, Rows<T> rows);
  /// Writes C (m, n), with `ldc` elements from row to row. Adds to C if `accumulate`.
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

/// Our own product with AVX-512. fp32 uses fused multiply-adds. bf16 uses the processor's dot
/// products: one instruction adds two products to an fp32 sum, at twice the rate of fp32.
///
/// The engine reads rows of A in place, gathered or not (tn packs them), and packs B straight from
/// its layout. sgemm needs a copy first and then packs both (docs/findings/archive/cpu-avx512.md).
///
/// With bf16, nt and nn need an even k, because multiply() reads A's rows two elements at a time.
/// Otherwise the calls are those of SgemmEngine.
template <class T>
class Avx512Engine {
 public:
  using Storage = T;
  static const char* missing();  ///< the instructions that this processor lacks, or null
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
