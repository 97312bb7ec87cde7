// The router's three products: logits = x Wr^T + bias, dx = dlogits Wr, dWr = dlogits^T x. One
// expert owns all tokens; in dWr each part of the tokens has an expert of its own, and another
// kernel adds the parts in order.
#include "cuda/router_operands.cuh"
#include "cuda/sm80/matrices.cuh"
#include "cuda/sm80/router_gemm.cuh"
#include "cuda/sm80/rows.cuh"

namespace sonicmoe::cuda {
namespace sm80 {
namespace {

constexpr int kTileN = kNarrow;
constexpr int kBlock = 64;  // columns of 16 experts whose weights are in parts: see StoreLogits

std::int64_t experts_of(const RouterGemmDesc& d) { return cuda::experts_of(d, kBlock); }

/// dWr has few tiles and a long sum: parts of the tokens fill the multiprocessors. A part has 512
/// tokens or more, so that its sum outweighs its store.
struct TokenParts {
  int count, tokens;  ///< tokens: of each, a multiple of kTileK
};
TokenParts token_parts(const RouterGemmDesc& d, const DeviceTraits& device) {
  if (d.tokens == 0) return {0, kTileK};
  const int of_part = tiles(experts_of(d), kTileM) * tiles(d.hidden, kTileN);
  const int most = tiles(d.tokens, 512);
  const int wanted = std::clamp(device.multiprocessors / of_part, 1, most);
  const int each = tiles(tiles(d.tokens, wanted), kTileK) * kTileK;
  return {tiles(d.tokens, each), each};
}

Extents all_tokens(const RouterGemmDesc& d, int n_blocks) {
  const int tokens = static_cast<int>(d.tokens);
  return {.experts = 1, .rows = tokens, .part_rows = tokens, .n_blocks = n_blocks};
}
Weights matrix(const void* base, std::int64_t stride, std::int64_t width) {
  return {.base = {base, base}, .stride = stride_of(stride), .width = static_cast<int>(width)};
}

struct Router {
  template <class F>
  static Status visit(const RouterGemmDesc& d, F&& f) {
    switch (d.pass) {
      case GemmPass::forward:
        return visit_storage(d.dtype, [&](auto type) {
          using T = decltype(type);
          return d.f32_w ? f(LogitsConfig<T, true>{}) : f(LogitsConfig<T, false>{});
        });
      case GemmPass::dgrad:
        return visit_configs<RowsConfig>(d.dtype, false, f);
      case GemmPass::wgrad:
        break;
    }
    return visit_matrices(d.dtype, f);
  }

  static std::size_t workspace(const RouterGemmDesc& d, const Exec& exec) {
    return regions(d, token_parts(d, exec.traits).count, kBlock).bytes;
  }

  template <class Config>
  static Status run(const RouterGemmDesc& d, const RouterGemmArgs& a, void* memory,
                    const Exec& exec) {
    using T = typename Config::T;
    const TokenParts parts = token_parts(d, exec.traits);
    const Regions at = regions(d, parts.count, kBlock);
    Operands operands{};
    const Status status = prepare_operands<T>(d, a, at, memory, exec, &operands);
    if (!status.ok() || !multiplies(d, a)) return status;
    auto* const partials = reinterpret_cast<float*>(static_cast<char*>(memory) + at.partials);
    if constexpr (std::is_same_v<typename Config::Epilogue, StoreMatrix>) {
      return wgrad<Config>(d, a, operands, parts, partials, exec);
    } else {
      return along_tokens<Config>(d, a, operands, exec);
    }
  }

  /// logits and dx.
  template <class Config>
  static Status along_tokens(const RouterGemmDesc& d, const RouterGemmArgs& a,
                             const Operands& operands, const Exec& exec) {
    constexpr bool kForward = kMakesLogits<Config>;
    using T = typename Config::T;
    if (d.tokens == 0) return {};
    const std::int64_t experts = experts_of(d), width = kForward ? experts : d.hidden;
    const int n_blocks = tiles(width, kTileN);
    Params<Config> p{.b = matrix(operands.w, d.hidden, width),
                     .k = contraction(kForward ? d.hidden : experts),
                     .extents = all_tokens(d, n_blocks)};
    if constexpr (kForward) {
      p.a = Rows{.base = a.x, .stride = stride_of(d.hidden)};
      p.epilogue = typename Config::Epilogue::Params{.out = a.logits,
                                                     .bias = d.bias ? a.bias : nullptr,
                                                     .experts = static_cast<int>(d.experts),
                                                     .small_factor = kDown<T>,
                                                     .f32 = d.f32_logits};
    } else {
      p.a = Rows{.base = operands.dlogits, .stride = stride_of(parts_of(d) * padded(d.experts))};
      p.epilogue =
          typename Config::Epilogue::Params{.out = a.dx, .columns = static_cast<int>(d.hidden)};
    }
    return Compiled<Config>::launch(p, std::int64_t{tiles(d.tokens, kTileM)} * n_blocks, exec,
                                    "router_gemm: launch");
  }

  template <class Config>
  static Status wgrad(const RouterGemmDesc& d, const RouterGemmArgs& a, const Operands& operands,
                      const TokenParts& parts, float* partials, const Exec& exec) {
    const std::int64_t experts = experts_of(d);
    Params<Config> p{.a = columns_of(operands.dlogits, nullptr, experts, 1),
                     .b = columns_of(a.x, nullptr, d.hidden, 1),
                     .extents = {.experts = parts.count,
                                 .rows = static_cast<int>(d.tokens),
                                 .part_rows = parts.tokens},
                     .epilogue = {.out = {partials, partials},
                                  .expert_stride = experts * d.hidden,
                                  .row_stride = d.hidden,
                                  .f32 = true}};
    p.a.stride = stride_of(parts_of(d) * padded(d.experts));
    const Status status = launch_tiles<Config>(p, 1, 1, exec, "router_gemm: launch");
    if (!status.ok()) return status;
    add_partials<typename Config::T>(d, parts.count, partials, a.dw, exec);
    return launched("router_gemm: sums");
  }
};

std::string reject(const RouterGemmDesc& d, const DeviceTraits& device) {
  if (std::string reason = reject_rows("tokens", d.tokens); !reason.empty()) return reason;
  return reject_shared(device, kSharedBytes<kTileN>);
}

}  // namespace
}  // namespace sm80

constinit const Kernel<RouterGemmDesc> kPortableRouterGemm =
    sm80::entry<sm80::Router, RouterGemmDesc>({.op = "router_gemm",
                                               .name = "sm80.router_gemm",
                                               .reject = sm80::reject,
                                               .workspace = sm80::Router::workspace});

}  // namespace sonicmoe::cuda
