// The router's three products: logits = x Wr^T + bias, dx = dlogits Wr, dWr = dlogits^T x. The
// grouped kernel with one expert, or with one for each share of the tokens.
//
// An fp32 Wr or dlogits enters as 16-bit parts, small ones first, which stand beside each other as
// if they were of more experts. Each line is a product and its split operands:
//
//   logits   Wr (2 E, d): expert e's small part in row 2 e, its big part in row 2 e + 1
//   dx       dlogits (T, P parts): small, big.       Wr (P parts, d): Wr kDown, Wr
//            with fp32 Wr: small, big, big.          Wr: big kDown, rest, big
//   dWr      dlogits (T, 2 P): small, big
//
// P is E rounded up to a multiple of 8, with zeros.
#include "core/backends.h"
#include "core/ledger.h"
#include "cuda/launch_early.cuh"
#include "cuda/sm90/epilogue/store_logits.cuh"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/epilogue/store_transposed.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/router_split.cuh"
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
/// With a bias or in fp32. kParts: Wr is fp32.
template <class T, int kTileN, class Out, bool kParts>
struct DirectLogits : Traits<T, ALoad::load_m, Major::k, kTileN,
                             kTileN == 256 ? Schedule::cooperative : Schedule::pingpong,
                             kDepth<kTileN>, StoreLogits<Out, kParts>> {};
/// Here N is the hidden size.
template <class T>
struct RouterDgrad
    : Traits<T, ALoad::load_m, Major::mn, 128, Schedule::pingpong, 5, StoreTile<AtRows, false>> {};
template <class T, int kTileN>
struct RouterWgrad : Traits<T, ALoad::load_k, Major::mn, kTileN, Schedule::cooperative,
                            kDepth<kTileN>, StoreTransposed<false>> {};

/// How often an expert counts in the product: once for each part.
int parts_of(const RouterGemmDesc& d) {
  switch (d.pass) {
    case GemmPass::forward:
      return d.f32_w ? 2 : 1;
    case GemmPass::dgrad:
      return !d.f32_logits ? 1 : d.f32_w ? 3 : 2;
    case GemmPass::wgrad:
      break;
  }
  return d.f32_logits ? 2 : 1;
}

/// The copy engine wants rows that start at multiples of 16 bytes.
bool needs_padding(const RouterGemmDesc& d) {
  return d.pass != GemmPass::forward && parts_of(d) == 1 && d.experts % 8 != 0;
}
std::int64_t padded(std::int64_t experts) { return (experts + 7) / 8 * 8; }

/// The experts of the product, all parts counted.
std::int64_t experts_of(const RouterGemmDesc& d) {
  const int parts = parts_of(d);
  return parts * (d.pass == GemmPass::forward || parts == 1 ? d.experts : padded(d.experts));
}

TokenSplit split_of(const RouterGemmDesc& d, const DeviceTraits& device, int width) {
  return token_split(device, d.tokens, d.hidden, experts_of(d), width, kTileK);
}

