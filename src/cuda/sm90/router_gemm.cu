// The router's three products: logits = x Wr^T, dx = dlogits Wr, dWr = dlogits^T x. The grouped
// kernel with one expert, or with one for each part of the tokens.
#include "core/backends.h"
#include "core/ledger.h"
#include "cuda/launch_early.cuh"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/epilogue/store_transposed.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/tensor_map.h"

namespace sonicmoe::cuda {
namespace {

/// Experts are N of logits and dWr. Both take the time that reading x takes, so a tile has room for
/// as many experts as there are, where it can, and little more.
template <int kTileN>
constexpr int kDepth = kTileN == 64    ? 8
                       : kTileN == 128 ? 6
                                       : 4;  // stages, all that fit

template <class T, int kTileN>
struct Logits : Traits<T, ALoad::load_m, Major::k, kTileN,
                       kTileN == 256 ? Schedule::cooperative : Schedule::pingpong, kDepth<kTileN>,
                       StoreTile<AtRows, false>> {};
/// Here N is the hidden size.
template <class T>
struct RouterDgrad
    : Traits<T, ALoad::load_m, Major::mn, 128, Schedule::pingpong, 5, StoreTile<AtRows, false>> {};
template <class T, int kTileN>
struct RouterWgrad : Traits<T, ALoad::load_k, Major::mn, kTileN, Schedule::cooperative,
                            kDepth<kTileN>, StoreTransposed<false>> {};

/// The copy engine wants rows that start at multiples of 16 bytes.
bool needs_padding(const RouterGemmDesc& d) {
  return d.pass != GemmPass::forward && d.experts % 8 != 0;
}
std::int64_t padded(std::int64_t experts) { return (experts + 7) / 8 * 8; }

TokenSplit split_of(const RouterGemmDesc& d, const DeviceTraits& device, int width) {
  return token_split(device, d.tokens, d.hidden, d.experts, width, kTileK);
}

struct Regions {
  std::size_t dlogits, partials, bytes;
};
Regions regions(const RouterGemmDesc& d, const DeviceTraits& device, int width) {
  Ledger ledger;
  Regions r{};
  const std::size_t tokens = static_cast<std::size_t>(d.tokens);
  const std::size_t experts = static_cast<std::size_t>(d.experts);
  if (needs_padding(d)) {
    r.dlogits = ledger.book("dlogits", tokens * static_cast<std::size_t>(padded(d.experts)) * 2);
  }
  if (d.pass == GemmPass::wgrad) {
    r.partials =
        ledger.book("partials", static_cast<std::size_t>(split_of(d, device, width).parts) *
                                    experts * static_cast<std::size_t>(d.hidden) * 4);
  }
  r.bytes = ledger.size();
  return r;
}

__global__ void pad_rows(const std::uint16_t* from, std::int64_t rows, int width, int padded_width,
                         std::uint16_t* to) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t row = i / padded_width;
  const int column = static_cast<int>(i % padded_width);
  if (row >= rows) return;
  to[i] = column < width ? from[row * width + column] : std::uint16_t{0};
}

/// The parts' sums in order.
template <class T>
__global__ void add_parts(const float* parts, int count, std::int64_t elements, T* out) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  wait_for_previous();
  if (i >= elements) return;
  float sum = 0.0f;
  for (int part = 0; part < count; ++part) sum += parts[part * elements + i];
  out[i] = static_cast<T>(sum);
}

/// Rows of all tokens, in boxes of 64 x `box`.
CUtensorMap encode_rows(TensorMaps* maps, const RouterGemmDesc& d, const void* base,
                        std::int64_t columns, std::int64_t stride, int box) {
  return maps->encode(
      {.base = base, .inner = columns, .outer = d.tokens, .outer_stride = stride, .box = box});
}
CUtensorMap encode_w(TensorMaps* maps, const RouterGemmDesc& d, const void* w, int box) {
  return maps->encode(
      {.base = w, .inner = d.hidden, .outer = d.experts, .outer_stride = d.hidden, .box = box});
}

