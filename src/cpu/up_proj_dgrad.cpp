// dX~ = dH W1. The contraction runs over the gate rows of W1, then over the up rows.
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
    const std::int64_t width = is_glu(d.activation) ? 2 * n : n;
    const auto block = [&](int thread, RowBlock rows, std::int64_t part) {
      const std::int64_t j0 = part * kBlockN;
      const std::int64_t nj = std::min(kBlockN, d.hidden - j0);
      Scratch<Engine> scratch(workspace, thread, floats(d));
      const auto w1 = w1_view(d, static_cast<const T*>(a.w1), static_cast<const T*>(a.w1_up),
                              rows.expert, d.hidden);
      const T* dgate = static_cast<const T*>(a.dpreact) + rows.begin * width;
      const T* weights[2] = {w1.gate, w1.up};
      for (int h = 0; h < 2 && weights[h] != nullptr; ++h) {
        for (std::int64_t k0 = 0; k0 < n; k0 += kBlockK) {
          const std::int64_t nk = std::min(kBlockK, n - k0);
          scratch.engine.lhs(Form::nn, rows.rows, nk, Rows<T>{dgate + h * n + k0, width});
          scratch.engine.rhs(Form::nn, nj, nk,
                             Rows<T>{weights[h] + k0 * w1.stride + j0, w1.stride});
          scratch.engine.multiply(Form::nn, rows.rows, nj, nk, scratch.tile, nj, h + k0 > 0);
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
