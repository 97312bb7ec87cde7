#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "core/kernel.h"
#include "core/segments.h"
#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "math/activation.h"
#include "math/convert.h"

/// Shared by the grouped GEMMs: weights in every layout, scratch, rejection, dispatch.
namespace sonicmoe::cpu {

using math::Bf16;
using math::from_float;
using math::to_float;

/// A matrix of one expert's weights or biases: element (i, j) is base[i * row + j * column].
template <class T>
struct Weights {
  T* base;
  std::int64_t row, column;  ///< steps; one of them is 1

  Weights from(std::int64_t i, std::int64_t j) const {
    return {base + i * row + j * column, row, column};
  }
  /// Elements from line to line, where those of a line follow each other.
  std::int64_t stride() const { return std::max(row, column); }
  operator Rows<std::remove_const_t<T>>() const { return {base, stride()}; }  // NOLINT: implicit
};

inline int halves(const ExpertsDesc& d) { return is_glu(d.activation) ? 2 : 1; }

/// The part of W1[e] or dW1[e] that belongs to columns half * n + (0 .. n-1) of H, as (n, d); of
/// b1[e] or db1[e] with width 1.
template <class T>
Weights<T> w1_half(const GroupedDesc& d, T* w1, T* w1_up, std::int64_t expert, int half,
                   std::int64_t width) {
  const std::int64_t n = d.intermediate, W = d.preact_width();
  const auto inside = [&](std::int64_t offset, std::int64_t row, std::int64_t column) {
    return Weights<T>{w1 + expert * W * width + offset, row, column};
  };
  switch (d.w1_layout) {
    case W1Layout::interleaved:
      if (is_glu(d.activation)) return inside(half * width, 2 * width, 1);
      [[fallthrough]];
    case W1Layout::concatenated:
      return inside(half * n * width, width, 1);
    case W1Layout::transposed:
    case W1Layout::transposed_interleaved:  // H's columns lie as those of W1
      return inside(half * n, 1, W);
    case W1Layout::separate:
      break;
  }
  return {(half == 0 ? w1 : w1_up) + expert * n * width, width, 1};
}

/// W2 or dW2, as (d, n).
template <class T>
Weights<T> w2_matrix(const GroupedDesc& d, T* w2, std::int64_t expert) {
  T* const base = w2 + expert * d.hidden * d.intermediate;
  if (d.transposed()) return {base, 1, d.hidden};
  return {base, d.intermediate, 1};
}

/// Calls f(fn, step) with the object that computes an activation. Gates of a row of H are `step`
/// columns apart: 2 where they alternate with ups.
template <class F>
void visit_activation(const ExpertsDesc& d, F&& f) {
  math::visit_activation(d.activation, [&](auto fn) {
    if constexpr (decltype(fn)::kIsGlu) {
      if (d.alternates()) return f(fn, std::integral_constant<int, 2>{});
    }
    f(fn, std::integral_constant<int, 1>{});
  });
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

/// lhs^T rhs of a weight gradient, as a tile (m, n), or (n, m) where the weights are transposed.
template <class Engine>
class GradientProduct {
 public:
  using T = typename Engine::Storage;
  GradientProduct(const GroupedGemmDesc& d, Engine* engine) : d_(d), engine_(*engine) {}

  void lhs(std::int64_t m, std::int64_t k, Rows<T> rows) { operand(d_.transposed(), m, k, rows); }
  void rhs(std::int64_t n, std::int64_t k, Rows<T> rows) { operand(!d_.transposed(), n, k, rows); }
  void multiply(std::int64_t m, std::int64_t n, std::int64_t k, float* tile, bool accumulate) {
    if (d_.transposed()) std::swap(m, n);
    engine_.multiply(Form::tn, m, n, k, tile, n, accumulate);
  }
  /// Writes the tile to a gradient from an element on, or adds it if the descriptor says so.
  template <class Stored>
  void finish(std::int64_t m, std::int64_t n, const float* tile, Weights<Stored> gradient) const {
    if (d_.transposed()) std::swap(m, n);
    for (std::int64_t i = 0; i < m; ++i) {
      Stored* to = gradient.base + i * gradient.stride();
      d_.accumulate_weight_grads ? add(tile + i * n, to, n) : store(tile + i * n, to, n);
    }
  }

 private:
  void operand(bool right, std::int64_t count, std::int64_t k, Rows<T> rows) {
    right ? engine_.rhs(Form::tn, count, k, rows) : engine_.lhs(Form::tn, count, k, rows);
  }
  const GroupedGemmDesc& d_;
  Engine& engine_;
};

}  // namespace sonicmoe::cpu
