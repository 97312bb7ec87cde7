#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "core/device_traits.h"
#include "core/handoff.h"
#include "sonicmoe/ops.h"
#include "sonicmoe/status.h"
#include "sonicmoe/token_dispatch.h"
#include "sonicmoe/token_rounding.h"
#include "sonicmoe/types.h"

namespace sonicmoe {

/// Where and how a call runs. make_plan fixes all but `stream` and `handoff`, which each call sets.
struct Exec {
  Device device;
  DeviceTraits traits = {};
  int threads = 1;
  bool checked = true;
  Stream stream = {};
  Handoff handoff = {};
};

/// The set of dtypes that a kernel takes.
class DTypes {
 public:
  constexpr DTypes() = default;
  constexpr DTypes(std::initializer_list<DType> list) {
    for (const DType dtype : list) bits_ |= bit(dtype);
  }
  constexpr bool contains(DType dtype) const { return (bits_ & bit(dtype)) != 0; }
  constexpr int size() const { return std::popcount(bits_); }
  /// "f32, bf16", in the order of the enum.
  std::string text() const;

 private:
  static constexpr std::uint32_t bit(DType dtype) {
    const auto index = static_cast<std::uint32_t>(dtype);
    return index < 32 ? 1u << index : 0;
  }
  std::uint32_t bits_ = 0;
};

/// One entry of the kernel list. Plain data, one object per compiled kernel, defined beside it.
template <class Desc>
struct Kernel {
  const char* op;  ///< "up_proj": entries of other ops are not candidates
  /// Architecture, operation and, where an operation has several kernels, the variant:
  /// "cpu.up_proj", "sm90.up_proj.128x256".
  const char* name;
  /// The kernel runs on devices with this DeviceTraits::arch, and with `and_later` on those behind
  /// it. 0: the CPU.
  int arch = 0;
  bool and_later = false;
  /// The values of Desc::dtype that the kernel takes; others are rejected. Unused if Desc has no
  /// `dtype`.
  DTypes dtypes = {};
  /// Optional. The reason why the kernel cannot run `desc` on such a device of this machine, or
  /// empty. It may look at the machine (instruction sets).
  std::string (*reject)(const Desc& desc, const DeviceTraits& device) = nullptr;
  /// Optional. Why a later entry is better for `desc`, or empty. Options::kernel with this entry's
  /// full name overrides it. If all entries that could run defer, the first of them runs.
  std::string (*defer)(const Desc& desc, const DeviceTraits& device) = nullptr;
  /// Optional. Bytes of workspace; 0 if null.
  std::size_t (*workspace)(const Desc& desc, const Exec& exec) = nullptr;
  /// Optional. make_plan calls it once when it has chosen this kernel, for function attributes.
  Status (*prepare)(const Desc& desc, const Exec& exec) = nullptr;
  /// `workspace` has at least as many bytes as workspace() said, at a multiple of 256, with
  /// undefined contents. Arguments are validated and the device is current.
  Status (*run)(const Desc& desc, const typename Desc::Args& args, void* workspace,
                const Exec& exec) noexcept;
};

/// All kernels of a descriptor's operations, best first. kernel_list.cpp defines the lists; nothing
/// else chooses kernels.
template <class Desc>
std::span<const Kernel<Desc>* const> kernel_list();

/// The operation that a descriptor asks for: "up_proj", "top_k", ...
const char* op_name(const RouterGemmDesc& desc);
const char* op_name(const TopKDesc& desc);
const char* op_name(const MetadataDesc& desc);
const char* op_name(const SegmentsDesc& desc);
const char* op_name(const ZeroTailDesc& desc);
const char* op_name(const GroupedGemmDesc& desc);
const char* op_name(const BiasGradDesc& desc);
const char* op_name(const AggregateDesc& desc);
const char* op_name(const ScoreGradDesc& desc);
const char* op_name(const AuxLossDesc& desc);
const char* op_name(const UpdateSelectionBiasDesc& desc);
const char* op_name(const TokenRoundingDesc& desc);
const char* op_name(const TokenRoundingGradDesc& desc);
const char* op_name(const TokenDispatchDesc& desc);
const char* op_name(const SendRowsDesc& desc);

/// Makes a device the current one of this thread; the destructor restores the previous one.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to restore
};

/// Copies within the memory of exec.device; on CUDA the copy is queued on exec.stream.
Status copy(void* to, const void* from, std::size_t bytes, const Exec& exec) noexcept;

/// Why no kernel of this build runs on `device`, or empty.
std::string device_reason(Device device);
/// Why no kernel of this build is compiled for a CUDA device's architecture, or empty. Unlike
/// device_reason(), it asks no driver.
std::string architecture_reason(int arch);
/// Precondition: device_reason(device) is empty.
DeviceTraits device_traits(Device device);

/// Calls f(kernel) for every entry of every list, in order.
template <class F>
void for_each_kernel(F&& f) {
  const auto each = [&](const auto& list) {
    for (const auto* kernel : list) f(*kernel);
  };
  each(kernel_list<RouterGemmDesc>());
  each(kernel_list<TopKDesc>());
  each(kernel_list<MetadataDesc>());
  each(kernel_list<SegmentsDesc>());
  each(kernel_list<ZeroTailDesc>());
  each(kernel_list<GroupedGemmDesc>());
  each(kernel_list<BiasGradDesc>());
  each(kernel_list<AggregateDesc>());
  each(kernel_list<ScoreGradDesc>());
  each(kernel_list<AuxLossDesc>());
  each(kernel_list<UpdateSelectionBiasDesc>());
  each(kernel_list<TokenRoundingDesc>());
  each(kernel_list<TokenRoundingGradDesc>());
  each(kernel_list<TokenDispatchDesc>());
  each(kernel_list<SendRowsDesc>());
}

/// True if the entry is compiled for devices of this DeviceTraits::arch.
template <class Desc>
bool runs_on(const Kernel<Desc>& kernel, int arch) {
  return kernel.arch == arch || (kernel.and_later && arch > kernel.arch);
}

/// True if the entry implements `desc`'s operation and is compiled for the device.
template <class Desc>
bool is_candidate(const Kernel<Desc>& kernel, const Desc& desc, const DeviceTraits& device) {
  return std::string_view(kernel.op) == op_name(desc) && runs_on(kernel, device.arch);
}

/// Does `wanted` (Options::kernel) select the entry `name`, compiled for `arch`? It does if it is
/// empty, the name, or the name's beginning up to a dot: "cpu" and "cpu.up_proj" select
/// "cpu.up_proj". "cuda" selects every architecture but the CPU.
bool kernel_matches(std::string_view wanted, std::string_view name, int arch);

template <class Desc>
struct Choice {
  const Kernel<Desc>* kernel = nullptr;  ///< null if nothing fits
  std::string walk;                      ///< one line per candidate: whether it runs, and why not
};

/// Walks the kernel list over the candidates that `wanted` selects. Chooses the first entry that
/// neither rejects nor defers; if all that do not reject defer, the first of those.
template <class Desc>
Choice<Desc> choose_kernel(const Desc& desc, const DeviceTraits& device, const std::string& wanted);

}  // namespace sonicmoe
