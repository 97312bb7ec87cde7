// Y = A W2^T + b2. Rows of A and Y are contiguous. Scores of gathered rows are left to the
// operation aggregate, those of contiguous rows enter here.
#include "core/backends.h"
#include "cpu/grouped_gemm.h"

namespace sonicmoe::cpu {
namespace {

/// Bias (or null) and score of one row, in fp32.
template <class T>
void finish_row(ScoreAt score_at, float score, const T* bias, std::int64_t n, float* y) {
  switch (score_at) {
    case ScoreAt::before_down:  // s A W2^T: the product is linear in A
      for (std::int64_t j = 0; j < n; ++j) y[j] *= score;
      for (std::int64_t j = 0; bias && j < n; ++j) y[j] += to_float(bias[j]);
      return;
    case ScoreAt::after_down:
      for (std::int64_t j = 0; bias && j < n; ++j) y[j] += to_float(bias[j]);
      for (std::int64_t j = 0; j < n; ++j) y[j] *= score;
      return;
    case ScoreAt::combine:
    case ScoreAt::none:
      break;
  }
  for (std::int64_t j = 0; bias && j < n; ++j) y[j] += to_float(bias[j]);
}

template <class Engine>
struct DownProj {
  using T = typename Engine::Storage;
  static std::size_t floats(const GroupedGemmDesc&) { return kBlockM * kBlockN; }

  static void run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                  int threads) {
    const std::int64_t n = d.intermediate;
    const bool scored = d.scored() && !d.gathers();
    const Form form = d.transposed() ? Form::nn : Form::nt;
    const auto block = [&](int thread, RowBlock rows, std::int64_t part) {
      const std::int64_t j0 = part * kBlockN;
      const std::int64_t nj = std::min(kBlockN, d.hidden - j0);
      Scratch<Engine> scratch(workspace, thread, floats(d));
      const T* act = static_cast<const T*>(a.act) + rows.begin * n;
      const auto w2 = w2_matrix(d, static_cast<const T*>(a.w2), rows.expert);
      T* out = static_cast<T*>(a.expert_out) + rows.begin * d.hidden + j0;
      for (std::int64_t k0 = 0; k0 < n; k0 += kBlockK) {
        const std::int64_t nk = std::min(kBlockK, n - k0);
        scratch.engine.lhs(form, rows.rows, nk, Rows<T>{act + k0, n});
        scratch.engine.rhs(form, nj, nk, w2.from(j0, k0));
        scratch.engine.multiply(form, rows.rows, nj, nk, scratch.tile, nj, k0 > 0);
      }
      const T* b2 = d.bias ? static_cast<const T*>(a.b2) + rows.expert * d.hidden + j0 : nullptr;
      for (std::int64_t i = 0; i < rows.rows; ++i) {
        float* y = scratch.tile + i * nj;
        const float score = scored ? a.row_scores[rows.begin + i] : 1.0f;
        finish_row(d.score_at, score, b2, nj, y);
        store(y, out + i * d.hidden, nj);
      }
    };
    for_each_row_block(threads, a.offsets, row_ends(a), d.experts, kBlockM,
                       (d.hidden + kBlockN - 1) / kBlockN, block);
  }
};

}  // namespace

SONICMOE_CPU_GROUPED_GEMM(DownProj, "down_proj");

}  // namespace sonicmoe::cpu
