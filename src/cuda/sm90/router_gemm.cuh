#pragma once

#include "cuda/router_operands.cuh"
#include "cuda/sm90/epilogue/store_logits.cuh"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/epilogue/store_transposed.cuh"
#include "cuda/sm90/kernel_file.h"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/tensor_map.h"

/// The router's three products: logits = x Wr^T + bias, dx = dlogits Wr, dWr = dlogits^T x. The
/// grouped kernel with one expert, or with one for each share of the tokens.
namespace sonicmoe::cuda {

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
/// With a bias or in fp32.
template <class T, int kTileN, class Out>
struct DirectLogits : Traits<T, ALoad::load_m, Major::k, kTileN,
                             kTileN == 256 ? Schedule::cooperative : Schedule::pingpong,
                             kDepth<kTileN>, StoreLogits<Out>> {};
/// Of an fp32 Wr: a tile has 64 experts, in three parts.
template <class T>
struct SplitLogits
    : Traits<T, ALoad::load_m, Major::k, 192, Schedule::cooperative, 5, StoreSplitLogits> {};
/// Here N is the hidden size.
template <class T>
struct RouterDgrad
    : Traits<T, ALoad::load_m, Major::mn, 128, Schedule::pingpong, 5, StoreTile<AtRows, false>> {};
template <class T, int kTileN>
struct RouterWgrad : Traits<T, ALoad::load_k, Major::mn, kTileN, Schedule::cooperative,
                            kDepth<kTileN>, StoreTransposed<false>> {};

inline std::int64_t experts_of(const RouterGemmDesc& d) {
  return experts_of(d, StoreSplitLogits::kBlock);
}

inline TokenSplit split_of(const RouterGemmDesc& d, const DeviceTraits& device, int width) {
  return token_split(device, d.tokens, d.hidden, experts_of(d), width, kTileK);
}
inline Regions regions(const RouterGemmDesc& d, const DeviceTraits& device, int width) {
  return regions(d, split_of(d, device, width).parts, StoreSplitLogits::kBlock);
}

/// Rows of all tokens, in boxes of 64 x `box`.
inline CUtensorMap encode_rows(TensorMaps* maps, const RouterGemmDesc& d, const void* base,
                               std::int64_t columns, std::int64_t stride, int box) {
  return maps->encode(
      {.base = base, .inner = columns, .outer = d.tokens, .outer_stride = stride, .box = box});
}
inline CUtensorMap encode_w(TensorMaps* maps, const RouterGemmDesc& d, const void* w, int box) {
  return maps->encode(
      {.base = w, .inner = d.hidden, .outer = experts_of(d), .outer_stride = d.hidden, .box = box});
}
inline CUtensorMap encode_dlogits(TensorMaps* maps, const RouterGemmDesc& d, const void* dlogits,
                                  int box) {
  return encode_rows(maps, d, dlogits, experts_of(d), parts_of(d) * padded(d.experts), box);
}

/// One expert owns all tokens.
inline Extents all_tokens(const RouterGemmDesc& d, int n_blocks, int k_blocks) {
  const int tokens = static_cast<int>(d.tokens);
  return {.experts = 1,
          .rows = tokens,
          .part_rows = tokens,
          .n_blocks = n_blocks,
          .k_blocks = k_blocks,
          .k_half = k_blocks};
}

inline void set_epilogue(StoreParams* e, const RouterGemmDesc& d, const RouterGemmArgs& a,
                         TensorMaps* maps) {
  *e = {.out = {a.logits}, .row_stride = d.experts, .columns = static_cast<int>(d.experts)};
  if (d.experts % 8 == 0) {
    e->boxes[0] = encode_rows(maps, d, a.logits, d.experts, d.experts, WarpTile::kRows);
  }
}
inline void set_epilogue(LogitsParams* e, const RouterGemmDesc& d, const RouterGemmArgs& a,
                         TensorMaps*) {
  *e = {.out = a.logits,
        .bias = d.bias ? a.bias : nullptr,
        .experts = static_cast<int>(d.experts),
        .small_factor = d.dtype == DType::f16 ? kDown<__half> : kDown<__nv_bfloat16>};
}

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
  add_partials<T>(d, split.parts, partials, a.dw, exec);
  return launched("router_gemm: sums");
}

template <class T, int kTileN>
struct RouterFamily {
  template <class F>
  static Status visit(const RouterGemmDesc& d, F&& f) {
    switch (d.pass) {
      case GemmPass::forward:
        if (d.f32_w) return f(SplitLogits<T>{});
        if (d.f32_logits) return f(DirectLogits<T, kTileN, float>{});
        if (d.bias) return f(DirectLogits<T, kTileN, T>{});
        return f(Logits<T, kTileN>{});
      case GemmPass::dgrad:
        return f(RouterDgrad<T>{});
      case GemmPass::wgrad:
        break;
    }
    return f(RouterWgrad<T, kTileN>{});
  }

  template <class Config>
  static Status run(const RouterGemmDesc& d, const RouterGemmArgs& a, void* memory,
                    const Exec& exec) {
    if (d.tokens == 0 && d.pass != GemmPass::wgrad) return {};
    Exec own = exec;
    own.handoff.overlap_previous = false;  // the product needs what a kernel before it writes
    const Regions at = regions(d, exec.traits, kTileN);
    Operands operands{};
    const Status status = prepare_operands<T>(d, a, at, memory, exec, &operands);
    if (!status.ok() || !multiplies(d, a)) return status;
    if constexpr (!Config::kRowsAreM) {
      return wgrad<Config>(d, a, operands,
                           reinterpret_cast<float*>(static_cast<char*>(memory) + at.partials), own);
    } else if constexpr (Config::kBMajor == Major::k) {
      return forward<Config>(d, a, operands, own);
    } else {
      return dgrad<Config>(d, a, operands, own);
    }
  }
};

/// The kernels whose tiles have kTileN experts, in a file for each storage type.
template <int kTileN>
struct RouterTiles {
  template <class F>
  static Status visit(const RouterGemmDesc& d, F&& f) {
    return visit_storage(d.dtype, [&](auto type) {
      return f(KernelFile<RouterFamily<decltype(type), kTileN>, RouterGemmDesc>{});
    });
  }

  static std::size_t workspace(const RouterGemmDesc& d, const Exec& exec) {
    return regions(d, exec.traits, kTileN).bytes;
  }
};

}  // namespace sonicmoe::cuda
