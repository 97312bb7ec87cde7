#include <algorithm>
#include <limits>
#include <span>

#include "testkit/device_memory.h"
#include "testkit/run.h"

namespace sonicmoe::testkit {
namespace {

/// Where the grouped rows lie in memory. Gathered ones follow each other, with unused rows behind
/// the last. Contiguous ones are segments with rows of nobody before, between and behind them.
class RowMemory {
 public:
  RowMemory(const Grouping& g, std::int64_t slots, bool gathers) {
    capacity_ = slots;
    if (gathers) {
      begins_ = g.offsets;
      for (std::size_t row = 0; row < g.rows(); ++row)
        at_.push_back(static_cast<std::int64_t>(row));
      return;
    }
    std::int64_t next = 0;
    for (std::size_t e = 0; e < g.counts.size(); ++e) {
      next += static_cast<std::int64_t>((e + 1) * 5 % 13);
      begins_.push_back(static_cast<std::int32_t>(next));
      for (int i = 0; i < g.counts[e]; ++i) at_.push_back(next++);
      ends_.push_back(static_cast<std::int32_t>(next));
    }
    capacity_ = next + 3;
  }

  std::int64_t capacity() const { return capacity_; }
  const std::vector<std::int32_t>& begins() const { return begins_; }
  const std::vector<std::int32_t>& ends() const { return ends_; }  ///< empty: begins + 1

  /// Rows of nobody must not be read: NaN, and ids far out of range.
  Tensor spread(const Tensor& rows, std::int64_t width) const {
    Tensor out(capacity_ * width, std::numeric_limits<double>::quiet_NaN());
    for (std::size_t row = 0; row < at_.size(); ++row) {
      std::copy_n(&rows[row * width], width, &out[at_[row] * width]);
    }
    return out;
  }
  std::vector<std::int32_t> spread(const std::vector<std::int32_t>& rows) const {
    std::vector<std::int32_t> out(capacity_, std::numeric_limits<std::int32_t>::max());
    for (std::size_t row = 0; row < at_.size(); ++row) out[at_[row]] = rows[row];
    return out;
  }

  /// Writes the rows in use into a buffer; the others keep what they have.
  void put(const GuardedBuffer& buffer, const Tensor& rows, std::int64_t width, DType type) const {
    const std::vector<std::byte> encoded = encode(rows, type);
    std::vector<std::byte> all(buffer.bytes().begin(), buffer.bytes().end());
    const std::size_t row_bytes = width * size_of(type);
    for (std::size_t row = 0; row < at_.size(); ++row) {
      std::copy_n(&encoded[row * row_bytes], row_bytes, &all[at_[row] * row_bytes]);
    }
    buffer.put(all);
  }

  /// The rows in use of an output; the rest must still be poison.
  Tensor collect(const Arena& arena, const std::string& name, DType type, GemmRun* run) const {
    const Tensor values = arena.tensor(name, type);
    if (values.empty() || capacity_ == 0) return values;
    const std::size_t width = values.size() / capacity_, row_bytes = width * size_of(type);
    const std::span<const std::byte> bytes = arena[name].bytes();
    const GuardedBuffer poison(bytes.size());
    Tensor out;
    std::size_t row = 0;
    for (std::int64_t place = 0; place < capacity_; ++place) {
      if (row < at_.size() && at_[row] == place) {
        out.insert(out.end(), &values[place * width], &values[place * width] + width);
        ++row;
      } else if (!std::ranges::equal(bytes.subspan(place * row_bytes, row_bytes),
                                     poison.bytes().subspan(place * row_bytes, row_bytes))) {
        run->failure = "wrote to rows of " + name + " that no expert owns";
      }
    }
    return out;
  }

