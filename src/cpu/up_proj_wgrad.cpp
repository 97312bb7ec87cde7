// dW1 = dH^T x[tokens] per expert: gate rows, then up rows, each (n, d), written in W1's layout.
// The product of an expert without rows is zero.
#include "core/backends.h"
#include "cpu/grouped_gemm.h"

namespace sonicmoe::cpu {
namespace {

template <class Engine>
struct UpProjWgrad {
  using T = typename Engine::Storage;
  static std::size_t floats(const GroupedGemmDesc&) { return 2 * kBlockN * kBlockN; }

  static void run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                  int threads) {
    const std::int64_t n = d.intermediate;
    const bool glu = is_glu(d.activation);
    const std::int64_t width = glu ? 2 * n : n;
    const std::int64_t m_blocks = (n + kBlockN - 1) / kBlockN;
    const std::int64_t n_blocks = (d.hidden + kBlockN - 1) / kBlockN;
    parallel_for(threads, d.experts * m_blocks * n_blocks, [&](int thread, std::int64_t piece) {
      const std::int64_t expert = piece / (m_blocks * n_blocks);
      const std::int64_t i0 = piece / n_blocks % m_blocks * kBlockN;
      const std::int64_t j0 = piece % n_blocks * kBlockN;
      const std::int64_t ni = std::min(kBlockN, n - i0);
      const std::int64_t nj = std::min(kBlockN, d.hidden - j0);
      Scratch<Engine> scratch(workspace, thread, floats(d));
      const std::int64_t begin = a.offsets[expert];
      const std::int64_t end = row_ends(a)[expert];
      const int halves = glu ? 2 : 1;
      if (begin == end) std::fill_n(scratch.tile, halves * ni * nj, 0.0f);
      for (std::int64_t k0 = begin; k0 < end; k0 += kBlockK) {
        const std::int64_t nk = std::min(kBlockK, end - k0);
        // rhs() packs the gathered rows of x once for both halves.
        scratch.engine.rhs(Form::tn, nj, nk,
                           source_rows(d, a, static_cast<const T*>(a.x) + j0, d.hidden, k0));
        for (int h = 0; h < halves; ++h) {
          const T* dh = static_cast<const T*>(a.dpreact) + k0 * width + h * n + i0;
          scratch.engine.lhs(Form::tn, ni, nk, Rows<T>{dh, width});
          scratch.engine.multiply(Form::tn, ni, nj, nk, scratch.tile + h * ni * nj, nj, k0 > begin);
        }
      }
      visit_grad_type<T>(d, [&](auto type) {
        using Stored = decltype(type);
        const auto dw1 = w1_view(d, static_cast<Stored*>(a.dw1), static_cast<Stored*>(a.dw1_up),
                                 expert, d.hidden);
        Stored* out[2] = {dw1.gate, dw1.up};
        for (int h = 0; h < halves; ++h) {
          for (std::int64_t i = 0; i < ni; ++i) {
            store_grad(d, scratch.tile + (h * ni + i) * nj, out[h] + (i0 + i) * dw1.stride + j0,
                       nj);
          }
        }
      });
    });
  }
};

}  // namespace

SONICMOE_CPU_GROUPED_GEMM(UpProjWgrad, "up_proj_wgrad");

}  // namespace sonicmoe::cpu
