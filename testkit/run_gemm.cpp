#include <algorithm>
#include <limits>
#include <span>

#include "testkit/device_memory.h"
#include "testkit/run.h"

namespace sonicmoe::testkit {
namespace {

/// Rows past those in use must not be read: NaN, and ids far out of range.
Tensor pad(Tensor rows, std::int64_t capacity, std::int64_t width) {
  rows.resize(capacity * width, std::numeric_limits<double>::quiet_NaN());
  return rows;
}

std::vector<std::int32_t> pad(std::vector<std::int32_t> rows, std::int64_t capacity) {
  rows.resize(capacity, std::numeric_limits<std::int32_t>::max());
  return rows;
}

/// The rows in use of an output; the rest must still be poison.
Tensor rows_in_use(const Arena& arena, const std::string& name, DType type, std::size_t rows,
                   std::size_t capacity, GemmRun* run) {
  Tensor values = arena.tensor(name, type);
  if (values.empty() || capacity == 0) return values;
  const std::size_t used = values.size() / capacity * rows;
  const std::size_t used_bytes = used * size_of(type);
  const std::span<const std::byte> bytes = arena[name].bytes();
  const GuardedBuffer poison(bytes.size() - used_bytes);
  if (!std::ranges::equal(bytes.subspan(used_bytes), poison.bytes())) {
    run->failure = "wrote to rows of " + name + " that no expert owns";
  }
  values.resize(used);
  return values;
}

}  // namespace

const char* name(GemmOp op) {
  switch (op) {
    case GemmOp::up_proj:
      return "up_proj";
    case GemmOp::down_proj:
      return "down_proj";
    case GemmOp::down_proj_dgrad:
      return "down_proj_dgrad";
    case GemmOp::up_proj_dgrad:
      return "up_proj_dgrad";
    case GemmOp::down_proj_wgrad:
      return "down_proj_wgrad";
    case GemmOp::up_proj_wgrad:
      return "up_proj_wgrad";
  }
  return "?";
}

GemmRun run_gemm(GemmOp op, const LayerDesc& desc, const GemmInputs& in, Device device,
                 const Options& options) {
  const std::int64_t T = desc.tokens, d = desc.experts.hidden, n = desc.experts.intermediate,
                     E = desc.router.experts;
  const std::int64_t W = desc.experts.preact_width();
  const auto R = static_cast<std::int64_t>(in.routing.slots());
  const DType type = desc.experts.dtype;
  const Grouping g = group(in.routing, T, E);
  const bool separate = desc.experts.w1_layout == W1Layout::separate;

  GroupedGemmDesc gemm;
  gemm.op = op;
  gemm.tokens = T;
  gemm.rows = R;
  gemm.hidden = d;
  gemm.intermediate = n;
  gemm.experts = E;
  gemm.dtype = type;
  gemm.activation = desc.experts.activation;
  gemm.w1_layout = desc.experts.w1_layout;
  gemm.bias = desc.experts.bias && (op == GemmOp::up_proj || op == GemmOp::down_proj);
  gemm.inference = desc.experts.inference && op == GemmOp::up_proj;
  gemm.f32_weight_grads = desc.experts.f32_weight_grads;
  gemm.accumulate_weight_grads = desc.experts.accumulate_weight_grads;
  const DType grad_type = desc.experts.f32_weight_grads ? DType::f32 : type;
  GemmRun run;
  const auto plan = make_plan(gemm, device, options);
  if (!plan.ok()) {
    run.failure = plan.status().message();
    return run;
  }

  Arena arena(device);
  GroupedGemmArgs args;
  // Inputs, each only where the operation reads it.
  args.offsets = arena.input("offsets", g.offsets);
  if (!in.expert_order.empty()) {
    args.expert_order = arena.input("expert_order", in.expert_order);
  }
  const auto gathers = [&] { args.row_tokens = arena.input("row_tokens", pad(g.row_tokens, R)); };
  const auto rows = [&](const char* label, const Tensor& values, std::int64_t width) {
    return const_cast<void*>(arena.input(label, pad(values, R, width), type));
  };
  const auto weights1 = [&] {
    auto [w1, w1_up] = pack_w1(in.w1, desc, d);
    args.w1 = arena.input("w1", w1, type);
    args.w1_up = arena.input("w1_up", w1_up, type);
  };
  switch (op) {
    case GemmOp::up_proj: {
      gathers();
      weights1();
      args.x = arena.input("x", in.x, type);
      if (gemm.bias) {
        auto [b1, b1_up] = pack_w1(in.b1, desc, 1);
        args.b1 = arena.input("b1", b1, type);
        args.b1_up = arena.input("b1_up", b1_up, type);
      }
      if (!gemm.inference) args.preact = arena.output("preact", R * W, type);
      args.act = arena.output("act", R * n, type);
      break;
    }
    case GemmOp::down_proj:
      args.act = rows("act", in.act, n);
      args.w2 = arena.input("w2", in.w2, type);
      if (gemm.bias) args.b2 = arena.input("b2", in.b2, type);
      args.expert_out = arena.output("expert_out", R * d, type);
      break;
    case GemmOp::down_proj_dgrad:
      gathers();
      args.row_scores = static_cast<const float*>(
          arena.input("row_scores", pad(row_scores(g, in.slot_scores), R, 1), DType::f32));
      args.dout = arena.input("dout", in.dout, type);
      args.w2 = arena.input("w2", in.w2, type);
      args.dpreact = arena.output("dpreact", R * W, type);
      if (desc.experts.dpreact_in_workspace) {
        args.preact = rows("preact", in.preact, W);
      } else {  // over H, whose other rows are poison then
        arena["dpreact"].put(encode(in.preact, type));
        args.preact = args.dpreact;
      }
      args.scaled_act = arena.output("scaled_act", R * n, type);
      args.row_dscores = arena.output_float("row_dscores", R);
      break;
    case GemmOp::up_proj_dgrad:
      weights1();
      args.dpreact = rows("dpreact", in.dpreact, W);
      args.dx_rows = arena.output("dx_rows", R * d, type);
      break;
    case GemmOp::down_proj_wgrad:
      gathers();
      args.dout = arena.input("dout", in.dout, type);
      args.scaled_act = rows("scaled_act", in.scaled_act, n);
      args.dw2 = arena.output("dw2", E * d * n, grad_type);
      if (gemm.accumulate_weight_grads) arena["dw2"].put(encode(in.dw2, grad_type));
      break;
    case GemmOp::up_proj_wgrad:
      gathers();
      args.x = arena.input("x", in.x, type);
      args.dpreact = rows("dpreact", in.dpreact, W);
      args.dw1 = arena.output("dw1", E * (separate ? n : W) * d, grad_type);
      args.dw1_up = arena.output("dw1_up", separate ? E * n * d : 0, grad_type);
      if (gemm.accumulate_weight_grads) {
        const auto [first, second] = pack_w1(in.dw1, desc, d);
        arena["dw1"].put(encode(first, grad_type));
        if (separate) arena["dw1_up"].put(encode(second, grad_type));
      }
      break;
  }
  const std::size_t bytes = plan.value().workspace_bytes();
  const Workspace workspace{arena.output("workspace", bytes, 256), bytes};
  Status status =
      in.run ? in.run(plan.value(), args, workspace) : plan.value().run(args, workspace);
  if (status.ok()) status = synchronize(device);
  run.failure = status.ok() ? arena.damage() : status.message();
  if (!run.failure.empty()) return run;

  const std::span<const std::byte> left = arena["workspace"].bytes();
  run.workspace.assign(left.begin(), left.end());
  LayerTensors& out = run.tensors;
  const auto written = [&](const char* label, DType stored) {
    return rows_in_use(arena, label, stored, g.rows(), R, &run);
  };
  switch (op) {
    case GemmOp::up_proj:
      if (!gemm.inference) out.preact = written("preact", type);
      out.act = written("act", type);
      break;
    case GemmOp::down_proj:
      out.expert_out = written("expert_out", type);
      break;
    case GemmOp::down_proj_dgrad:
      out.dpreact = written("dpreact", type);
      out.scaled_act = written("scaled_act", type);
      out.row_dscores = written("row_dscores", DType::f32);
      break;
    case GemmOp::up_proj_dgrad:
      out.dx_rows = written("dx_rows", type);
      break;
    case GemmOp::down_proj_wgrad:
      out.dw2 = arena.tensor("dw2", grad_type);
      break;
    case GemmOp::up_proj_wgrad:
      out.dw1 =
          unpack_w1(arena.tensor("dw1", grad_type), arena.tensor("dw1_up", grad_type), desc, d);
      break;
  }
  return run;
}

LayerTensors oracle_gemm(GemmOp op, const LayerDesc& desc, const GemmInputs& in,
                         Precision precision) {
  const Oracle oracle(desc, precision);
  const Grouping g = group(in.routing, desc.tokens, desc.router.experts);
  LayerTensors out;
  switch (op) {
    case GemmOp::up_proj: {
      auto result = oracle.up_proj(g, in.x, in.w1, desc.experts.bias ? in.b1 : Tensor{});
      if (!desc.experts.inference) out.preact = std::move(result.preact);
      out.act = std::move(result.act);
      break;
    }
    case GemmOp::down_proj:
      out.expert_out = oracle.down_proj(g, in.act, in.w2, desc.experts.bias ? in.b2 : Tensor{});
      break;
    case GemmOp::down_proj_dgrad: {
      auto result =
          oracle.down_proj_dgrad(g, row_scores(g, in.slot_scores), in.dout, in.w2, in.preact);
      out.dpreact = std::move(result.dpreact);
      out.scaled_act = std::move(result.scaled_act);
      out.row_dscores = std::move(result.row_dscores);
      break;
    }
    case GemmOp::up_proj_dgrad:
      out.dx_rows = oracle.up_proj_dgrad(g, in.dpreact, in.w1);
      break;
    case GemmOp::down_proj_wgrad:
      out.dw2 = oracle.down_proj_wgrad(g, in.dout, in.scaled_act);
      break;
    case GemmOp::up_proj_wgrad:
      out.dw1 = oracle.up_proj_wgrad(g, in.x, in.dpreact);
      break;
  }
  return out;
}

}  // namespace sonicmoe::testkit
