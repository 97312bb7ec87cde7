// dW1 = dH^T x[tokens] per expert: the halves of H's columns, each (n, d), written in W1's layout.
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
    const std::int64_t width = d.preact_width();
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
      GradientProduct product(d, &scratch.engine);
      if (begin == end) std::fill_n(scratch.tile, halves(d) * ni * nj, 0.0f);
      for (std::int64_t k0 = begin; k0 < end; k0 += kBlockK) {
        const std::int64_t nk = std::min(kBlockK, end - k0);
        // The gathered rows of x are packed once for both halves.
        product.rhs(nj, nk, source_rows(d, a, static_cast<const T*>(a.x) + j0, d.hidden, k0));
        for (int h = 0; h < halves(d); ++h) {
          const T* dh = static_cast<const T*>(a.dpreact) + k0 * width + h * n + i0;
          product.lhs(ni, nk, Rows<T>{dh, width});
          product.multiply(ni, nj, nk, scratch.tile + h * ni * nj, k0 > begin);
        }
      }
      visit_grad_type<T>(d, [&](auto type) {
        using Stored = decltype(type);
        for (int h = 0; h < halves(d); ++h) {
          const auto dw1 = w1_half(d, static_cast<Stored*>(a.dw1), static_cast<Stored*>(a.dw1_up),
                                   expert, h, d.hidden);
          product.finish(ni, nj, scratch.tile + h * ni * nj, dw1.from(i0, j0));
        }
      });
    });
  }
};

}  // namespace

SONICMOE_CPU_GROUPED_GEMM(UpProjWgrad, "up_proj_wgrad");

}  // namespace sonicmoe::cpu
