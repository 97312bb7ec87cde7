#include "testkit/run_experts.h"

#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "testkit/device_memory.h"

namespace sonicmoe::testkit {
namespace {

std::vector<std::byte> encode_index(const std::vector<std::int64_t>& values, IndexType type) {
  std::vector<std::byte> out;
  const auto append = [&](auto value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    out.insert(out.end(), bytes.begin(), bytes.end());
  };
  for (const std::int64_t value : values) {
    switch (type) {
      case IndexType::i32:
        append(static_cast<std::int32_t>(value));
        break;
      case IndexType::i64:
        append(value);
        break;
    }
  }
  return out;
}

}  // namespace

ExpertsCall::ExpertsCall(const Problem& problem, Device device, const Options& options)
    : arena(device), p_(problem), x_(p_.desc.experts), counts_(E(), 0), offsets_(E() + 1, 0) {
  std::int64_t next = 0;  // the first expert without an offset
  for (std::int64_t row = 0; row < R(); ++row) {
    const std::int64_t e = p_.lists.experts[row];
    if (e < 0 || e >= E()) continue;
    for (; next <= e; ++next) offsets_[next] = row;
    dense_ = dense_ && row == std::ssize(owned_);
    ++counts_[e];
    owned_.push_back(row);
  }
  for (; next <= E(); ++next) offsets_[next] = owned_.empty() ? 0 : owned_.back() + 1;

  const Result<ExpertsPlan> plan = make_plan(GroupedDesc{x_, 0, R(), E()}, device, options);
  status_ = plan.status();
  if (!plan.ok()) return;
  plan_ = plan.value();
  add_inputs();
  add_outputs();
}

const void* ExpertsCall::rows_input(const char* name, Tensor values, std::int64_t width,
                                    DType type) {
  std::vector<bool> owned(R(), false);
  for (const std::int64_t row : owned_) owned[row] = true;
  for (std::int64_t row = 0; row < R(); ++row) {
    if (owned[row]) continue;
    std::fill_n(values.begin() + row * width, width, std::numeric_limits<double>::quiet_NaN());
  }
  return arena.input(name, values, type);
}

void ExpertsCall::add_inputs() {
  const DType type = x_.dtype;
  // Each way of giving the segments in some cases; only both arrays can say that there are gaps.
  const std::size_t index_size = x_.index_type == IndexType::i64 ? 8 : 4;
  if (!dense_ || E() % 3 != 1) {
    forward_.counts = arena.input("counts", encode_index(counts_, x_.index_type), index_size);
  }
  if (!dense_ || E() % 3 != 0) {
    forward_.row_offsets =
        arena.input("row_offsets", encode_index(offsets_, x_.index_type), index_size);
  }
  forward_.x = backward_.x = rows_input("x", p_.x, x_.hidden, type);
  forward_.row_scores = backward_.row_scores = static_cast<const float*>(rows_input(
      "row_scores", x_.scored() ? p_.list_scores : Tensor{}, x_.scored() ? 1 : 0, DType::f32));
  auto [w1, w1_up] = pack_w1(p_.w1, p_.desc, x_.hidden);
  forward_.w1 = backward_.w1 = arena.input("w1", w1, type);
  forward_.w1_up = backward_.w1_up = arena.input("w1_up", w1_up, type);
  auto [b1, b1_up] = pack_w1(p_.b1, p_.desc, 1);
  forward_.b1 = arena.input("b1", b1, type);
  forward_.b1_up = arena.input("b1_up", b1_up, type);
  forward_.w2 = backward_.w2 = arena.input("w2", pack_w2(p_.w2, p_.desc), type);
  forward_.b2 = backward_.b2 = arena.input("b2", p_.b2, type);
  if (!x_.inference) backward_.dout = rows_input("dout", p_.dout, x_.hidden, type);
}

void ExpertsCall::add_outputs() {
  const DType type = x_.dtype, grad_type = x_.f32_weight_grads ? DType::f32 : type;
  const bool separate = x_.w1_layout == W1Layout::separate;
  const std::int64_t d = x_.hidden, n = x_.intermediate, W = x_.preact_width();
  const std::int64_t first = separate ? n : W, second = separate ? n : 0;
  const auto workspace = [&](const char* name, std::size_t bytes) {
    return Workspace{arena.output(name, bytes, 256), bytes};
  };
  forward_.segments = arena.output_int32("segments", 3 * E());
  backward_.segments = forward_.segments;
  forward_.expert_out = arena.output("expert_out", R() * d, type);
  forward_workspace_ = workspace("forward workspace", plan_->forward_workspace_bytes());
  if (x_.inference) return;
  void* const preact = arena.output("preact", R() * W, type);
  if (x_.keeps_preact()) backward_.preact = forward_.preact = preact;
  if (!x_.keeps_preact() && x_.bias) {
    backward_.b1 = forward_.b1;
    backward_.b1_up = forward_.b1_up;
  }
  if (!x_.dpreact_in_workspace) backward_.dpreact = preact;
  // A tensor that the call does not have is empty, and its pointer null.
  const auto output = [&](const char* name, bool exists, std::int64_t elements, DType stored) {
    return arena.output(name, exists ? static_cast<std::size_t>(elements) : 0, stored);
  };
  backward_.row_dscores = static_cast<float*>(output("dscores", x_.scored(), R(), DType::f32));
  backward_.dx_rows = output("dx", p_.wanted.dx, R() * d, type);
  backward_.dw1 = output("dw1", p_.wanted.dw1, E() * first * d, grad_type);
  backward_.dw1_up = output("dw1_up", p_.wanted.dw1, E() * second * d, grad_type);
  backward_.dw2 = output("dw2", p_.wanted.dw2, E() * d * n, grad_type);
  backward_.db1 = output("db1", x_.bias, E() * first, type);
  backward_.db1_up = output("db1_up", x_.bias, E() * second, type);
  backward_.db2 = output("db2", x_.bias, E() * d, type);
  if (x_.accumulate_weight_grads) {
    const auto [dw1, dw1_up] = pack_w1(p_.dw1, p_.desc, d);
    if (p_.wanted.dw1) arena["dw1"].put(encode(dw1, grad_type));
    if (p_.wanted.dw1) arena["dw1_up"].put(encode(dw1_up, grad_type));
    if (p_.wanted.dw2) arena["dw2"].put(encode(pack_w2(p_.dw2, p_.desc), grad_type));
  }
  backward_workspace_ = workspace("backward workspace", plan_->backward_workspace_bytes());
}

Status ExpertsCall::run_forward(Stream stream) {
  return plan_->forward(forward_, forward_workspace_, stream);
}
Status ExpertsCall::run_backward(Stream stream) {
  return plan_->backward(backward_, backward_workspace_, stream);
}

Tensor ExpertsCall::rows_output(const char* name, std::int64_t width, DType type,
                                LayerRun* run) const {
  Tensor values = arena.tensor(name, type);
  const std::span<const std::byte> bytes = arena[name].bytes();
  const GuardedBuffer poison(bytes.size());
  const std::size_t row_bytes = width * size_of(type);
  std::size_t next = 0;
  for (std::int64_t row = 0; row < R(); ++row) {
    if (next < owned_.size() && owned_[next] == row) {
      ++next;
      continue;
    }
    const auto is_zero = [](std::byte b) { return b == std::byte{0}; };
    const auto mine = bytes.subspan(row * row_bytes, row_bytes);
    const bool right =
        x_.zero_tail ? std::ranges::all_of(mine, is_zero)
                     : std::ranges::equal(mine, poison.bytes().subspan(row * row_bytes, row_bytes));
    if (!right) {
      run->damage = std::string(name) + ": row " + std::to_string(row) +
                    ", which no expert owns, " + (x_.zero_tail ? "is not zero" : "was written");
    }
    std::fill_n(values.begin() + row * width, width, 0.0);
  }
  return values;
}

void ExpertsCall::read_forward(LayerRun* run) const {
  run->routing = p_.lists;
  run->counts.assign(counts_.begin(), counts_.end());
  run->tensors.scores = p_.list_scores;
  run->tensors.o = rows_output("expert_out", x_.hidden, x_.dtype, run);
  if (!x_.keeps_preact()) return;
  const std::int64_t W = x_.preact_width();
  const Tensor preact = unpack_preact(arena.tensor("preact", x_.dtype), p_.desc);
  for (const std::int64_t row : owned_) {  // grouped rows
    Tensor& out = run->tensors.preact;
    out.insert(out.end(), preact.begin() + row * W, preact.begin() + (row + 1) * W);
  }
}

void ExpertsCall::read_backward(LayerRun* run) const {
  const DType type = x_.dtype, grad_type = x_.f32_weight_grads ? DType::f32 : type;
  LayerTensors& out = run->tensors;
  if (p_.wanted.dx) out.dx = rows_output("dx", x_.hidden, type, run);
  if (x_.scored()) out.dscores = rows_output("dscores", 1, DType::f32, run);
  if (p_.wanted.dw1) {
    out.dw1 = unpack_w1(arena.tensor("dw1", grad_type), arena.tensor("dw1_up", grad_type), p_.desc,
                        x_.hidden);
  }
  if (p_.wanted.dw2) out.dw2 = unpack_w2(arena.tensor("dw2", grad_type), p_.desc);
  if (x_.bias) {
    out.db1 = unpack_w1(arena.tensor("db1", type), arena.tensor("db1_up", type), p_.desc, 1);
    out.db2 = arena.tensor("db2", type);
  }
}

LayerRun run_experts(const Problem& problem, Device device, const Options& options) {
  LayerRun run;
  ExpertsCall call(problem, device, options);
  run.status = call.status();
  const auto went_well = [&](const char* step, Status status) {
    if (status.ok()) status = synchronize(device);
    run.status = status;
    if (run.damage.empty()) run.damage = call.arena.damage();
    if (!run.damage.empty()) run.damage = std::string(step) + " " + run.damage;
    return status.ok() && run.damage.empty();
  };
  if (!run.status.ok() || !went_well("forward", call.run_forward())) return run;
  call.read_forward(&run);
  if (!run.damage.empty() || problem.desc.experts.inference) return run;
  if (went_well("backward", call.run_backward())) call.read_backward(&run);
  return run;
}

}  // namespace sonicmoe::testkit