struct Regions {
  std::size_t dlogits, w, partials, stretches, bytes;
};
Regions regions(const RouterGemmDesc& d, const DeviceTraits& device, int width) {
  Ledger ledger;
  Regions r{};
  const std::size_t tokens = static_cast<std::size_t>(d.tokens);
  const std::size_t experts = static_cast<std::size_t>(experts_of(d));
  const std::size_t hidden = static_cast<std::size_t>(d.hidden);
  if (needs_padding(d)) {
    r.dlogits = ledger.book("dlogits", tokens * static_cast<std::size_t>(padded(d.experts)) * 2);
  } else if (parts_of(d) > 1) {
    if (d.pass != GemmPass::forward) r.dlogits = ledger.book("dlogits", tokens * experts * 2);
    if (d.pass != GemmPass::wgrad) r.w = ledger.book("w", experts * hidden * 2);
  }
  if (d.pass == GemmPass::wgrad) {
    const TokenSplit split = split_of(d, device, width);
    r.partials =
        ledger.book("partials", static_cast<std::size_t>(split.parts) * experts * hidden * 4);
    if (d.bias) {
      const auto count = static_cast<std::size_t>(stretches_of(d.tokens).count);
      r.stretches = ledger.book("stretches", count * static_cast<std::size_t>(d.experts) * 4);
    }
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

/// The same with the sums of small parts before those of the big ones: `elements` of each, of which
/// the first `wanted` are of experts.
template <class T>
__global__ void add_small_and_big(const float* sums, int count, std::int64_t elements,
                                  std::int64_t wanted, float small_factor, T* out) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  wait_for_previous();
  if (i >= wanted) return;
  float small = 0.0f, big = 0.0f;
  for (int split = 0; split < count; ++split) {
    small += sums[2 * split * elements + i];
    big += sums[(2 * split + 1) * elements + i];
  }
  out[i] = from_float<T>(math::fma(small, small_factor, big));
}

/// Rows of all tokens, in boxes of 64 x `box`.
CUtensorMap encode_rows(TensorMaps* maps, const RouterGemmDesc& d, const void* base,
                        std::int64_t columns, std::int64_t stride, int box) {
  return maps->encode(
      {.base = base, .inner = columns, .outer = d.tokens, .outer_stride = stride, .box = box});
}
CUtensorMap encode_w(TensorMaps* maps, const RouterGemmDesc& d, const void* w, int box) {
  return maps->encode(
      {.base = w, .inner = d.hidden, .outer = experts_of(d), .outer_stride = d.hidden, .box = box});
}
CUtensorMap encode_dlogits(TensorMaps* maps, const RouterGemmDesc& d, const void* dlogits,
                           int box) {
  return encode_rows(maps, d, dlogits, experts_of(d), parts_of(d) * padded(d.experts), box);
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

void set_epilogue(StoreParams* e, const RouterGemmDesc& d, const RouterGemmArgs& a,
                  TensorMaps* maps) {
  *e = {.out = {a.logits}, .row_stride = d.experts, .columns = static_cast<int>(d.experts)};
  if (d.experts % 8 == 0) {
    e->boxes[0] = encode_rows(maps, d, a.logits, d.experts, d.experts, WarpTile::kRows);
  }
}
void set_epilogue(LogitsParams* e, const RouterGemmDesc& d, const RouterGemmArgs& a, TensorMaps*) {
  *e = {.out = a.logits,
        .bias = d.bias ? a.bias : nullptr,
        .experts = static_cast<int>(d.experts),
        .small_factor = d.dtype == DType::f16 ? kDown<__half> : kDown<__nv_bfloat16>};
}

/// What a product reads, where the workspace has a copy of it.
struct Operands {
  const void *w, *dlogits;
};

template <class Config>
Status forward(const RouterGemmDesc& d, const RouterGemmArgs& a, const Operands& operands,
               const Exec& exec) {
  TensorMaps maps(d.dtype);
  const CUtensorMap x = encode_rows(&maps, d, a.x, d.hidden, d.hidden, kTileM);
  const CUtensorMap w = encode_w(&maps, d, operands.w, Config::kTileN / 2);
  typename Config::Epilogue::Params e{};
  set_epilogue(&e, d, a, &maps);
  if (!maps.status().ok()) return maps.status();
  const GemmParams p{
      .a = {.maps = {x, x}},
      .b = {.maps = {w, w}},
      .extents = all_tokens(d, tiles(experts_of(d), Config::kTileN), tiles(d.hidden, kTileK))};
  return launch<Config>(p, e, exec, "router_gemm: launch");
}

template <class Config>
Status dgrad(const RouterGemmDesc& d, const RouterGemmArgs& a, const Operands& operands,
             const Exec& exec) {
  TensorMaps maps(d.dtype);
  const CUtensorMap rows = encode_dlogits(&maps, d, operands.dlogits, kTileM);
  const CUtensorMap w = encode_w(&maps, d, operands.w, kTileK / 2);
  const StoreParams e{.boxes = {encode_rows(&maps, d, a.dx, d.hidden, d.hidden, WarpTile::kRows)},
                      .out = {a.dx},
                      .row_stride = d.hidden,
                      .columns = static_cast<int>(d.hidden)};
  if (!maps.status().ok()) return maps.status();
  const GemmParams p{
      .a = {.maps = {rows, rows}},
      .b = {.maps = {w, w}, .last_chunk = last_chunk(d.hidden)},
      .extents = all_tokens(d, tiles(d.hidden, Config::kTileN), tiles(experts_of(d), kTileK))};
  return launch<Config>(p, e, exec, "router_gemm: launch");
}

template <class Config>
Status wgrad(const RouterGemmDesc& d, const RouterGemmArgs& a, const Operands& operands,
             float* partials, const Exec& exec) {
  using T = typename Config::T;
  const TokenSplit split = split_of(d, exec.traits, Config::kTileN);
  const std::int64_t elements = d.experts * d.hidden;
  if (d.tokens > 0) {
    TensorMaps maps(d.dtype);
    const CUtensorMap x = encode_rows(&maps, d, a.x, d.hidden, d.hidden, kTileK);
    const CUtensorMap rows = encode_dlogits(&maps, d, operands.dlogits, kTileK / 2);
    if (!maps.status().ok()) return maps.status();
    const int n_blocks = tiles(experts_of(d), Config::kTileN);
    const GemmParams p{.a = {.maps = {x}, .width = static_cast<int>(d.hidden)},
                       .b = {.maps = {rows, rows}},
                       .extents = {.experts = split.parts,
                                   .rows = static_cast<int>(d.tokens),
                                   .part_rows = split.tokens,
                                   .n_blocks = n_blocks,
                                   .n_half = n_blocks}};
    const StoreParams e{.out = {partials},
                        .expert_stride = experts_of(d) * d.hidden,
                        .row_stride = d.hidden,
                        .rows = static_cast<int>(experts_of(d)),
                        .columns = static_cast<int>(d.hidden),
                        .f32 = true};
    if (Status status = launch<Config>(p, e, exec, "router_gemm: launch"); !status.ok())
      return status;
  }
  constexpr int kSumThreads = 256;
  const auto blocks = static_cast<unsigned>(tiles(elements, kSumThreads));
  const auto add_both = [&](auto* dw) {
    using Out = std::remove_pointer_t<decltype(dw)>;
    launch_early(add_small_and_big<Out>, blocks, kSumThreads, 0, stream_of(exec), partials,
                 split.parts, padded(d.experts) * d.hidden, elements, kDown<T>, dw);
  };
  if (d.f32_w) {
    add_both(static_cast<float*>(a.dw));
  } else if (d.f32_logits) {
    add_both(static_cast<T*>(a.dw));
  } else {
    launch_early(add_parts<T>, blocks, kSumThreads, 0, stream_of(exec), partials, split.parts,
                 elements, static_cast<T*>(a.dw));
  }
  return launched("router_gemm: sums");
}

/// The columns of dlogits, padded and with all parts beside each other.
SplitShape beside(const RouterGemmDesc& d) {
  const std::int64_t columns = padded(d.experts);
  return {.rows = d.tokens,
          .columns = static_cast<int>(d.experts),
          .split_rows = d.tokens,
          .split_columns = static_cast<int>(columns),
          .row_stride = parts_of(d) * columns,
          .part_stride = columns};
}
/// The rows of Wr in parts: the parts of each row together, or the rows of each part, padded.
SplitShape stacked(const RouterGemmDesc& d, bool by_row) {
  const std::int64_t rows = by_row ? d.experts : padded(d.experts);
  return {.rows = d.experts,
          .columns = static_cast<int>(d.hidden),
          .split_rows = rows,
          .split_columns = static_cast<int>(d.hidden),
          .row_stride = by_row ? parts_of(d) * d.hidden : d.hidden,
          .part_stride = by_row ? d.hidden : rows * d.hidden};
}

/// Copies operands into the workspace in parts, where there is more than one.
template <class T>
Operands split_operands(const RouterGemmDesc& d, const RouterGemmArgs& a, T* w, T* dlogits,
                        const Exec& exec) {
  const auto* const f32_w = static_cast<const float*>(a.w);
  const auto* const f32_dlogits = static_cast<const float*>(a.dlogits);
  switch (d.pass) {
    case GemmPass::forward:
      launch_split<T, Part::small, Part::big>(f32_w, stacked(d, true), w, exec);
      break;
    case GemmPass::dgrad:
      if (d.f32_w) {
        launch_split<T, Part::small, Part::big, Part::big>(f32_dlogits, beside(d), dlogits, exec);
        launch_split<T, Part::big_down, Part::rest, Part::big>(f32_w, stacked(d, false), w, exec);
      } else {
        launch_split<T, Part::small, Part::big>(f32_dlogits, beside(d), dlogits, exec);
        launch_split<T, Part::big_down, Part::big>(static_cast<const T*>(a.w), stacked(d, false), w,
                                                   exec);
      }
      break;
    case GemmPass::wgrad:
      launch_split<T, Part::small, Part::big>(f32_dlogits, beside(d), dlogits, exec);
      break;
  }
  return {w, dlogits};
}

/// dbias = the sums of the columns of dlogits.
template <class T>
void sum_dlogits(const RouterGemmDesc& d, const RouterGemmArgs& a, float* stretches,
                 const Exec& exec) {
  if (d.f32_logits) {
    launch_column_sums(static_cast<const float*>(a.dlogits), d.tokens, d.experts, stretches,
                       a.dbias, exec);
  } else {
    launch_column_sums(static_cast<const T*>(a.dlogits), d.tokens, d.experts, stretches, a.dbias,
                       exec);
  }
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
          if (d.f32_w) return f(DirectLogits<T, kTileN, float, true>{});
          if (d.f32_logits) return f(DirectLogits<T, kTileN, float, false>{});
          if (d.bias) return f(DirectLogits<T, kTileN, T, false>{});
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
    using T = typename Config::T;
    Exec own = exec;
    own.handoff.overlap_previous = false;  // the product needs what a kernel before it writes
    const Regions at = regions(d, exec.traits, kTileN);
    const auto region = [&](std::size_t offset) { return static_cast<char*>(memory) + offset; };
    if (d.pass == GemmPass::wgrad && d.bias && a.dbias != nullptr) {
      sum_dlogits<T>(d, a, reinterpret_cast<float*>(region(at.stretches)), exec);
      if (Status status = launched("router_gemm: bias"); !status.ok()) return status;
      if (a.dw == nullptr) return {};
    }
    Operands operands{a.w, a.dlogits};
    if (needs_padding(d) && d.tokens > 0) {
      constexpr int kPadThreads = 256;
      auto* const copy = reinterpret_cast<std::uint16_t*>(region(at.dlogits));
      pad_rows<<<tiles(d.tokens * padded(d.experts), kPadThreads), kPadThreads, 0,
                 stream_of(exec)>>>(static_cast<const std::uint16_t*>(a.dlogits), d.tokens,
                                    static_cast<int>(d.experts),
                                    static_cast<int>(padded(d.experts)), copy);
      if (Status status = launched("router_gemm: padding"); !status.ok()) return status;
      operands.dlogits = copy;
    } else if (parts_of(d) > 1 && d.tokens > 0) {
      operands = split_operands(d, a, reinterpret_cast<T*>(region(at.w)),
                                reinterpret_cast<T*>(region(at.dlogits)), exec);
      if (Status status = launched("router_gemm: parts"); !status.ok()) return status;
    }
    if constexpr (!Config::kRowsAreM) {
      return wgrad<Config>(d, a, operands, reinterpret_cast<float*>(region(at.partials)), own);
    } else if constexpr (Config::kBMajor == Major::k) {
      return forward<Config>(d, a, operands, own);
    } else {
      return dgrad<Config>(d, a, operands, own);
    }
  }
};

/// Named by the experts of a tile; they make dx alike.
constexpr int kWidths[] = {256, 128, 64};

double cost(const RouterGemmDesc& d, const DeviceTraits& device, int width) {
  if (d.pass == GemmPass::wgrad) return split_of(d, device, width).cost;
  return static_cast<double>(logits_cost(device, d.tokens, experts_of(d), width));
}

template <int kWidth>
std::string defer_to_better(const RouterGemmDesc& d, const DeviceTraits& device) {
  if (d.pass == GemmPass::dgrad) return {};
  int best = kWidth;
  for (const int width : kWidths) {
    if (cost(d, device, width) < cost(d, device, best)) best = width;
  }
  if (best == kWidth) return {};
  return "tokens " + std::to_string(d.tokens) + ", experts " + std::to_string(experts_of(d)) +
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
