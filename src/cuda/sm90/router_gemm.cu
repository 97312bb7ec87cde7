// The router's three products: logits = x Wr^T, dx = dlogits Wr, dWr = dlogits^T x. The grouped
// kernel with one expert, or with one for each part of the tokens.
#include <algorithm>

#include "core/backends.h"
#include "core/ledger.h"
#include "cuda/launch_early.cuh"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/epilogue/store_transposed.cuh"
#include "cuda/sm90/launch.cuh"

namespace sonicmoe::cuda {
namespace {

/// Experts are N of logits and dWr. Reading x is what both take time for, so that a tile has room
/// for as many experts as there are, where it can, and little more.
template <int kTileN>
constexpr int kDepth = kTileN == 64    ? 8
                       : kTileN == 128 ? 6
                                       : 4;  // stages, all that fit
template <class T, int kTileN>
struct Logits : Traits<T, ALoad::load_m, Major::k, kTileN,
                       kTileN == 256 ? Schedule::cooperative : Schedule::pingpong, kDepth<kTileN>,
                       StoreTile<AtRows, false>> {};
template <class T, int kTileN>
struct RouterWgrad : Traits<T, ALoad::load_k, Major::mn, kTileN, Schedule::cooperative,
                            kDepth<kTileN>, StoreTransposed<false>> {};
/// Here N is the hidden size.
template <class T>
struct RouterDgrad
    : Traits<T, ALoad::load_m, Major::mn, 128, Schedule::pingpong, 5, StoreTile<AtRows, false>> {};

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

GemmParams all_tokens(const RouterGemmDesc& d) {
  GemmParams p{};
  p.experts = 1;
  p.rows = p.part = static_cast<int>(d.tokens);
  return p;
}

template <class Config>
Status forward(const RouterGemmDesc& d, const RouterGemmArgs& a, const Exec& exec) {
  TensorMaps maps(d.dtype);
  GemmParams p = all_tokens(d);
  p.a_maps[0] = p.a_maps[1] = maps.encode({a.x, d.hidden, d.tokens, 1, d.hidden, 0, kTileM});
  p.b_maps[0] = p.b_maps[1] =
      maps.encode({a.w, d.hidden, d.experts, 1, d.hidden, 0, Config::kTileN / 2});
  StoreParams e{};
  e.boxed = d.experts % 8 == 0;
  if (e.boxed) {
    e.boxes[0] = maps.encode({a.logits, d.experts, d.tokens, 1, d.experts, 0, WarpTile::kRows});
  }
  if (!maps.status().ok()) return maps.status();
  p.n_blocks = tiles(d.experts, Config::kTileN);
  p.k_blocks = p.k_half = tiles(d.hidden, kTileK);
  e.out[0] = a.logits;
  e.row_stride = d.experts;
  e.columns = static_cast<int>(d.experts);
  return launch<Config>(p, e, exec, "router_gemm: launch");
}

template <class Config>
Status dgrad(const RouterGemmDesc& d, const RouterGemmArgs& a, const void* dlogits,
             const Exec& exec) {
  TensorMaps maps(d.dtype);
  GemmParams p = all_tokens(d);
  p.a_maps[0] = p.a_maps[1] =
      maps.encode({dlogits, d.experts, d.tokens, 1, padded(d.experts), 0, kTileM});
  p.b_maps[0] = p.b_maps[1] = maps.encode({a.w, d.hidden, d.experts, 1, d.hidden, 0, kTileK / 2});
  StoreParams e{};
  e.boxes[0] = maps.encode({a.dx, d.hidden, d.tokens, 1, d.hidden, 0, WarpTile::kRows});
  e.boxed = true;
  if (!maps.status().ok()) return maps.status();
  p.n_blocks = tiles(d.hidden, Config::kTileN);
  p.n_last_chunk = last_chunk(d.hidden);
  p.k_blocks = p.k_half = tiles(d.experts, kTileK);
  e.out[0] = a.dx;
  e.row_stride = d.hidden;
  e.columns = static_cast<int>(d.hidden);
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
    GemmParams p{};
    p.a_maps[0] = maps.encode({a.x, d.hidden, d.tokens, 1, d.hidden, 0, kTileK});
    p.b_maps[0] = p.b_maps[1] =
        maps.encode({dlogits, d.experts, d.tokens, 1, padded(d.experts), 0, kTileK / 2});
    if (!maps.status().ok()) return maps.status();
    p.gathered_width = static_cast<int>(d.hidden);
    p.experts = split.parts;
    p.rows = static_cast<int>(d.tokens);
    p.part = split.tokens;
    p.n_blocks = p.n_half = tiles(d.experts, Config::kTileN);
    StoreParams e{};
    e.out[0] = partials;
    e.expert_stride = elements;
    e.row_stride = d.hidden;
    e.rows = static_cast<int>(d.experts);
    e.columns = static_cast<int>(d.hidden);
    e.f32 = true;
    if (Status status = launch<Config>(p, e, exec, "router_gemm: launch"); !status.ok())
      return status;
  }
  constexpr int kThreads = 256;
  launch_early(add_parts<T>, static_cast<unsigned>(tiles(elements, kThreads)), kThreads, 0,
               stream_of(exec), partials, split.parts, elements, static_cast<T*>(a.dw));
  return launched("router_gemm: sums");
}

std::string reject(const RouterGemmDesc& d, const DeviceTraits&) {
  return d.pass != GemmPass::wgrad ? reject_rows("tokens", d.tokens) : std::string();
}

template <int kTileN>
struct Entry {
  static std::size_t workspace(const RouterGemmDesc& d, const Exec& exec) {
    return regions(d, exec.traits, kTileN).bytes;
  }

