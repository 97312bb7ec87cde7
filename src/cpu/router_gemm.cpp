// logits = x Wr^T, dx = dlogits Wr, dWr = dlogits^T x: dense, each output tile owned by one piece.
#include "core/backends.h"
#include "cpu/grouped_gemm.h"

namespace sonicmoe::cpu {
namespace {

/// A product of whole matrices, tiled over its two output axes.
template <class T>
struct Dense {
  Form form;
  std::int64_t m, n, k;
  Rows<T> a, b;
  T* out;               // (m, n)
  std::int64_t step_m;  // tile height, at most kBlockN (tn) or kBlockM
  std::int64_t step_n;  // tile width, at most kBlockN
};

template <class Engine>
void multiply(const Dense<typename Engine::Storage>& p, void* workspace, int threads) {
  const std::int64_t tiles_n = (p.n + p.step_n - 1) / p.step_n;
  const std::int64_t tiles_m = (p.m + p.step_m - 1) / p.step_m;
  parallel_for(threads, tiles_m * tiles_n, [&](int thread, std::int64_t piece) {
    const std::int64_t i0 = piece / tiles_n * p.step_m;
    const std::int64_t j0 = piece % tiles_n * p.step_n;
    const std::int64_t ni = std::min(p.step_m, p.m - i0);
    const std::int64_t nj = std::min(p.step_n, p.n - j0);
    Scratch<Engine> scratch(workspace, thread, kBlockN * kBlockN);
    if (p.k == 0) std::fill_n(scratch.tile, ni * nj, 0.0f);
    for (std::int64_t k0 = 0; k0 < p.k; k0 += kBlockK) {
      const std::int64_t nk = std::min(kBlockK, p.k - k0);
      const auto a =
          p.form == Form::tn ? p.a.from_row(k0).from_column(i0) : p.a.from_row(i0).from_column(k0);
      const auto b =
          p.form == Form::nt ? p.b.from_row(j0).from_column(k0) : p.b.from_row(k0).from_column(j0);
      scratch.engine.lhs(p.form, ni, nk, a);
      scratch.engine.rhs(p.form, nj, nk, b);
      scratch.engine.multiply(p.form, ni, nj, nk, scratch.tile, nj, k0 > 0);
    }
    for (std::int64_t i = 0; i < ni; ++i) {
      store(scratch.tile + i * nj, p.out + (i0 + i) * p.n + j0, nj);
    }
  });
}

template <class Engine>
struct RouterGemm {
  using T = typename Engine::Storage;
  static void run(const RouterGemmDesc& d, const RouterGemmArgs& a, void* workspace, int threads) {
    const Rows<T> x{static_cast<const T*>(a.x), d.hidden};
    const Rows<T> w{static_cast<const T*>(a.w), d.hidden};
    const Rows<T> dlogits{static_cast<const T*>(a.dlogits), d.experts};
    switch (d.pass) {
      case GemmPass::forward:
        return multiply<Engine>({Form::nt, d.tokens, d.experts, d.hidden, x, w,
                                 static_cast<T*>(a.logits), 128, kBlockN},
                                workspace, threads);
      case GemmPass::dgrad:
        return multiply<Engine>({Form::nn, d.tokens, d.hidden, d.experts, dlogits, w,
                                 static_cast<T*>(a.dx), 128, kBlockN},
                                workspace, threads);
      case GemmPass::wgrad:  // few outputs and a long contraction: narrow tiles, or nobody shares
        return multiply<Engine>({Form::tn, d.experts, d.hidden, d.tokens, dlogits, x,
                                 static_cast<T*>(a.dw), kBlockN, 64},
                                workspace, threads);
    }
  }
};

template <class Engine>
std::string reject(const RouterGemmDesc& desc) {
  // dgrad contracts over experts in pairs taken from rows of W, so any E is fine; but rows of an
  // odd E would be read past their end by the left operand.
  if (std::is_same_v<Engine, Bf16Engine> && desc.pass == GemmPass::dgrad && desc.experts % 2 != 0) {
    return "experts: got " + std::to_string(desc.experts) + ", allowed: even numbers";
  }
  return reject_dtype<Engine>(desc.dtype);
}

template <class Engine>
std::size_t workspace(const RouterGemmDesc& desc, const Exec& exec) {
  const std::size_t floats = kBlockN * kBlockN;
  const std::size_t each = desc.dtype == DType::f32
                               ? Scratch<SgemmEngine<float>>::bytes_per_thread(floats)
                               : Scratch<Engine>::bytes_per_thread(floats);
  return each * static_cast<std::size_t>(exec.threads);
}

template <class Engine>
Status run(const RouterGemmDesc& desc, const RouterGemmArgs& args, void* memory,
           const Exec& exec) noexcept {
  if (desc.dtype == DType::f32) {
    RouterGemm<SgemmEngine<float>>::run(desc, args, memory, exec.threads);
  } else {
    RouterGemm<Engine>::run(desc, args, memory, exec.threads);
  }
  return {};
}

}  // namespace

const Kernel<RouterGemmDesc> kRouterGemm = {"router_gemm",
                                            "cpu.router_gemm",
                                            DeviceType::cpu,
                                            reject<SgemmEngine<Bf16>>,
                                            workspace<SgemmEngine<Bf16>>,
                                            run<SgemmEngine<Bf16>>};
const Kernel<RouterGemmDesc> kRouterGemmBf16 = {"router_gemm",         "cpu-avx512bf16.router_gemm",
                                                DeviceType::cpu,       reject<Bf16Engine>,
                                                workspace<Bf16Engine>, run<Bf16Engine>};

}  // namespace sonicmoe::cpu