 private:
  std::int64_t capacity_;
  std::vector<std::int32_t> begins_, ends_;
  std::vector<std::int64_t> at_;  // of each grouped row
};

/// Row r of the tokens' tensor for each grouped row.
Tensor rows_of(const Grouping& g, const Tensor& tokens, std::int64_t width) {
  Tensor out;
  for (const std::int32_t token : g.row_tokens) {
    out.insert(out.end(), &tokens[token * width], &tokens[token * width] + width);
  }
  return out;
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
  const DType type = desc.experts.dtype;
  const Grouping g = group(in.routing, T, E);
  const bool gathered = desc.experts.gathers();
  const RowMemory memory(g, static_cast<std::int64_t>(in.routing.slots()), gathered);
  const std::int64_t R = memory.capacity();
  const bool separate = desc.experts.w1_layout == W1Layout::separate;

  GroupedGemmDesc gemm;
  gemm.op = op;
  gemm.row_source = desc.experts.row_source;
  gemm.score_at = desc.experts.score_at;
  gemm.tokens = gathered ? T : 0;
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
  args.offsets = arena.input("offsets", memory.begins());
  if (!gathered) args.ends = arena.input("ends", memory.ends());
  if (!in.expert_order.empty()) {
    args.expert_order = arena.input("expert_order", in.expert_order);
  }
  // x or dO: the tokens' rows and which of them to gather, or contiguous rows.
  const auto source = [&](const char* label, const Tensor& tokens) {
    if (!gathered) return arena.input(label, memory.spread(rows_of(g, tokens, d), d), type);
    args.row_tokens = arena.input("row_tokens", memory.spread(g.row_tokens));
    return arena.input(label, tokens, type);
  };
  const auto rows = [&](const char* label, const Tensor& values, std::int64_t width) {
    return const_cast<void*>(arena.input(label, memory.spread(values, width), type));
  };
  const auto give_scores = [&] {
    args.row_scores = static_cast<const float*>(
        arena.input("row_scores", memory.spread(row_scores(g, in.slot_scores), 1), DType::f32));
  };
  const auto weights1 = [&] {
    auto [w1, w1_up] = pack_w1(in.w1, desc, d);
    args.w1 = arena.input("w1", w1, type);
    args.w1_up = arena.input("w1_up", w1_up, type);
  };
  switch (op) {
    case GemmOp::up_proj: {
      weights1();
      args.x = source("x", in.x);
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
      args.w2 = arena.input("w2", pack_w2(in.w2, desc), type);
      if (gemm.bias) args.b2 = arena.input("b2", in.b2, type);
      if (!gathered && desc.experts.scored()) give_scores();
      args.expert_out = arena.output("expert_out", R * d, type);
      break;
    case GemmOp::down_proj_dgrad:
      if (desc.experts.scored()) give_scores();
      args.dout = source("dout", in.dout);
      args.w2 = arena.input("w2", pack_w2(in.w2, desc), type);
      args.dpreact = arena.output("dpreact", R * W, type);
      if (desc.experts.dpreact_in_workspace) {
        args.preact = rows("preact", pack_preact(in.preact, desc), W);
      } else {  // over H, whose other rows are poison then
        memory.put(arena["dpreact"], pack_preact(in.preact, desc), W, type);
        args.preact = args.dpreact;
      }
      args.scaled_act = arena.output("scaled_act", R * n, type);
      if (desc.experts.scored()) args.row_dscores = arena.output_float("row_dscores", R);
      break;
    case GemmOp::up_proj_dgrad:
      weights1();
      args.dpreact = rows("dpreact", pack_preact(in.dpreact, desc), W);
      args.dx_rows = arena.output("dx_rows", R * d, type);
      break;
    case GemmOp::down_proj_wgrad:
      args.dout = source("dout", in.dout);
      args.scaled_act = rows("scaled_act", in.scaled_act, n);
      args.dw2 = arena.output("dw2", E * d * n, grad_type);
      if (gemm.accumulate_weight_grads) arena["dw2"].put(encode(pack_w2(in.dw2, desc), grad_type));
      break;
    case GemmOp::up_proj_wgrad:
      args.x = source("x", in.x);
      args.dpreact = rows("dpreact", pack_preact(in.dpreact, desc), W);
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
    return memory.collect(arena, label, stored, &run);
  };
  switch (op) {
    case GemmOp::up_proj:
      if (!gemm.inference) out.preact = unpack_preact(written("preact", type), desc);
      out.act = written("act", type);
      break;
    case GemmOp::down_proj:
      out.expert_out = written("expert_out", type);
      break;
    case GemmOp::down_proj_dgrad:
      out.dpreact = unpack_preact(written("dpreact", type), desc);
      out.scaled_act = written("scaled_act", type);
      if (desc.experts.scored()) out.row_dscores = written("row_dscores", DType::f32);
      break;
    case GemmOp::up_proj_dgrad:
      out.dx_rows = written("dx_rows", type);
      break;
    case GemmOp::down_proj_wgrad:
      out.dw2 = unpack_w2(arena.tensor("dw2", grad_type), desc);
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
      out.expert_out = oracle.down_proj(g, in.act, in.w2, desc.experts.bias ? in.b2 : Tensor{},
                                        row_scores(g, in.slot_scores));
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
