#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "verify/numbers.h"

namespace sonicmoe::verify {

/// Host memory aligned to exactly `alignment` (and no better), filled with poison, between two
/// guard bands of the same poison. 16-bit words 0x7fa5 are NaN in fp32, bf16 and fp16, and an index
/// far out of range in int32: whoever reads past the end or before writing gets caught by the
/// result, whoever writes outside by intact(). The address sanitizer is told about the bands.
class GuardedBuffer {
 public:
  explicit GuardedBuffer(std::size_t bytes, std::size_t alignment = 16);
  ~GuardedBuffer();
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  /// Null when the buffer has no bytes.
  void* data() const { return bytes_ == 0 ? nullptr : raw_ + offset_; }
  std::span<std::byte> bytes() const { return {raw_ + offset_, bytes_}; }
  void poison();
  /// Nobody wrote to the guard bands.
  bool intact() const;
  /// Every byte still holds poison.
  bool untouched() const;

 private:
  std::byte* raw_;
  std::size_t size_, offset_, bytes_;
};

/// The tensors of one call, each in a guarded buffer of its exact size. An empty tensor is null.
class Arena {
 public:
  const void* input(const std::string& name, std::span<const std::byte> bytes,
                    std::size_t alignment = 16);
  const void* input(const std::string& name, const Tensor& values, DType type);
  const std::int32_t* input(const std::string& name, const std::vector<std::int32_t>& values);
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
    Entry(std::string label, std::size_t bytes, std::size_t alignment, bool input)
        : name(std::move(label)), buffer(bytes, alignment), is_input(input) {}
    std::string name;
    GuardedBuffer buffer;
    bool is_input;
    std::vector<std::byte> original;  // inputs: what was put in
  };
  std::deque<Entry> entries_;
};

}  // namespace sonicmoe::verify