/// One expert owns all tokens.
Extents all_tokens(const RouterGemmDesc& d, int n_blocks, int k_blocks) {
  const int tokens = static_cast<int>(d.tokens);
  return {.experts = 1,
          .rows = tokens,
          .part_rows = tokens,
          .n_blocks = n_blocks,
          .k_blocks = k_blocks,
          .k_half = k_blocks};
}

template <class Config>
Status forward(const RouterGemmDesc& d, const RouterGemmArgs& a, const Exec& exec) {
  TensorMaps maps(d.dtype);
  const CUtensorMap x = encode_rows(&maps, d, a.x, d.hidden, d.hidden, kTileM);
  const CUtensorMap w = encode_w(&maps, d, a.w, Config::kTileN / 2);
  StoreParams e{.out = {a.logits}, .row_stride = d.experts, .columns = static_cast<int>(d.experts)};
  if (d.experts % 8 == 0) {
    e.boxes[0] = encode_rows(&maps, d, a.logits, d.experts, d.experts, WarpTile::kRows);
  }
  if (!maps.status().ok()) return maps.status();
  const GemmParams p{
      .a = {.maps = {x, x}},
      .b = {.maps = {w, w}},
      .extents = all_tokens(d, tiles(d.experts, Config::kTileN), tiles(d.hidden, kTileK))};
  return launch<Config>(p, e, exec, "router_gemm: launch");
}

template <class Config>
Status dgrad(const RouterGemmDesc& d, const RouterGemmArgs& a, const void* dlogits,
             const Exec& exec) {
  TensorMaps maps(d.dtype);
  const CUtensorMap rows = encode_rows(&maps, d, dlogits, d.experts, padded(d.experts), kTileM);
  const CUtensorMap w = encode_w(&maps, d, a.w, kTileK / 2);
  const StoreParams e{.boxes = {encode_rows(&maps, d, a.dx, d.hidden, d.hidden, WarpTile::kRows)},
                      .out = {a.dx},
                      .row_stride = d.hidden,
                      .columns = static_cast<int>(d.hidden)};
  if (!maps.status().ok()) return maps.status();
  const GemmParams p{
      .a = {.maps = {rows, rows}},
      .b = {.maps = {w, w}, .last_chunk = last_chunk(d.hidden)},
      .extents = all_tokens(d, tiles(d.hidden, Config::kTileN), tiles(d.experts, kTileK))};
  return launch<Config>(p, e, exec, "router_gemm: launch");
}

template <class Config>
Status wgrad(const RouterGemmDesc& d, const RouterGemmArgs& a, const void* dlogits, float* partials,
             const Exec& exec) {
  using T = typename Config::T;
  const TokenSplit split = split_of(d, exec.traits, Config::kTileN);
  const std::int64_t elements = d.experts * d.hidden;
  if (d.tokens > 0) {
    TensorMaps maps(d.dtype);
    const CUtensorMap x = encode_rows(&maps, d, a.x, d.hidden, d.hidden, kTileK);
    const CUtensorMap rows =
        encode_rows(&maps, d, dlogits, d.experts, padded(d.experts), kTileK / 2);
    if (!maps.status().ok()) return maps.status();
    const int n_blocks = tiles(d.experts, Config::kTileN);
    const GemmParams p{.a = {.maps = {x}, .width = static_cast<int>(d.hidden)},
                       .b = {.maps = {rows, rows}},
                       .extents = {.experts = split.parts,
                                   .rows = static_cast<int>(d.tokens),
                                   .part_rows = split.tokens,
                                   .n_blocks = n_blocks,
                                   .n_half = n_blocks}};
    const StoreParams e{.out = {partials},
                        .expert_stride = elements,
                        .row_stride = d.hidden,
                        .rows = static_cast<int>(d.experts),
                        .columns = static_cast<int>(d.hidden),
                        .f32 = true};
    if (Status status = launch<Config>(p, e, exec, "router_gemm: launch"); !status.ok())
      return status;
  }
  constexpr int kSumThreads = 256;
  launch_early(add_parts<T>, static_cast<unsigned>(tiles(elements, kSumThreads)), kSumThreads, 0,
               stream_of(exec), partials, split.parts, elements, static_cast<T*>(a.dw));
  return launched("router_gemm: sums");
}

