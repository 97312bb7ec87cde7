// dX~ = dH W1. The contraction runs over one half of H's columns, then over the other.
#include "core/backends.h"
#include "cpu/grouped_gemm.h"

namespace sonicmoe::cpu {
namespace {

template <class Engine>
struct UpProjDgrad {
  using T = typename Engine::Storage;
  static std::size_t floats(const GroupedGemmDesc&) { return kBlockM * kBlockN; }

  static void run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                  int threads) {
    const std::int64_t n = d.intermediate;
    const std::int64_t width = d.preact_width();
    const Form form = d.transposed() ? Form::nt : Form::nn;
    const auto block = [&](int thread, RowBlock rows, std::int64_t part) {
      const std::int64_t j0 = part * kBlockN;
      const std::int64_t nj = std::min(kBlockN, d.hidden - j0);
      Scratch<Engine> scratch(workspace, thread, floats(d));
      const T* dh = static_cast<const T*>(a.dpreact) + rows.begin * width;
      for (int h = 0; h < halves(d); ++h) {
        const auto w1 = w1_half(d, static_cast<const T*>(a.w1), static_cast<const T*>(a.w1_up),
                                rows.expert, h, d.hidden);
        for (std::int64_t k0 = 0; k0 < n; k0 += kBlockK) {
          const std::int64_t nk = std::min(kBlockK, n - k0);
          scratch.engine.lhs(form, rows.rows, nk, Rows<T>{dh + h * n + k0, width});
          scratch.engine.rhs(form, nj, nk, w1.from(k0, j0));
          scratch.engine.multiply(form, rows.rows, nj, nk, scratch.tile, nj, h + k0 > 0);
        }
      }
      T* out = static_cast<T*>(a.dx_rows) + rows.begin * d.hidden + j0;
      for (std::int64_t i = 0; i < rows.rows; ++i) {
        store(scratch.tile + i * nj, out + i * d.hidden, nj);
      }
    };
    for_each_row_block(threads, a.offsets, row_ends(a), d.experts, kBlockM,
                       (d.hidden + kBlockN - 1) / kBlockN, block);
  }
};

}  // namespace

SONICMOE_CPU_GROUPED_GEMM(UpProjDgrad, "up_proj_dgrad");

}  // namespace sonicmoe::cpu
