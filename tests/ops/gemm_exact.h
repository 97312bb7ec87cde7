#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/op_plan.h"
#include "sonicmoe/info.h"
#include "testkit/buffer.h"
#include "testkit/run.h"
#include "tests/device.h"
#include "tests/test_names.h"

/// Integer-coded operands, and bit for bit what comes out of a GEMM operation's kernel.
namespace sonicmoe::testkit {

/// silu(-64) and its slope are about 1e-26 and not the same bits in fp32 and fp64; added to an
/// integer they vanish, alone they count as zero.
inline constexpr double kTrace = 0x1p-60;
inline Tensor without_traces(Tensor values) {
  for (double& v : values) {
    if (std::fabs(v) < kTrace) v = 0;
  }
  return values;
}

struct Shape {
  std::int64_t tokens, hidden, intermediate, experts, list_length;
};

/// What operations hand to each other beside tensors (core/handoff.h).
struct HandedInputs : GemmInputs {
  HandedInputs(GemmInputs inputs) : GemmInputs(std::move(inputs)) {}  // NOLINT: implicit by design
  std::optional<std::int32_t> tile_counter;  ///< Handoff::tile_counter begins so; empty: null
};
struct HandedRun : GemmRun {
  std::int32_t tile_counter = 0;  ///< what the operation left there
};

inline bool activates(GemmOp op) { return op == GemmOp::up_proj || op == GemmOp::down_proj_dgrad; }

/// On CUDA an operation that resets the counter of a later one has one to reset.
inline HandedRun run_kernel(GemmOp op, const LayerDesc& desc, const HandedInputs& inputs,
                            const std::string& kernel) {
  Options options;
  options.kernel = kernel;
  options.threads = 2;
  Arena words(kDevice);
  Handoff handoff;
  if (inputs.tile_counter) {
    handoff.tile_counter = words.output_int32("tile_counter", 1);
    words["tile_counter"].put(std::as_bytes(std::span(&*inputs.tile_counter, 1)));
  }
  const bool resets = !kOnCpu && inputs.routing.slots() > 0 && activates(op);
  if (resets) handoff.next_tile_counter = words.output_int32("next_tile_counter", 1);
  GemmInputs handed = inputs;
  handed.run = [&](const auto& plan, const auto& args, Workspace workspace) {
    return run_operation(plan, args, handoff, workspace, {});
  };
  HandedRun run{run_gemm(op, desc, handed, kDevice, options)};
  if (!run.failure.empty()) return run;
  run.failure = words.damage();
  if (inputs.tile_counter) run.tile_counter = words.int32("tile_counter").front();
  if (resets && words.int32("next_tile_counter").front() != 0) {
    run.failure = "did not reset next_tile_counter";
  }
  return run;
}

inline void compare_exactly(const GemmRun& run, GemmOp op, const LayerDesc& desc,
                            const GemmInputs& inputs) {
  ASSERT_EQ(run.failure, "");
  const LayerTensors expected = oracle_gemm(op, desc, inputs, Precision::rounded);
  for (const GemmOutput& output : kGemmOutputs) {
    const Check check = same_values(output.name, without_traces(run.tensors.*output.member),
                                    without_traces(expected.*output.member));
    ASSERT_TRUE(check.pass) << check.tensor << ": " << check.note;
  }
}

/// What was run.
inline HandedRun expect_exact(GemmOp op, const LayerDesc& desc, const HandedInputs& inputs,
                              const std::string& kernel) {
  HandedRun run = run_kernel(op, desc, inputs, kernel);
  compare_exactly(run, op, desc, inputs);
  return run;
}

/// As many slots for each expert as told, expert by expert, so that they are grouped rows as well.
struct Counted {
  Routing lists;
  std::vector<std::int64_t> first = {0};  ///< row of each expert, and of the end
};
/// count(expert) slots, token(i, expert) that of the i-th of all.
template <class Count, class Token>
Counted counted(std::int64_t experts, Count&& count, Token&& token) {
  Counted made;
  for (std::int64_t e = 0; e < experts; ++e) {
    for (int i = 0; i < count(e); ++i) {
      made.lists.tokens.push_back(static_cast<std::int32_t>(token(made.lists.tokens.size(), e)));
      made.lists.experts.push_back(static_cast<std::int32_t>(e));
    }
    made.first.push_back(static_cast<std::int64_t>(made.lists.tokens.size()));
  }
  return made;
}

/// For the other operations an activation has a gate or none.
inline std::vector<ActivationSpec> exact_activations(GemmOp op) {
  if (activates(op)) return exact_activations();
  return {Activation::swiglu, Activation::relu_sq};
}

/// Layouts in which W1 lies differently. Without a gate its rows or columns have no order.
inline std::vector<W1Layout> layouts(const ActivationSpec& activation) {
  if (!is_glu(activation)) return {W1Layout::interleaved, W1Layout::transposed};
  return {W1Layout::interleaved, W1Layout::concatenated, W1Layout::separate, W1Layout::transposed,
          W1Layout::transposed_interleaved};
}
/// Those whose kernels differ on CUDA.
inline constexpr W1Layout kKernelLayouts[] = {W1Layout::interleaved, W1Layout::transposed,
                                              W1Layout::transposed_interleaved};

inline GemmOp op_of(const KernelInfo& kernel) {
  for (const GemmOp op : kGemmOps) {
    if (kernel.op == name(op)) return op;
  }
  return {};
}

inline LayerDesc layer_of(const Shape& shape, DType dtype) {
  LayerDesc desc;
  desc.tokens = shape.tokens;
  desc.experts.hidden = shape.hidden;
  desc.experts.intermediate = shape.intermediate;
  desc.router.experts = shape.experts;
  desc.experts.dtype = dtype;
  desc.router.input = RouterInput::lists;
  desc.router.list_length = shape.list_length;
  return desc;
}

inline std::vector<KernelInfo> kernels_for(std::span<const GemmOp> ops) {
  std::set<std::string> names;
  for (const GemmOp op : ops) names.insert(name(op));
  return kernels_of(kDevice, names);
}

inline constexpr auto kLabel = [](const auto& param) { return label_of(param.param.name); };

}  // namespace sonicmoe::testkit