std::string reject(const RouterGemmDesc& d, const DeviceTraits&) {
  return d.pass != GemmPass::wgrad ? reject_rows("tokens", d.tokens) : std::string();
}

template <int kTileN>
struct Family {
  template <class F>
  static Status visit(const RouterGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      using T = decltype(type);
      switch (d.pass) {
        case GemmPass::forward:
          return f(Logits<T, kTileN>{});
        case GemmPass::dgrad:
          return f(RouterDgrad<T>{});
        case GemmPass::wgrad:
          break;
      }
      return f(RouterWgrad<T, kTileN>{});
    });
  }

  static std::size_t workspace(const RouterGemmDesc& d, const Exec& exec) {
    return regions(d, exec.traits, kTileN).bytes;
  }

  template <class Config>
  static Status run(const RouterGemmDesc& d, const RouterGemmArgs& a, void* memory,
                    const Exec& exec) {
    if (d.tokens == 0 && d.pass != GemmPass::wgrad) return {};
    Exec own = exec;
    own.handoff.overlap_previous = false;  // the product needs what pad_rows writes
    const Regions at = regions(d, exec.traits, kTileN);
    const void* dlogits = a.dlogits;
    if (needs_padding(d) && d.tokens > 0) {
      constexpr int kPadThreads = 256;
      auto* const copy = reinterpret_cast<std::uint16_t*>(static_cast<char*>(memory) + at.dlogits);
      pad_rows<<<tiles(d.tokens * padded(d.experts), kPadThreads), kPadThreads, 0,
                 stream_of(exec)>>>(static_cast<const std::uint16_t*>(a.dlogits), d.tokens,
                                    static_cast<int>(d.experts),
                                    static_cast<int>(padded(d.experts)), copy);
      if (Status status = launched("router_gemm: padding"); !status.ok()) return status;
      dlogits = copy;
    }
    if constexpr (!Config::kRowsAreM) {
      auto* const partials = reinterpret_cast<float*>(static_cast<char*>(memory) + at.partials);
      return wgrad<Config>(d, a, dlogits, partials, own);
    } else if constexpr (Config::kBMajor == Major::k) {
      return forward<Config>(d, a, own);
    } else {
      return dgrad<Config>(d, a, dlogits, own);
    }
  }
};

/// Named by the experts of a tile; they make dx alike.
constexpr int kWidths[] = {256, 128, 64};

double cost(const RouterGemmDesc& d, const DeviceTraits& device, int width) {
  if (d.pass == GemmPass::wgrad) return split_of(d, device, width).cost;
  return static_cast<double>(logits_cost(device, d.tokens, d.experts, width));
}

template <int kWidth>
std::string defer_to_better(const RouterGemmDesc& d, const DeviceTraits& device) {
  if (d.pass == GemmPass::dgrad) return {};
  int best = kWidth;
  for (const int width : kWidths) {
    if (cost(d, device, width) < cost(d, device, best)) best = width;
  }
  if (best == kWidth) return {};
  return "tokens " + std::to_string(d.tokens) + ", experts " + std::to_string(d.experts) +
         ": tiles of " + std::to_string(best) + " experts take less time";
}

}  // namespace

constinit const Kernel<RouterGemmDesc> kRouterGemm256 =
    kernel_entry<Family<256>, RouterGemmDesc>({.op = "router_gemm",
                                               .name = "sm90.router_gemm.256",
                                               .reject = reject,
                                               .defer = defer_to_better<256>,
                                               .workspace = Family<256>::workspace});
constinit const Kernel<RouterGemmDesc> kRouterGemm128 =
    kernel_entry<Family<128>, RouterGemmDesc>({.op = "router_gemm",
                                               .name = "sm90.router_gemm.128",
                                               .reject = reject,
                                               .defer = defer_to_better<128>,
                                               .workspace = Family<128>::workspace});
constinit const Kernel<RouterGemmDesc> kRouterGemm64 =
    kernel_entry<Family<64>, RouterGemmDesc>({.op = "router_gemm",
                                              .name = "sm90.router_gemm.64",
                                              .reject = reject,
                                              .workspace = Family<64>::workspace});

}  // namespace sonicmoe::cuda
