// H = x[tokens] W1^T + b1, stored for backward but not for inference. A = act(H), computed from the
// unrounded H.
#include "core/backends.h"
#include "cpu/grouped_gemm.h"

namespace sonicmoe::cpu {
namespace {

/// A of one row over a range of n columns, from the row's fp32 H with its bias. Gates are `kStep`
/// floats apart; an up lies beside its gate, or n floats behind.
template <int kStep, class Fn, class T>
void activate(Fn fn, const float* __restrict h, std::int64_t n, T* __restrict act) {
  const std::int64_t up = kStep == 2 ? 1 : n;
  for (std::int64_t j = 0; j < n; ++j) {
    const float u = Fn::kIsGlu ? h[j * kStep + up] : 0.0f;
    act[j] = from_float<T>(fn.forward(h[j * kStep], u));
  }
}

template <class T>
void add_bias(float* h, Weights<const T> bias, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) h[j] += to_float(bias.base[j * bias.row]);
}

template <class Engine>
struct UpProj {
  using T = typename Engine::Storage;
  static std::size_t floats(const GroupedGemmDesc&) { return kBlockM * 2 * kBlockN; }

  static void run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                  int threads) {
    const std::int64_t n = d.intermediate;
    const std::int64_t width = d.preact_width();
    const Form form = d.transposed() ? Form::nn : Form::nt;
    const T* x = static_cast<const T*>(a.x);
    T* preact = d.inference ? nullptr : static_cast<T*>(a.preact);
    T* act = static_cast<T*>(a.act);
    const auto block = [&](int thread, RowBlock rows, std::int64_t part) {
      const std::int64_t j0 = part * kBlockN;
      const std::int64_t nj = std::min(kBlockN, n - j0);
      Scratch<Engine> scratch(workspace, thread, floats(d));
      // The tile has nj columns of each half of H, or 2 nj neighbours where gates and ups
      // alternate. Tile half h begins at column h * n + first(h).
      const auto first = [&](int h) { return d.alternates() ? 2 * j0 + h * (nj - n) : j0; };
      const auto weights = [&](const void* w1, const void* w1_up, int h, std::int64_t length) {
        return w1_half(d, static_cast<const T*>(w1), static_cast<const T*>(w1_up), rows.expert, h,
                       length)
            .from(first(h), 0);
      };
      const std::int64_t ldc = halves(d) * nj;
      for (std::int64_t k0 = 0; k0 < d.hidden; k0 += kBlockK) {
        const std::int64_t nk = std::min(kBlockK, d.hidden - k0);
        scratch.engine.lhs(form, rows.rows, nk, source_rows(d, a, x + k0, d.hidden, rows.begin));
        for (int h = 0; h < halves(d); ++h) {
          scratch.engine.rhs(form, nj, nk, weights(a.w1, a.w1_up, h, d.hidden).from(0, k0));
          scratch.engine.multiply(form, rows.rows, nj, nk, scratch.tile + h * nj, ldc, k0 > 0);
        }
      }
      visit_activation(d, [&](auto fn, auto step) {
        for (std::int64_t i = 0; i < rows.rows; ++i) {
          float* const tile = scratch.tile + i * ldc;
          const std::int64_t row = rows.begin + i;
          for (int h = 0; h < halves(d); ++h) {
            if (d.bias) add_bias(tile + h * nj, weights(a.b1, a.b1_up, h, 1), nj);
            if (preact) store(tile + h * nj, preact + row * width + h * n + first(h), nj);
          }
          activate<step>(fn, tile, nj, act + row * n + j0);
        }
      });
    };
    for_each_row_block(threads, a.offsets, row_ends(a), d.experts, kBlockM,
                       (n + kBlockN - 1) / kBlockN, block);
  }
};

}  // namespace

SONICMOE_CPU_GROUPED_GEMM(UpProj, "up_proj");

}  // namespace sonicmoe::cpu
