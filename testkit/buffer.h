#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "testkit/numbers.h"

namespace sonicmoe::testkit {

/// Memory of a device, aligned to exactly `alignment` (and no better), filled with poison, between
/// two guard bands of the same poison. 16-bit words 0x7fa5 are NaN in fp32, bf16 and fp16, and an
/// index far out of range in int32: whoever reads past the end or before writing gets caught by the
/// result, whoever writes outside by intact(). On the CPU the address sanitizer is told about the
/// bands.
class GuardedBuffer {
 public:
  explicit GuardedBuffer(std::size_t bytes, std::size_t alignment = 16, Device device = {});
  ~GuardedBuffer();
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  /// Null when the buffer has no bytes.
  void* data() const { return bytes_ == 0 ? nullptr : memory_ + offset_; }
  /// The contents. On another device than the CPU: a copy of what they are now.
  std::span<std::byte> bytes() const;
  /// Replaces the first bytes; the rest stays.
  void put(std::span<const std::byte> contents) const;
  void poison() const;
  /// Nobody wrote to the guard bands.
  bool intact() const;
  /// Every byte still holds poison.
  bool untouched() const;

 private:
  bool on_host() const { return memory_ == raw_; }
  void download() const;

  Device device_;
  std::byte* raw_;     // on the host, laid out like memory_
  std::byte* memory_;  // what data() points into; raw_ itself on the CPU
  std::size_t size_, offset_, bytes_;
};

/// The tensors of one call, each in a guarded buffer of its exact size. An empty tensor is null.
class Arena {
 public:
  explicit Arena(Device device = {}) : device_(device) {}
  const void* input(const std::string& name, std::span<const std::byte> bytes,
                    std::size_t alignment = 16);
  const void* input(const std::string& name, const Tensor& values, DType type);
  const std::int32_t* input(const std::string& name, const std::vector<std::int32_t>& values);
  /// New contents for an input, of the same size.
  void replace(const std::string& name, std::span<const std::byte> bytes);
  /// Of `bytes` bytes; `alignment` 256 for workspaces.
  void* output(const std::string& name, std::size_t bytes, std::size_t alignment = 16);
  void* output(const std::string& name, std::size_t elements, DType type) {
    return output(name, elements * size_of(type));
  }
  std::int32_t* output_int32(const std::string& name, std::size_t elements) {
    return static_cast<std::int32_t*>(output(name, elements * sizeof(std::int32_t), 4));
  }
  float* output_float(const std::string& name, std::size_t elements) {
    return static_cast<float*>(output(name, elements * sizeof(float)));
  }

  const GuardedBuffer& operator[](const std::string& name) const;
  Tensor tensor(const std::string& name, DType type) const;
  std::vector<std::int32_t> int32(const std::string& name) const;

  /// Which buffer was written outside its bounds, or which input was changed; "" if none.
  std::string damage() const;
  /// Every output still holds its poison.
  bool outputs_untouched() const;

 private:
  struct Entry {
    Entry(std::string label, std::size_t bytes, std::size_t alignment, Device device, bool input)
        : name(std::move(label)), buffer(bytes, alignment, device), is_input(input) {}
    std::string name;
    GuardedBuffer buffer;
    bool is_input;
    std::vector<std::byte> original;  // inputs: what was put in
  };
  Device device_;
  std::deque<Entry> entries_;
};

}  // namespace sonicmoe::testkit
