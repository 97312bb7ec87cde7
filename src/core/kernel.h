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
#include "sonicmoe/token_rounding.h"
#include "sonicmoe/types.h"

namespace sonicmoe {

/// Where and how a call runs; fixed when the plan is made, but for the stream.
struct Exec {
  Device device;
  DeviceTraits traits = {};
  int threads = 1;
  bool checked = true;
  Stream stream = {};
  Handoff handoff = {};  ///< what is set for this call of this operation
};

/// A set of dtypes: those that a kernel takes.
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
  /// "cpu.up_proj", "sm90.up_proj.128x256": what it is compiled for, operation, which of several.
  const char* name;
  /// DeviceTraits::arch of the devices it runs on: those alone. 0: the CPU.
  int arch = 0;
  /// What Desc::dtype may be; a dtype that is not listed is refused. Unused without such a field.
  DTypes dtypes = {};
  /// Optional. Empty if the kernel runs `desc` on such a device of this machine, else the reason
  /// why not.
  std::string (*reject)(const Desc& desc, const DeviceTraits& device) = nullptr;
  /// Optional. Why a later entry is better for `desc`, or empty. Not asked when the options name
  /// this very entry; of no weight when no later entry takes it.
  std::string (*defer)(const Desc& desc, const DeviceTraits& device) = nullptr;
  /// Optional. Bytes of workspace; none if null.
  std::size_t (*workspace)(const Desc& desc, const Exec& exec) = nullptr;
  /// Optional. Done once, when a plan is made and this kernel was chosen: function attributes.
  Status (*prepare)(const Desc& desc, const Exec& exec) = nullptr;
  /// `workspace` has at least the bytes promised. Arguments are validated.
  Status (*run)(const Desc& desc, const typename Desc::Args& args, void* workspace,
                const Exec& exec) noexcept;
};

/// All kernels of a kind of operation, best first. Defined in kernel_list.cpp; nothing else
/// decides.
template <class Desc>
std::span<const Kernel<Desc>* const> kernel_list();

/// The operation a descriptor asks for: "up_proj", "top_k", ...
const char* op_name(const RouterGemmDesc& desc);
const char* op_name(const TopKDesc& desc);
const char* op_name(const MetadataDesc& desc);
const char* op_name(const GroupedGemmDesc& desc);
const char* op_name(const BiasGradDesc& desc);
const char* op_name(const AggregateDesc& desc);
const char* op_name(const ScoreGradDesc& desc);
const char* op_name(const AuxLossDesc& desc);
const char* op_name(const TokenRoundingDesc& desc);
const char* op_name(const TokenRoundingGradDesc& desc);

/// Makes the device of a call the current one of this thread, and puts the old one back.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to put back
};

/// Copies within the memory of a call's device, in the order of its stream.
Status copy(void* to, const void* from, std::size_t bytes, const Exec& exec) noexcept;

/// Why no kernel of this build runs on `device`, or empty.
std::string device_reason(Device device);
/// The part of it that asks no driver: why none is compiled for a CUDA device's architecture.
std::string architecture_reason(int arch);
/// Of a device that device_reason() has nothing against.
DeviceTraits device_traits(Device device);

/// f(kernel) for every entry of every list, in order.
template <class F>
void for_each_kernel(F&& f) {
  const auto each = [&](const auto& list) {
    for (const auto* kernel : list) f(*kernel);
  };
  each(kernel_list<RouterGemmDesc>());
  each(kernel_list<TopKDesc>());
  each(kernel_list<MetadataDesc>());
  each(kernel_list<GroupedGemmDesc>());
  each(kernel_list<BiasGradDesc>());
  each(kernel_list<AggregateDesc>());
  each(kernel_list<ScoreGradDesc>());
  each(kernel_list<AuxLossDesc>());
  each(kernel_list<TokenRoundingDesc>());
  each(kernel_list<TokenRoundingGradDesc>());
}

/// True if the entry is of `desc`'s operation, and compiled for the device.
template <class Desc>
bool is_candidate(const Kernel<Desc>& kernel, const Desc& desc, const DeviceTraits& device) {
  return std::string_view(kernel.op) == op_name(desc) && kernel.arch == device.arch;
}

/// True if `wanted` (Options::kernel) is empty, the name of an entry for `arch`, or where that name
/// begins: "cpu" and "cpu.up_proj" match "cpu.up_proj". "cuda" matches every architecture but the
/// CPU.
bool kernel_matches(std::string_view wanted, std::string_view name, int arch);

template <class Desc>
struct Choice {
  const Kernel<Desc>* kernel = nullptr;  ///< null if nothing fits
  std::string walk;                      ///< one line per entry looked at
};

/// Walks the kernel list: the first entry of this op and architecture that matches, does not reject
/// and does not defer; if all of them defer, the first.
template <class Desc>
Choice<Desc> choose_kernel(const Desc& desc, const DeviceTraits& device, const std::string& wanted);

}  // namespace sonicmoe
