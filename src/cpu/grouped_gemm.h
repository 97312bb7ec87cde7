#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "core/kernel.h"
#include "core/segments.h"
#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "math/activation.h"
#include "math/convert.h"

/// Shared by the grouped GEMMs: views of W1 in its three layouts, scratch, rejection, dispatch.
namespace sonicmoe::cpu {

using math::Bf16;
using math::from_float;
using math::to_float;

/// Gate and up rows of one expert in a tensor laid out like W1 (b1 has width 1). In each layout
/// both are (n, width) matrices with a row stride, so callers need not know the layout.
template <class T>
struct W1View {
  T* gate;
  T* up;                ///< null without a gate
  std::int64_t stride;  ///< elements from row to row, of gate and of up
};

template <class T, class Desc>
W1View<T> w1_view(const Desc& d, T* w1, T* w1_up, std::int64_t expert, std::int64_t width) {
  const std::int64_t n = d.intermediate;
  if (!is_glu(d.activation)) return {w1 + expert * n * width, nullptr, width};
  switch (d.w1_layout) {
    case W1Layout::interleaved: {
      T* base = w1 + expert * 2 * n * width;
      return {base, base + width, 2 * width};
    }
    case W1Layout::concatenated: {
      T* base = w1 + expert * 2 * n * width;
      return {base, base + n * width, width};
    }
    case W1Layout::separate:
      break;
  }
  return {w1 + expert * n * width, w1_up + expert * n * width, width};
}

/// The grouped rows from `begin` on, `width` elements each: rows of x or dO by token id, or
/// contiguous. Columns start at `base`.
template <class T, class Desc, class Args>
Rows<T> source_rows(const Desc& d, const Args& a, const T* base, std::int64_t width,
                    std::int64_t begin) {
  if (d.gathers()) return {base, width, a.row_tokens + begin};
  return {base + begin * width, width};
}

/// One thread's part of the workspace: the engine's packing buffers, then floats for tiles.
template <class Engine>
struct Scratch {
  static constexpr std::size_t kAlignment = 256;
  static std::size_t engine_bytes() {
    return (Engine::scratch_bytes() + kAlignment - 1) / kAlignment * kAlignment;
  }
  static std::size_t bytes_per_thread(std::size_t floats) {
    return engine_bytes() + (floats * 4 + kAlignment - 1) / kAlignment * kAlignment;
  }
  Scratch(void* workspace, int thread, std::size_t floats)
      : engine(static_cast<char*>(workspace) + thread * bytes_per_thread(floats)),
        tile(reinterpret_cast<float*>(static_cast<char*>(workspace) +
                                      thread * bytes_per_thread(floats) + engine_bytes())) {}
  Engine engine;
  float* tile;
};

template <class Engine>
constexpr DType kDTypeOf =
    std::is_same_v<typename Engine::Storage, float> ? DType::f32 : DType::bf16;

/// The reason why this processor cannot run all of these engines, or empty.
template <class... Engines>
std::string reject_processor() {
  for (const char* missing : {Engines::missing()...}) {
    if (missing == nullptr) continue;
    return std::string("device: got a processor without ") + missing + ", allowed: one with it";
  }
  return {};
}

/// Calls f.template operator()<Engine>() with the engine whose storage type is `dtype`, one of the
/// kernel's `dtypes`. An sgemm kernel has an engine for each storage type, an AVX-512 kernel has
/// one engine.
template <class... Engines, class F>
void visit_engine(DType dtype, F&& f) {
  ((dtype == kDTypeOf<Engines> ? f.template operator()<Engines>() : void()), ...);
}

/// The kernel list's entry for one grouped GEMM. Op<Engine> has `floats(desc)`, the floats of
/// scratch a thread, and `run(desc, args, workspace, threads)`.
template <template <class> class Op, class... Engines>
struct GroupedEntry {
  static std::string reject(const GroupedGemmDesc&, const DeviceTraits&) {
    return reject_processor<Engines...>();
  }
  static std::size_t workspace(const GroupedGemmDesc& desc, const Exec& exec) {
    std::size_t each = 0;
    visit_engine<Engines...>(desc.dtype, [&]<class Engine>() {
      each = Scratch<Engine>::bytes_per_thread(Op<Engine>::floats(desc));
    });
    return each * static_cast<std::size_t>(exec.threads);
  }
  static Status run(const GroupedGemmDesc& desc, const GroupedGemmArgs& args, void* workspace,
                    const Exec& exec) noexcept {
    visit_engine<Engines...>(
        desc.dtype, [&]<class Engine>() { Op<Engine>::run(desc, args, workspace, exec.threads); });
    return {};
  }
  static constexpr Kernel<GroupedGemmDesc> kernel(const char* op, const char* name) {
    return {.op = op,
            .name = name,
            .dtypes = {kDTypeOf<Engines>...},
            .reject = reject,
            .workspace = workspace,
            .run = run};
  }
};

/// Defines the three entries of one grouped GEMM: k##Op, k##Op##Avx512, k##Op##Avx512Bf16.
#define SONICMOE_CPU_GROUPED_GEMM(Op, op_text)                                                  \
  const Kernel<GroupedGemmDesc> k##Op =                                                         \
      GroupedEntry<Op, SgemmEngine<float>, SgemmEngine<Bf16>>::kernel(op_text, "cpu." op_text); \
  const Kernel<GroupedGemmDesc> k##Op##Avx512 =                                                 \
      GroupedEntry<Op, Avx512Engine<float>>::kernel(op_text, "cpu-avx512." op_text);            \
  const Kernel<GroupedGemmDesc> k##Op##Avx512Bf16 =                                             \
      GroupedEntry<Op, Avx512Engine<Bf16>>::kernel(op_text, "cpu-avx512bf16." op_text)

template <class T>
inline void store(const float* from, T* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = from_float<T>(from[i]);
}

template <class T>
inline void add(const float* from, T* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = from_float<T>(to_float(to[i]) + from[i]);
}

/// Calls f(Stored{}) with the type of the weight gradients, T or float.
template <class T, class F>
void visit_grad_type(const GroupedGemmDesc& d, F&& f) {
  if (d.f32_weight_grads) {
    f(float{});
  } else {
    f(T{});
  }
}

/// Writes a row of a weight gradient, or adds to it if the descriptor says so.
template <class T>
inline void store_grad(const GroupedGemmDesc& d, const float* from, T* to, std::int64_t count) {
  if (d.accumulate_weight_grads) {
    add(from, to, count);
  } else {
    store(from, to, count);
  }
}

}  // namespace sonicmoe::cpu