  static Status prepare(const RouterGemmDesc& d, const Exec&) {
    return visit_storage(d.dtype, [&](auto type) {
      using T = decltype(type);
      switch (d.pass) {
        case GemmPass::forward:
          return cuda::prepare<Logits<T, kTileN>>();
        case GemmPass::dgrad:
          return cuda::prepare<RouterDgrad<T>>();
        case GemmPass::wgrad:
          break;
      }
      return cuda::prepare<RouterWgrad<T, kTileN>>();
    });
  }

  static Status run(const RouterGemmDesc& d, const RouterGemmArgs& a, void* memory,
                    const Exec& exec) noexcept {
    if (d.tokens == 0 && d.pass != GemmPass::wgrad) return {};
    const Regions at = regions(d, exec.traits, kTileN);
    const void* dlogits = a.dlogits;
    if (needs_padding(d) && d.tokens > 0) {
      constexpr int kThreads = 256;
      auto* const copy = reinterpret_cast<std::uint16_t*>(static_cast<char*>(memory) + at.dlogits);
      pad_rows<<<tiles(d.tokens * padded(d.experts), kThreads), kThreads, 0, stream_of(exec)>>>(
          static_cast<const std::uint16_t*>(a.dlogits), d.tokens, static_cast<int>(d.experts),
          static_cast<int>(padded(d.experts)), copy);
      if (Status status = launched("router_gemm: padding"); !status.ok()) return status;
      dlogits = copy;
    }
    return visit_storage(d.dtype, [&](auto type) {
      using T = decltype(type);
      switch (d.pass) {
        case GemmPass::forward:
          return forward<Logits<T, kTileN>>(d, a, exec);
        case GemmPass::dgrad:
          return dgrad<RouterDgrad<T>>(d, a, dlogits, exec);
        case GemmPass::wgrad:
          break;
      }
      return wgrad<RouterWgrad<T, kTileN>>(
          d, a, dlogits, reinterpret_cast<float*>(static_cast<char*>(memory) + at.partials), exec);
    });
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

const Kernel<RouterGemmDesc> kRouterGemm256 = {
    .op = "router_gemm",
    .name = "sm90.router_gemm.256",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject,
    .defer = defer_to_better<256>,
    .workspace = Entry<256>::workspace,
    .prepare = Entry<256>::prepare,
    .run = Entry<256>::run,
};
const Kernel<RouterGemmDesc> kRouterGemm128 = {
    .op = "router_gemm",
    .name = "sm90.router_gemm.128",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject,
    .defer = defer_to_better<128>,
    .workspace = Entry<128>::workspace,
    .prepare = Entry<128>::prepare,
    .run = Entry<128>::run,
};
const Kernel<RouterGemmDesc> kRouterGemm64 = {
    .op = "router_gemm",
    .name = "sm90.router_gemm.64",
    .arch = 90,
    .dtypes = kStorageTypes,
    .reject = reject,
    .workspace = Entry<64>::workspace,
    .prepare = Entry<64>::prepare,
    .run = Entry<64>::run,
};

}  // namespace sonicmoe::cuda
