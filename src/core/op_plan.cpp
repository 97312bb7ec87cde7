#include "core/op_plan.h"

#include <new>
#include <set>
#include <utility>
#include <vector>

#include "core/backends.h"
#include "core/block_counts.h"
#include "core/device_code.h"
#include "core/validate.h"

namespace sonicmoe {

std::size_t block_counts_bytes(const TopKDesc& d, Device device) noexcept {
  // Ids of the caller may repeat within a token, and such slots share a bit of metadata's.
  if (device.type != DeviceType::cuda || !d.chooses()) return 0;
  return static_cast<std::size_t>(BlockCounts::of(d.tokens, d.experts, d.top_k).bytes());
}

const char* op_name(const RouterGemmDesc&) { return "router_gemm"; }
const char* op_name(const TopKDesc&) { return "top_k"; }
const char* op_name(const MetadataDesc&) { return "metadata"; }
const char* op_name(const SegmentsDesc&) { return "segments"; }
const char* op_name(const ZeroTailDesc&) { return "zero_tail"; }
const char* op_name(const BiasGradDesc&) { return "bias_grad"; }
const char* op_name(const AggregateDesc&) { return "aggregate"; }
const char* op_name(const ScoreGradDesc&) { return "score_grad"; }
const char* op_name(const AuxLossDesc&) { return "aux_loss"; }
const char* op_name(const UpdateSelectionBiasDesc&) { return "update_selection_bias"; }
const char* op_name(const TokenRoundingDesc&) { return "token_rounding"; }
const char* op_name(const TokenRoundingGradDesc&) { return "token_rounding_grad"; }
const char* op_name(const TokenDispatchDesc&) { return "token_dispatch"; }
const char* op_name(const SendRowsDesc&) { return "send_rows"; }
const char* op_name(const GroupedGemmDesc& desc) {
  switch (desc.op) {
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

namespace {

/// "9.0" for 90.
std::string capability(int arch) {
  return std::to_string(arch / 10) + "." + std::to_string(arch % 10);
}

}  // namespace

std::string device_reason(Device device) {
  if (device.type == DeviceType::cuda) {
#if SONICMOE_HAS_CUDA
    if (std::string reason = cuda::device_reason(device.index); !reason.empty()) return reason;
    const int arch = device_traits(device).arch;
    if (std::string reason = architecture_reason(arch); !reason.empty()) return reason;
    return device_code_reason(SONICMOE_DEVICE_CODE, arch);
#else
    return "device: got cuda, allowed: cpu (this build has no CUDA kernels)";
#endif
  }
  if (const std::string missing = cpu::missing_feature(); !missing.empty()) {
    return "device: got cpu, allowed: processors with " + missing;
  }
  return {};
}

std::string architecture_reason(int arch) {
  std::set<std::string> allowed;
  bool runs = false;
  for_each_kernel([&](const auto& kernel) {
    if (device_type(kernel.arch) != DeviceType::cuda) return;
    runs = runs || runs_on(kernel, arch);
    allowed.insert(capability(kernel.arch) + (kernel.and_later ? " or later" : ""));
  });
  if (runs) return {};
  std::string text;
  for (const std::string& one : allowed) text += (text.empty() ? "" : ", ") + one;
  return "device: got cuda of compute capability " + capability(arch) + ", allowed: " + text;
}

DeviceTraits device_traits([[maybe_unused]] Device device) {
#if SONICMOE_HAS_CUDA
  if (device.type == DeviceType::cuda) return cuda::device_traits(device.index);
#endif
  return {};
}

#if SONICMOE_HAS_CUDA
DeviceGuard::DeviceGuard(Device device) noexcept {
  if (device.type == DeviceType::cuda) previous_ = cuda::enter(device.index);
}
DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cuda::leave(previous_);
}
#else
DeviceGuard::DeviceGuard(Device) noexcept {}
DeviceGuard::~DeviceGuard() = default;
#endif

Status copy(void* to, const void* from, std::size_t bytes, const Exec& exec) noexcept {
#if SONICMOE_HAS_CUDA
  if (exec.device.type == DeviceType::cuda) return cuda::copy(to, from, bytes, exec);
#endif
  if (exec.device.type == DeviceType::cpu) cpu::copy(to, from, bytes);
  return {};
}

bool kernel_matches(std::string_view wanted, std::string_view name, int arch) {
  if (wanted.empty() || wanted == name) return true;
  if (wanted == "cuda") return device_type(arch) == DeviceType::cuda;
  return name.starts_with(wanted) && name[wanted.size()] == '.';
}

std::string DTypes::text() const {
  std::string list;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    if (contains(dtype)) list += (list.empty() ? "" : ", ") + std::string(name(dtype));
  }
  return list;
}

namespace {

/// Why a kernel cannot run `desc`, or empty.
template <class Desc>
std::string rejection(const Kernel<Desc>& kernel, const Desc& desc, const DeviceTraits& device) {
  if constexpr (requires { desc.dtype; }) {
    if (!kernel.dtypes.contains(desc.dtype)) {
      std::string reason =
          std::string("dtype: got ") + name(desc.dtype) + ", allowed: " + kernel.dtypes.text();
      // A kernel for one dtype has siblings for others, so its rejection says nothing of the
      // device.
      if (kernel.dtypes.size() > 1) {
        reason += device_type(kernel.arch) == DeviceType::cuda
                      ? " (on CUDA; cast the tensors, or use autocast)"
                      : " (on the CPU)";
      }
      return reason;
    }
  }
  return kernel.reject == nullptr ? std::string() : kernel.reject(desc, device);
}

}  // namespace

template <class Desc>
Choice<Desc> choose_kernel(const Desc& desc, const DeviceTraits& device,
                           const std::string& wanted) {
  struct Look {
    const Kernel<Desc>* kernel;
    std::string reason, defers;
  };
  std::vector<Look> looks;
  Choice<Desc> choice;
  const Kernel<Desc>* deferring = nullptr;
  for (const Kernel<Desc>* kernel : kernel_list<Desc>()) {
    if (!is_candidate(*kernel, desc, device)) continue;
    Look& look = looks.emplace_back(Look{kernel, "", ""});
    if (!kernel_matches(wanted, kernel->name, kernel->arch)) {
      look.reason = "kernel: got " + wanted + ", allowed: " + kernel->name;
    } else {
      look.reason = rejection(*kernel, desc, device);
    }
    if (!look.reason.empty()) continue;
    if (kernel->defer != nullptr && wanted != kernel->name) {
      look.defers = kernel->defer(desc, device);
    }
    const Kernel<Desc>*& taken = look.defers.empty() ? choice.kernel : deferring;
    if (taken == nullptr) taken = kernel;
  }
  if (choice.kernel == nullptr) choice.kernel = deferring;
  for (const Look& look : looks) {
    const bool runs = look.kernel == choice.kernel;
    choice.walk += std::string("  ") + look.kernel->name + ": ";
    if (!look.reason.empty()) {
      choice.walk += look.reason;
    } else if (!look.defers.empty()) {
      choice.walk += (runs ? "runs, although " : "would run, but ") + look.defers;
    } else {
      choice.walk += runs ? "runs" : "would run, a better one does";
    }
    choice.walk += "\n";
  }
  return choice;
}

Status limit_multiprocessors(int wanted, DeviceTraits* device) {
  if (wanted == 0) return {};
  const int most = device->multiprocessors / 2 * 2;
  if (most == 0) {
    return Status::error(StatusCode::invalid_argument,
                         "multiprocessors: got %d, allowed: 0 (on the CPU)", wanted);
  }
  if (wanted < 2 || wanted > most || wanted % 2 != 0) {
    return Status::error(StatusCode::invalid_argument,
                         "multiprocessors: got %d, allowed: 0 (all) or even numbers from 2 to %d",
                         wanted, most);
  }
  device->multiprocessors = wanted;
  return {};
}

Result<Exec> make_exec(Device device, const Options& options) {
  if (Status status = validate(device); !status.ok()) return status;
  if (Status status = validate(options); !status.ok()) return status;
  if (const std::string reason = device_reason(device); !reason.empty()) {
    return Status::error(StatusCode::unsupported, "%s", reason.c_str());
  }
  Exec exec;
  exec.device = device;
  exec.traits = device_traits(device);
  if (Status status = limit_multiprocessors(options.multiprocessors, &exec.traits); !status.ok()) {
    return status;
  }
  exec.threads = options.threads > 0 ? options.threads : cpu::usable_threads();
  exec.checked = options.checked || device.type == DeviceType::cpu;
  return exec;
}

namespace {

/// The error if no entry runs `desc`. It gives the reason of the last one that `wanted` selects,
/// because the last entry is the most general.
template <class Desc>
Status nothing_fits(const Desc& desc, const DeviceTraits& device, const std::string& wanted) {
  const Kernel<Desc>* last = nullptr;
  std::string names;
  for (const Kernel<Desc>* kernel : kernel_list<Desc>()) {
    if (!is_candidate(*kernel, desc, device)) continue;
    names += (names.empty() ? "" : ", ") + std::string(kernel->name);
    if (kernel_matches(wanted, kernel->name, kernel->arch)) last = kernel;
  }
  if (names.empty()) {
    return Status::error(StatusCode::unsupported, "device: got %s, allowed: others (no %s for it)",
                         name(device_type(device.arch)), op_name(desc));
  }
  if (last == nullptr) {
    return Status::error(StatusCode::unsupported, "kernel: got %s, allowed: %s", wanted.c_str(),
                         names.c_str());
  }
  return Status::error(StatusCode::unsupported, "%s", rejection(*last, desc, device).c_str());
}

template <class Desc>
Result<OpPlan<Desc>> make_op_plan(const Desc& desc, Device device, const Options& options) try {
  Result<Exec> exec = make_exec(device, options);
  if (!exec.ok()) return exec.status();
  if (Status status = validate(desc); !status.ok()) return status;
  const DeviceTraits& traits = exec.value().traits;
  Choice<Desc> choice = choose_kernel(desc, traits, options.kernel);
  if (choice.kernel == nullptr) return nothing_fits(desc, traits, options.kernel);
  const DeviceGuard guard(device);
  if (choice.kernel->prepare != nullptr) {
    if (Status status = choice.kernel->prepare(desc, exec.value()); !status.ok()) return status;
  }
  std::size_t bytes = 0;
  if (choice.kernel->workspace != nullptr) bytes = choice.kernel->workspace(desc, exec.value());
  using Impl = typename OpPlan<Desc>::Impl;
  return OpPlan<Desc>(std::make_shared<const Impl>(
      Impl{desc, choice.kernel, exec.value(), bytes, std::move(choice.walk)}));
} catch (const std::bad_alloc&) {
  return Status::error(StatusCode::out_of_memory, "make_plan: out of host memory");
}

}  // namespace

template <class Desc>
const Desc& OpPlan<Desc>::desc() const noexcept {
  return impl_->desc;
}

template <class Desc>
std::size_t OpPlan<Desc>::workspace_bytes() const noexcept {
  return impl_->workspace_bytes;
}

template <class Desc>
std::string OpPlan<Desc>::explain() const {
  return std::string(op_name(impl_->desc)) + ", workspace " +
         std::to_string(impl_->workspace_bytes) + " bytes\n" + impl_->walk;
}

template <class Desc>
Status OpPlan<Desc>::run(const Args& args, Workspace workspace, Stream stream) const noexcept {
  return run_operation(*this, args, {}, workspace, stream);
}

template <class Desc>
Status run_operation(const OpPlan<Desc>& plan, const typename Desc::Args& args,
                     const Handoff& handoff, Workspace workspace, Stream stream) noexcept {
  const typename OpPlan<Desc>::Impl& p = plan.impl();
  if (Status status = validate(p.desc, args, p.exec.device.type); !status.ok()) return status;
  if (Status status = validate(workspace, p.workspace_bytes); !status.ok()) return status;
  Exec exec = p.exec;
  exec.stream = stream;
  exec.handoff = handoff;
  const DeviceGuard guard(exec.device);
  return p.kernel->run(p.desc, args, workspace.data, exec);
}

#define SONICMOE_OP_PLAN(Desc)                                                                   \
  template class OpPlan<Desc>;                                                                   \
  template Status run_operation(const OpPlan<Desc>&, const typename Desc::Args&, const Handoff&, \
                                Workspace, Stream) noexcept;                                     \
  template Choice<Desc> choose_kernel(const Desc&, const DeviceTraits&, const std::string&);     \
  Result<OpPlan<Desc>> make_plan(const Desc& desc, Device device, const Options& options) {      \
    return make_op_plan(desc, device, options);                                                  \
  }
SONICMOE_OP_PLAN(RouterGemmDesc)
SONICMOE_OP_PLAN(TopKDesc)
SONICMOE_OP_PLAN(MetadataDesc)
SONICMOE_OP_PLAN(SegmentsDesc)
SONICMOE_OP_PLAN(ZeroTailDesc)
SONICMOE_OP_PLAN(GroupedGemmDesc)
SONICMOE_OP_PLAN(BiasGradDesc)
SONICMOE_OP_PLAN(AggregateDesc)
SONICMOE_OP_PLAN(ScoreGradDesc)
SONICMOE_OP_PLAN(AuxLossDesc)
SONICMOE_OP_PLAN(UpdateSelectionBiasDesc)
SONICMOE_OP_PLAN(TokenRoundingDesc)
SONICMOE_OP_PLAN(TokenRoundingGradDesc)
SONICMOE_OP_PLAN(TokenDispatchDesc)
SONICMOE_OP_PLAN(SendRowsDesc)
#undef SONICMOE_OP_PLAN

}  // namespace sonicmoe
