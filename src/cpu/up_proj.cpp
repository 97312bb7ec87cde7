// H = x[tokens] W1^T + b1, stored for backward but not for inference. A = act(H), computed from the
// unrounded H.
#include "core/backends.h"
#include "cpu/grouped_gemm.h"

namespace sonicmoe::cpu {
namespace {

/// Stores H and A of one row over a range of n columns. `h` is the row's fp32 H with its bias: n
/// gate columns, then n up columns. preact_gate is null for inference.
template <class Fn, class T>
void epilogue_row(Fn fn, const float* __restrict h, std::int64_t n, T* __restrict preact_gate,
                  T* __restrict preact_up, T* __restrict act) {
  if (preact_gate != nullptr) {
    store(h, preact_gate, n);
    if (Fn::kIsGlu) store(h + n, preact_up, n);
  }
  const float* up = Fn::kIsGlu ? h + n : h;
  for (std::int64_t j = 0; j < n; ++j) act[j] = from_float<T>(fn.forward(h[j], up[j]));
}

template <class T>
void add_bias(float* h, const T* bias, std::int64_t stride, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) h[j] += to_float(bias[j * stride]);
}

template <class Engine>
struct UpProj {
  using T = typename Engine::Storage;
  static std::size_t floats(const GroupedGemmDesc&) { return kBlockM * 2 * kBlockN; }

  static void run(const GroupedGemmDesc& d, const GroupedGemmArgs& a, void* workspace,
                  int threads) {
    const std::int64_t n = d.intermediate;
    const std::int64_t width = is_glu(d.activation) ? 2 * n : n;
    const T* x = static_cast<const T*>(a.x);
    T* preact = d.inference ? nullptr : static_cast<T*>(a.preact);
    T* act = static_cast<T*>(a.act);
    const auto block = [&](int thread, RowBlock rows, std::int64_t part) {
      const std::int64_t j0 = part * kBlockN;
      const std::int64_t nj = std::min(kBlockN, n - j0);
      Scratch<Engine> scratch(workspace, thread, floats(d));
      const auto w1 = w1_view(d, static_cast<const T*>(a.w1), static_cast<const T*>(a.w1_up),
                              rows.expert, d.hidden);
      const std::int64_t ldc = w1.up ? 2 * nj : nj;
      for (std::int64_t k0 = 0; k0 < d.hidden; k0 += kBlockK) {
        const std::int64_t nk = std::min(kBlockK, d.hidden - k0);
        scratch.engine.lhs(Form::nt, rows.rows, nk,
                           source_rows(d, a, x + k0, d.hidden, rows.begin));
        const T* half[2] = {w1.gate, w1.up};
        for (int h = 0; h < 2 && half[h] != nullptr; ++h) {
          scratch.engine.rhs(Form::nt, nj, nk, Rows<T>{half[h] + j0 * w1.stride + k0, w1.stride});
          scratch.engine.multiply(Form::nt, rows.rows, nj, nk, scratch.tile + h * nj, ldc, k0 > 0);
        }
      }
      const auto b1 = d.bias ? w1_view(d, static_cast<const T*>(a.b1),
                                       static_cast<const T*>(a.b1_up), rows.expert, 1)
                             : W1View<const T>{};
      math::visit_activation(d.activation, [&](auto fn) {
        for (std::int64_t i = 0; i < rows.rows; ++i) {
          float* h = scratch.tile + i * ldc;
          if (b1.gate) add_bias(h, b1.gate + j0 * b1.stride, b1.stride, nj);
          if (b1.up) add_bias(h + nj, b1.up + j0 * b1.stride, b1.stride, nj);
          const std::int64_t row = rows.begin + i;
          T* gate = preact ? preact + row * width + j0 : nullptr;
          epilogue_row(fn, h, nj, gate, gate + (preact ? n : 0), act + row * n + j0);
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
