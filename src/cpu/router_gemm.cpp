// logits = x Wr^T + bias, dx = dlogits Wr or dWr = dlogits^T x. One piece computes each output
// tile.
#include <array>

#include "core/backends.h"
#include "cpu/grouped_gemm.h"

namespace sonicmoe::cpu {
namespace {

/// A product of whole matrices, tiled over its two output axes, plus a bias for each column.
template <class T, class Out>
struct Dense {
  Form form;
  std::int64_t m, n, k;
  Rows<T> a, b;
  Out* out;                     // (m, n)
  std::int64_t step_m;          // tile height, at most kBlockN (tn) or kBlockM
  std::int64_t step_n;          // tile width, at most kBlockN
  const float* bias = nullptr;  // (n)
};

template <class Engine, class Out>
void multiply(const Dense<typename Engine::Storage, Out>& p, void* workspace, int threads) {
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
    for (std::int64_t i = 0; i < ni && p.bias != nullptr; ++i) {
      for (std::int64_t j = 0; j < nj; ++j) scratch.tile[i * nj + j] += p.bias[j0 + j];
    }
    for (std::int64_t i = 0; i < ni; ++i) {
      store(scratch.tile + i * nj, p.out + (i0 + i) * p.n + j0, nj);
    }
  });
}

/// Column sums of dlogits (T, E), in token order.
template <class T>
void sum_columns(const RouterGemmDesc& d, const T* dlogits, float* sums) {
  std::fill_n(sums, d.experts, 0.0f);
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    for (std::int64_t e = 0; e < d.experts; ++e) sums[e] += to_float(dlogits[t * d.experts + e]);
  }
}

/// Out is the type of x and dx, LogitsOut that of logits, WeightOut that of dw. Operands are of the
/// engine's type.
template <class Engine, class Out, class LogitsOut, class WeightOut>
void run_typed(const RouterGemmDesc& d, const RouterGemmArgs& a, void* workspace, int threads) {
  using T = typename Engine::Storage;
  const Rows<T> x{static_cast<const T*>(a.x), d.hidden};
  const Rows<T> w{static_cast<const T*>(a.w), d.hidden};
  const Rows<T> dlogits{static_cast<const T*>(a.dlogits), d.experts};
  switch (d.pass) {
    case GemmPass::forward:
      return multiply<Engine, LogitsOut>(
          {Form::nt, d.tokens, d.experts, d.hidden, x, w, static_cast<LogitsOut*>(a.logits), 128,
           kBlockN, d.bias ? a.bias : nullptr},
          workspace, threads);
    case GemmPass::dgrad:
      return multiply<Engine, Out>({Form::nn, d.tokens, d.hidden, d.experts, dlogits, w,
                                    static_cast<Out*>(a.dx), 128, kBlockN},
                                   workspace, threads);
    case GemmPass::wgrad:  // few outputs, long sums: with wide tiles threads would idle
      if (d.bias && a.dbias != nullptr) sum_columns(d, dlogits.base, a.dbias);
      if (a.dw == nullptr) return;
      return multiply<Engine, WeightOut>({Form::tn, d.experts, d.hidden, d.tokens, dlogits, x,
                                          static_cast<WeightOut*>(a.dw), kBlockN, 64},
                                         workspace, threads);
  }
}

/// Are some of the tensors fp32 and others not? Then the others are copied to fp32 first.
bool is_mixed(const RouterGemmDesc& d) { return d.f32_logits && d.dtype != DType::f32; }

struct Operand {
  const void* RouterGemmArgs::*tensor;
  std::int64_t elements;
  bool f32;
};
/// x and w, without elements where the pass does not read them. dlogits is fp32 anyway.
std::array<Operand, 2> operands(const RouterGemmDesc& d) {
  const bool x = d.pass != GemmPass::dgrad, w = d.pass != GemmPass::wgrad;
  return {Operand{&RouterGemmArgs::x, x ? d.tokens * d.hidden : 0, false},
          Operand{&RouterGemmArgs::w, w ? d.experts * d.hidden : 0, d.f32_w}};
}

std::size_t copies_bytes(const RouterGemmDesc& d) {
  std::size_t bytes = 0;
  for (const Operand& o : operands(d))
    bytes += o.f32 ? 0 : 4 * static_cast<std::size_t>(o.elements);
  return is_mixed(d) ? (bytes + 63) / 64 * 64 : 0;
}

/// Arguments whose operands are all fp32; copies go to `memory`.
RouterGemmArgs all_f32(const RouterGemmDesc& d, RouterGemmArgs a, float* memory, int threads) {
  for (const Operand& o : operands(d)) {
    if (o.f32 || o.elements == 0) continue;
    const auto* const from = static_cast<const Bf16*>(a.*o.tensor);
    parallel_ranges(threads, o.elements, kBlockK, [&](int, std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) memory[i] = to_float(from[i]);
    });
    a.*o.tensor = memory;
    memory += o.elements;
  }
  return a;
}

template <class... Engines>
struct Entry {
  static constexpr bool kMixes = (std::is_same_v<Engines, SgemmEngine<float>> || ...);
  static DType engine_type(const RouterGemmDesc& d) { return is_mixed(d) ? DType::f32 : d.dtype; }

  static std::string reject(const RouterGemmDesc& desc, const DeviceTraits&) {
    // dgrad contracts over experts. The bf16 engine reads rows of dlogits two elements at a time,
    // so with an odd E it would read past a row's end.
    constexpr bool kPairs = (std::is_same_v<Engines, Avx512Engine<Bf16>> || ...);
    if (is_mixed(desc) && !kMixes)
      return "f32_logits: got true, allowed: false with " + std::string(name(desc.dtype));
    if (kPairs && desc.pass == GemmPass::dgrad && desc.experts % 2 != 0) {
      return "experts: got " + std::to_string(desc.experts) + ", allowed: even numbers";
    }
    return reject_processor<Engines...>();
  }
  static std::size_t workspace(const RouterGemmDesc& desc, const Exec& exec) {
    std::size_t each = 0;
    visit_engine<Engines...>(engine_type(desc), [&]<class Engine>() {
      each = Scratch<Engine>::bytes_per_thread(kBlockN * kBlockN);
    });
    return copies_bytes(desc) + each * static_cast<std::size_t>(exec.threads);
  }
  static Status run(const RouterGemmDesc& desc, const RouterGemmArgs& args, void* memory,
                    const Exec& exec) noexcept {
    char* const tiles = static_cast<char*>(memory) + copies_bytes(desc);
    if (is_mixed(desc)) {
      if constexpr (kMixes) {
        const RouterGemmArgs a = all_f32(desc, args, static_cast<float*>(memory), exec.threads);
        using Engine = SgemmEngine<float>;
        desc.f32_w ? run_typed<Engine, Bf16, float, float>(desc, a, tiles, exec.threads)
                   : run_typed<Engine, Bf16, float, Bf16>(desc, a, tiles, exec.threads);
      }
      return {};
    }
    visit_engine<Engines...>(desc.dtype, [&]<class Engine>() {
      using T = typename Engine::Storage;
      run_typed<Engine, T, T, T>(desc, args, tiles, exec.threads);
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
