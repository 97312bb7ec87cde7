#include "cpu/gemm.h"

#include <cblas.h>

#include <cstring>

namespace sonicmoe::cpu {
namespace {

// A's block is m x k, or k x m with m up to kBlockN, by which wgrads tile both axes of the output.
constexpr std::int64_t kLhsFloats = kBlockN * kBlockK;
constexpr std::int64_t kRhsFloats = kBlockN * kBlockK;

}  // namespace

template <class T>
std::size_t SgemmEngine<T>::scratch_bytes() {
  return (kLhsFloats + kRhsFloats) * sizeof(float);
}

template <class T>
typename SgemmEngine<T>::Dense SgemmEngine<T>::dense(Rows<T> rows, std::int64_t count,
                                                     std::int64_t width, float* scratch) {
  if constexpr (std::is_same_v<T, float>) {
    if (rows.index == nullptr) return {rows.base, rows.stride};
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(scratch + i * width, rows.row(i),
                  static_cast<std::size_t>(width) * sizeof(float));
    }
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      const T* from = rows.row(i);
      float* to = scratch + i * width;
      for (std::int64_t j = 0; j < width; ++j) to[j] = math::to_float(from[j]);
    }
  }
  return {scratch, width};
}

template <class T>
void SgemmEngine<T>::lhs(Form form, std::int64_t m, std::int64_t k, Rows<T> rows) {
  lhs_ = form == Form::tn ? dense(rows, k, m, scratch_) : dense(rows, m, k, scratch_);
}

template <class T>
void SgemmEngine<T>::rhs(Form form, std::int64_t n, std::int64_t k, Rows<T> rows) {
  float* scratch = scratch_ + kLhsFloats;
  rhs_ = form == Form::nt ? dense(rows, n, k, scratch) : dense(rows, k, n, scratch);
}

template <class T>
void SgemmEngine<T>::multiply(Form form, std::int64_t m, std::int64_t n, std::int64_t k, float* c,
                              std::int64_t ldc, bool accumulate) {
  cblas_sgemm(CblasRowMajor, form == Form::tn ? CblasTrans : CblasNoTrans,
              form == Form::nt ? CblasTrans : CblasNoTrans, static_cast<int>(m),
              static_cast<int>(n), static_cast<int>(k), 1.0f, lhs_.data,
              static_cast<int>(lhs_.stride), rhs_.data, static_cast<int>(rhs_.stride),
              accumulate ? 1.0f : 0.0f, c, static_cast<int>(ldc));
}

template class SgemmEngine<float>;
template class SgemmEngine<math::Bf16>;

}  // namespace sonicmoe::cpu
