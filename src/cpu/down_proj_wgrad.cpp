// dW2 = dO[tokens]^T A' per expert: (d, n), or its transpose, summed over the expert's rows. The
// product of an expert without rows is zero.
#include "core/backends.h"
#include "cpu/grouped_gemm.h"

namespace sonicmoe::cpu {
namespace {

template <class Engine>
struct DownProjWgrad {
  using T = typename Engine::Storage;
  static std::size_t floats(const GroupedGemmDesc&) { return kBlockN * kBlockN; }

  static void run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                  int threads) {
    const std::int64_t n = d.intermediate;
    const std::int64_t m_blocks = (d.hidden + kBlockN - 1) / kBlockN;
    const std::int64_t n_blocks = (n + kBlockN - 1) / kBlockN;
    parallel_for(threads, d.experts * m_blocks * n_blocks, [&](int thread, std::int64_t piece) {
      const std::int64_t expert = piece / (m_blocks * n_blocks);
      const std::int64_t i0 = piece / n_blocks % m_blocks * kBlockN;
      const std::int64_t j0 = piece % n_blocks * kBlockN;
      const std::int64_t ni = std::min(kBlockN, d.hidden - i0);
      const std::int64_t nj = std::min(kBlockN, n - j0);
      Scratch<Engine> scratch(workspace, thread, floats(d));
      const std::int64_t begin = a.offsets[expert];
      const std::int64_t end = row_ends(a)[expert];
      GradientProduct product(d, &scratch.engine);
      if (begin == end) std::fill_n(scratch.tile, ni * nj, 0.0f);
      for (std::int64_t k0 = begin; k0 < end; k0 += kBlockK) {
        const std::int64_t nk = std::min(kBlockK, end - k0);
        product.lhs(ni, nk, source_rows(d, a, static_cast<const T*>(a.dout) + i0, d.hidden, k0));
        product.rhs(nj, nk, Rows<T>{static_cast<const T*>(a.scaled_act) + k0 * n + j0, n});
        product.multiply(ni, nj, nk, scratch.tile, k0 > begin);
      }
      visit_grad_type<T>(d, [&](auto type) {
        const auto dw2 = w2_matrix(d, static_cast<decltype(type)*>(a.dw2), expert);
        product.finish(ni, nj, scratch.tile, dw2.from(i0, j0));
      });
    });
  }
};

}  // namespace

SONICMOE_CPU_GROUPED_GEMM(DownProjWgrad, "down_proj_wgrad");

}  // namespace sonicmoe::cpu
