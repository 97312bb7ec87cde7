// dA' = dO[tokens] W2 stays in the fp32 tile. The epilogue recomputes A from H:
//
//     dH = dAct(s dA', H), A' = s A, dS = <dA', A> over n
//
// dS takes dA' without the score, dH with it.
#include "core/backends.h"
#include "cpu/grouped_gemm.h"

namespace sonicmoe::cpu {
namespace {

constexpr int kLanes = 8;  // n is a multiple of 8

/// One row over a range of n columns. Gates are `kStep` elements of H apart; an up lies beside its
/// gate, or `half` elements behind. Lane l of `dot` adds columns l, l+8, ... of <dA', A>. `product`
/// is n floats of scratch. dh may be h itself: a column is read before it is written.
template <int kStep, class Fn, class T>
void epilogue_row(Fn fn, const float* __restrict da, float score, std::int64_t n, const T* h, T* dh,
                  std::int64_t half, T* __restrict scaled_act, float* __restrict product,
                  float* __restrict dot) {
  const std::int64_t up = kStep == 2 ? 1 : half;
#if !defined(__clang__)  // clang does not know the pragma
#pragma GCC ivdep        // columns are independent, even where dh is h
#endif
  for (std::int64_t j = 0; j < n; ++j) {
    const float g = to_float(h[j * kStep]);
    const float u = Fn::kIsGlu ? to_float(h[j * kStep + up]) : 0.0f;
    const math::Gradients r = fn.backward(g, u, score * da[j]);
    dh[j * kStep] = from_float<T>(r.dgate);
    if (Fn::kIsGlu) dh[j * kStep + up] = from_float<T>(r.dup);
    scaled_act[j] = from_float<T>(score * r.act);
    product[j] = da[j] * r.act;
  }
  for (std::int64_t j = 0; j < n; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) dot[l] += product[j + l];
  }
}

template <class Engine>
struct DownProjDgrad {
  using T = typename Engine::Storage;
  // The tile, one row of products, and kLanes partial sums for each row of the block.
  static std::size_t floats(const GroupedGemmDesc&) {
    return kBlockM * kBlockN + kBlockN + kBlockM * kLanes;
  }

  static void run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                  int threads) {
    const std::int64_t n = d.intermediate;
    const std::int64_t width = d.preact_width();
    const Form form = d.transposed() ? Form::nt : Form::nn;
    const T* dout = static_cast<const T*>(a.dout);
    // One piece computes all of n for its rows, so the sum over n has one order.
    const auto block = [&](int thread, RowBlock rows, std::int64_t) {
      Scratch<Engine> scratch(workspace, thread, floats(d));
      float* product = scratch.tile + kBlockM * kBlockN;
      float* dots = product + kBlockN;
      std::fill_n(dots, rows.rows * kLanes, 0.0f);
      const auto w2 = w2_matrix(d, static_cast<const T*>(a.w2), rows.expert);
      for (std::int64_t j0 = 0; j0 < n; j0 += kBlockN) {
        const std::int64_t nj = std::min(kBlockN, n - j0);
        for (std::int64_t k0 = 0; k0 < d.hidden; k0 += kBlockK) {
          const std::int64_t nk = std::min(kBlockK, d.hidden - k0);
          scratch.engine.lhs(form, rows.rows, nk,
                             source_rows(d, a, dout + k0, d.hidden, rows.begin));
          scratch.engine.rhs(form, nj, nk, w2.from(k0, j0));
          scratch.engine.multiply(form, rows.rows, nj, nk, scratch.tile, nj, k0 > 0);
        }
        visit_activation(d, [&](auto fn, auto step) {
          for (std::int64_t i = 0; i < rows.rows; ++i) {
            const std::int64_t row = rows.begin + i, at = row * width + step * j0;
            const float score = d.scored() ? a.row_scores[row] : 1.0f;
            epilogue_row<step>(
                fn, scratch.tile + i * nj, score, nj, static_cast<const T*>(a.preact) + at,
                static_cast<T*>(a.dpreact) + at, n, static_cast<T*>(a.scaled_act) + row * n + j0,
                product, dots + i * kLanes);
          }
        });
      }
      for (std::int64_t i = 0; d.scored() && i < rows.rows; ++i) {
        const float* l = dots + i * kLanes;
        a.row_dscores[rows.begin + i] =
            ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
      }
    };
    for_each_row_block(threads, a.offsets, row_ends(a), d.experts, kBlockM, 1, block);
  }
};

}  // namespace

SONICMOE_CPU_GROUPED_GEMM(DownProjDgrad, "down_proj_dgrad");

}  // namespace sonicmoe::cpu
