// Gradients of the biases, over each expert's rows in order, and the b2 term of each row's dS:
//
//     db1 = column sums of dH, db2 = column sums of s dO, row_dscores += <dO, b2>
//
// Where b2 gets no score, s is 1 and row_dscores stays as it is.
#include "core/backends.h"
#include "cpu/dispatch.h"
#include "cpu/grouped_gemm.h"
#include "cpu/parallel.h"

namespace sonicmoe::cpu {
namespace {

constexpr std::int64_t kColumns = 256;  // columns of one piece
constexpr int kLanes = 8;               // d is a multiple of 8

/// sum[j] = sum over rows r = begin .. end-1, in that order, of weight(r) * row(r)[j].
template <class Row, class Weight>
void column_sums(std::int64_t begin, std::int64_t end, std::int64_t n, float* sum, Row row,
                 Weight weight) {
  std::fill_n(sum, n, 0.0f);
  for (std::int64_t r = begin; r < end; ++r) {
    const auto* from = row(r);
    const float w = weight(r);
    for (std::int64_t j = 0; j < n; ++j) sum[j] = math::fma(w, to_float(from[j]), sum[j]);
  }
}

template <class T>
void db1_piece(const BiasGradDesc& d, const BiasGradArgs& a, std::int64_t expert, std::int64_t j0) {
  const std::int64_t n = d.intermediate;
  const std::int64_t nj = std::min(kColumns, n - j0);
  for (int h = 0; h < halves(d); ++h) {
    float sum[kColumns];
    const T* dh = static_cast<const T*>(a.dpreact) + h * n + j0;
    column_sums(
        a.offsets[expert], row_ends(a)[expert], nj, sum,
        [&](std::int64_t r) { return dh + r * d.preact_width(); },
        [](std::int64_t) { return 1.0f; });
    const auto db1 =
        w1_half(d, static_cast<T*>(a.db1), static_cast<T*>(a.db1_up), expert, h, 1).from(j0, 0);
    for (std::int64_t j = 0; j < nj; ++j) db1.base[j * db1.row] = from_float<T>(sum[j]);
  }
}

template <class T>
void db2_piece(const BiasGradDesc& d, const BiasGradArgs& a, std::int64_t expert, std::int64_t j0) {
  const std::int64_t nj = std::min(kColumns, d.hidden - j0);
  float sum[kColumns];
  const T* dout = static_cast<const T*>(a.dout) + j0;
  column_sums(
      a.offsets[expert], row_ends(a)[expert], nj, sum,
      [&](std::int64_t r) { return dout + (d.gathers() ? a.row_tokens[r] : r) * d.hidden; },
      [&](std::int64_t r) { return d.scores_bias() ? a.row_scores[r] : 1.0f; });
  store(sum, static_cast<T*>(a.db2) + expert * d.hidden + j0, nj);
}

template <class T>
float dot(const T* x, const T* y, std::int64_t n) {
  float lane[kLanes] = {};
  for (std::int64_t j = 0; j < n; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      lane[l] = math::fma(to_float(x[j + l]), to_float(y[j + l]), lane[l]);
    }
  }
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

template <class T>
void run_typed(const BiasGradDesc& d, const BiasGradArgs& a, int threads) {
  const std::int64_t parts1 = (d.intermediate + kColumns - 1) / kColumns;
  const std::int64_t parts2 = (d.hidden + kColumns - 1) / kColumns;
  parallel_for(threads, d.experts * (parts1 + parts2), [&](int, std::int64_t piece) {
    const std::int64_t expert = piece / (parts1 + parts2);
    const std::int64_t part = piece % (parts1 + parts2);
    if (part < parts1) {
      db1_piece<T>(d, a, expert, part * kColumns);
    } else {
      db2_piece<T>(d, a, expert, (part - parts1) * kColumns);
    }
  });
  if (!d.scores_bias()) return;
  const auto block = [&](int, RowBlock rows, std::int64_t) {
    const T* b2 = static_cast<const T*>(a.b2) + rows.expert * d.hidden;
    for (std::int64_t r = rows.begin; r < rows.begin + rows.rows; ++r) {
      const std::int64_t from = d.gathers() ? a.row_tokens[r] : r;
      const T* dout = static_cast<const T*>(a.dout) + from * d.hidden;
      a.row_dscores[r] += dot(dout, b2, d.hidden);
    }
  };
  for_each_row_block(threads, a.offsets, row_ends(a), d.experts, kTokensPerPiece, 1, block);
}

Status run(const BiasGradDesc& d, const BiasGradArgs& a, void*, const Exec& exec) noexcept {
  return visit_dtype(d.dtype, [&](auto type) {
    run_typed<decltype(type)>(d, a, exec.threads);
    return Status();
  });
}

}  // namespace

const Kernel<BiasGradDesc> kBiasGrad = {
    .op = "bias_grad",
    .name = "cpu.bias_grad",
    .dtypes = kStorageTypes,
    .run = run,
};

}  // namespace sonicmoe::cpu
