#pragma once

#include "core/kernel.h"
#include "core/ledger.h"
#include "cuda/launch_early.cuh"
#include "cuda/router_split.cuh"
#include "cuda/runtime.h"

/// What the router's three products share, whatever kernel multiplies: their operands in parts, and
/// what comes after the product.
///
/// An fp32 Wr or dlogits enters as 16-bit parts, small ones first, which stand beside each other as
/// if they were of more experts. Each line is a product and its split operands:
///
///   logits   Wr, 16 experts at a time: tiny (16, d), small (16, d), big (16, d)
///   dx       dlogits (T, P parts): small, big.       Wr (P parts, d): Wr kDown, Wr
///            with fp32 Wr: small, big, big.          Wr: big kDown, rest, big
///   dWr      dlogits (T, 2 P): small, big
///
/// P is E rounded up to a multiple of 8, with zeros.
///
/// Functions that launch are static, as files are compiled for different architectures: a copy of
/// another file would launch a kernel that lacks the device's.
namespace sonicmoe::cuda {

/// How often an expert counts in the product: once for each part.
inline int parts_of(const RouterGemmDesc& d) {
  switch (d.pass) {
    case GemmPass::forward:
      return d.f32_w ? 3 : 1;
    case GemmPass::dgrad:
      return !d.f32_logits ? 1 : d.f32_w ? 3 : 2;
    case GemmPass::wgrad:
      break;
  }
  return d.f32_logits ? 2 : 1;
}

/// Products load rows that start at multiples of 16 bytes.
inline bool needs_padding(const RouterGemmDesc& d) {
  return d.pass != GemmPass::forward && parts_of(d) == 1 && d.experts % 8 != 0;
}
inline std::int64_t padded(std::int64_t experts) { return (experts + 7) / 8 * 8; }

/// The experts of the product, all parts counted. `block`: the rows that 16 experts take of Wr in
/// parts for logits, which may be more than their parts.
inline std::int64_t experts_of(const RouterGemmDesc& d, int block) {
  const int parts = parts_of(d);
  if (parts == 1) return d.experts;
  return d.pass == GemmPass::forward ? (d.experts + 15) / 16 * block : parts * padded(d.experts);
}

/// Where the workspace has what. dWr is the sum of `token_parts` products; `block` as above.
struct Regions {
  std::size_t dlogits, w, partials, stretches, bytes;
  int block;
};
inline Regions regions(const RouterGemmDesc& d, int token_parts, int block) {
  Ledger ledger;
  Regions r{.block = block};
  const std::size_t tokens = static_cast<std::size_t>(d.tokens);
  const std::size_t experts = static_cast<std::size_t>(experts_of(d, block));
  const std::size_t hidden = static_cast<std::size_t>(d.hidden);
  if (needs_padding(d)) {
    r.dlogits = ledger.book("dlogits", tokens * static_cast<std::size_t>(padded(d.experts)) * 2);
  } else if (parts_of(d) > 1) {
    if (d.pass != GemmPass::forward) r.dlogits = ledger.book("dlogits", tokens * experts * 2);
    if (d.pass != GemmPass::wgrad) r.w = ledger.book("w", experts * hidden * 2);
  }
  if (d.pass == GemmPass::wgrad) {
    r.partials =
        ledger.book("partials", static_cast<std::size_t>(token_parts) * experts * hidden * 4);
    if (d.bias) {
      const auto count = static_cast<std::size_t>(stretches_of(d.tokens).count);
      r.stretches = ledger.book("stretches", count * static_cast<std::size_t>(d.experts) * 4);
    }
  }
  r.bytes = ledger.size();
  return r;
}

template <class T>
__global__ void pad_rows(const T* from, std::int64_t rows, int width, int padded_width, T* to) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t row = i / padded_width;
  const int column = static_cast<int>(i % padded_width);
  if (row >= rows) return;
  to[i] = column < width ? from[row * width + column] : T{};
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

/// What a product reads, where the workspace has a copy of it.
struct Operands {
  const void *w, *dlogits;
};

/// The columns of dlogits, padded and with all parts beside each other.
inline SplitShape beside(const RouterGemmDesc& d) {
  const std::int64_t columns = padded(d.experts);
  return {.rows = d.tokens,
          .columns = static_cast<int>(d.experts),
          .split_rows = d.tokens,
          .split_columns = static_cast<int>(columns),
          .row_stride = parts_of(d) * columns,
          .part_stride = columns};
}
/// The rows of each part of Wr, padded.
inline SplitShape stacked(const RouterGemmDesc& d) {
  const std::int64_t rows = padded(d.experts);
  return {.rows = d.experts,
          .columns = static_cast<int>(d.hidden),
          .split_rows = rows,
          .split_columns = static_cast<int>(d.hidden),
          .row_stride = d.hidden,
          .part_stride = rows * d.hidden};
}
/// The rows of all parts of 16 experts, then those of the next. Other rows hold anything: only
/// columns that nobody stores come from them.
inline SplitShape in_blocks(const RouterGemmDesc& d, int block) {
  return {.rows = d.experts,
          .columns = static_cast<int>(d.hidden),
          .split_rows = d.experts,
          .split_columns = static_cast<int>(d.hidden),
          .row_stride = d.hidden,
          .part_stride = 16 * d.hidden,
          .block_stride = block * d.hidden};
}

/// Copies operands into the workspace in parts, where there is more than one.
template <class T>
static Operands split_operands(const RouterGemmDesc& d, const RouterGemmArgs& a, int block, T* w,
                               T* dlogits, const Exec& exec) {
  const auto* const f32_w = static_cast<const float*>(a.w);
  const auto* const f32_dlogits = static_cast<const float*>(a.dlogits);
  switch (d.pass) {
    case GemmPass::forward:
      launch_split<T, Part::tiny, Part::small, Part::big>(f32_w, in_blocks(d, block), w, exec);
      break;
    case GemmPass::dgrad:
      if (d.f32_w) {
        launch_split<T, Part::small, Part::big, Part::big>(f32_dlogits, beside(d), dlogits, exec);
        launch_split<T, Part::big_down, Part::rest, Part::big>(f32_w, stacked(d), w, exec);
      } else {
        launch_split<T, Part::small, Part::big>(f32_dlogits, beside(d), dlogits, exec);
        launch_split<T, Part::big_down, Part::big>(static_cast<const T*>(a.w), stacked(d), w, exec);
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
static void sum_dlogits(const RouterGemmDesc& d, const RouterGemmArgs& a, float* stretches,
                        const Exec& exec) {
  if (d.f32_logits) {
    launch_column_sums(static_cast<const float*>(a.dlogits), d.tokens, d.experts, stretches,
                       a.dbias, exec);
  } else {
    launch_column_sums(static_cast<const T*>(a.dlogits), d.tokens, d.experts, stretches, a.dbias,
                       exec);
  }
}

/// dWr from the products of `token_parts` parts of the tokens.
template <class T>
static void add_partials(const RouterGemmDesc& d, int token_parts, const float* partials, void* dw,
                         const Exec& exec) {
  const std::int64_t elements = d.experts * d.hidden;
  constexpr int kSumThreads = 256;
  const auto blocks = blocks_for(elements, kSumThreads);
  const auto add_both = [&](auto* out) {
    using Out = std::remove_pointer_t<decltype(out)>;
    launch_early(add_small_and_big<Out>, blocks, kSumThreads, 0, exec, partials, token_parts,
                 padded(d.experts) * d.hidden, elements, kDown<T>, out);
  };
  if (d.f32_w) {
    add_both(static_cast<float*>(dw));
  } else if (d.f32_logits) {
    add_both(static_cast<T*>(dw));
  } else {
    launch_early(add_parts<T>, blocks, kSumThreads, 0, exec, partials, token_parts, elements,
                 static_cast<T*>(dw));
  }
}

/// Is there a product? dWr may be unwanted beside dbias.
inline bool multiplies(const RouterGemmDesc& d, const RouterGemmArgs& a) {
  return d.pass != GemmPass::wgrad || a.dw != nullptr;
}

/// What comes before a product: dbias, and copies of operands where a product cannot read them as
/// they are.
template <class T>
static Status prepare_operands(const RouterGemmDesc& d, const RouterGemmArgs& a, const Regions& at,
                               void* memory, const Exec& exec, Operands* operands) {
  const auto region = [&](std::size_t offset) { return static_cast<char*>(memory) + offset; };
  *operands = {a.w, a.dlogits};
  if (d.pass == GemmPass::wgrad && d.bias && a.dbias != nullptr) {
    sum_dlogits<T>(d, a, reinterpret_cast<float*>(region(at.stretches)), exec);
    if (Status status = launched("router_gemm: bias"); !status.ok()) return status;
    if (a.dw == nullptr) return {};
  }
  if (needs_padding(d) && d.tokens > 0) {
    constexpr int kPadThreads = 256;
    auto* const copy = reinterpret_cast<std::uint16_t*>(region(at.dlogits));
    pad_rows<<<blocks_for(d.tokens * padded(d.experts), kPadThreads), kPadThreads, 0,
               stream_of(exec)>>>(static_cast<const std::uint16_t*>(a.dlogits), d.tokens,
                                  static_cast<int>(d.experts), static_cast<int>(padded(d.experts)),
                                  copy);
    if (Status status = launched("router_gemm: padding"); !status.ok()) return status;
    operands->dlogits = copy;
  } else if (parts_of(d) > 1 && d.tokens > 0) {
    *operands = split_operands(d, a, at.block, reinterpret_cast<T*>(region(at.w)),
                               reinterpret_cast<T*>(region(at.dlogits)), exec);
    if (Status status = launched("router_gemm: parts"); !status.ok()) return status;
  }
  return {};
}

}  // namespace sonicmoe::cuda
