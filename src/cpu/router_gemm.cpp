// logits = x Wr^T, dx = dlogits Wr or dWr = dlogits^T x. One piece computes each output tile.
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
      case GemmPass::wgrad:  // few outputs, long sums: with wide tiles threads would idle
        return multiply<Engine>({Form::tn, d.experts, d.hidden, d.tokens, dlogits, x,
                                 static_cast<T*>(a.dw), kBlockN, 64},
                                workspace, threads);
    }
  }
};

template <class... Engines>
struct Entry {
  static std::string reject(const RouterGemmDesc& desc, const DeviceTraits&) {
    // dgrad contracts over experts. The bf16 engine reads rows of dlogits two elements at a time,
    // so with an odd E it would read past a row's end.
    constexpr bool kPairs = (std::is_same_v<Engines, Avx512Engine<Bf16>> || ...);
    if (kPairs && desc.pass == GemmPass::dgrad && desc.experts % 2 != 0) {
      return "experts: got " + std::to_string(desc.experts) + ", allowed: even numbers";
    }
    return reject_processor<Engines...>();
  }
  static std::size_t workspace(const RouterGemmDesc& desc, const Exec& exec) {
    std::size_t each = 0;
    visit_engine<Engines...>(desc.dtype, [&]<class Engine>() {
      each = Scratch<Engine>::bytes_per_thread(kBlockN * kBlockN);
    });
    return each * static_cast<std::size_t>(exec.threads);
  }
  static Status run(const RouterGemmDesc& desc, const RouterGemmArgs& args, void* memory,
                    const Exec& exec) noexcept {
    visit_engine<Engines...>(desc.dtype, [&]<class Engine>() {
      RouterGemm<Engine>::run(desc, args, memory, exec.threads);
    });
    return {};
  }
  static constexpr Kernel<RouterGemmDesc> kernel(const char* name) {
    return {.op = "router_gemm",
            .name = name,
            .dtypes = {kDTypeOf<Engines>...},
            .reject = reject,
            .workspace = workspace,
            .run = run};
  }
};

}  // namespace

const Kernel<RouterGemmDesc> kRouterGemm =
    Entry<SgemmEngine<float>, SgemmEngine<Bf16>>::kernel("cpu.router_gemm");
const Kernel<RouterGemmDesc> kRouterGemmAvx512 =
    Entry<Avx512Engine<float>>::kernel("cpu-avx512.router_gemm");
const Kernel<RouterGemmDesc> kRouterGemmAvx512Bf16 =
    Entry<Avx512Engine<Bf16>>::kernel("cpu-avx512bf16.router_gemm");

}  // namespace sonicmoe::cpu
