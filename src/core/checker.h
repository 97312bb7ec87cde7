#pragma once

#include <algorithm>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/activation_table.h"
#include "core/enum_names.h"
#include "sonicmoe/ops.h"
#include "sonicmoe/status.h"
#include "sonicmoe/types.h"

namespace sonicmoe {

// Kernels index rows and tokens by int32. The other bounds keep every byte count inside 63 bits.
inline constexpr std::int64_t kMaxIndex = INT32_MAX;
inline constexpr std::int64_t kMaxWidth = std::int64_t{1} << 20;
inline constexpr std::int64_t kMaxExperts = std::int64_t{1} << 16;
inline constexpr std::size_t kTensorAlignment = 16;

/// A chain of checks. status() is the error of the first check that fails.
class Checker {
 public:
  /// `tensor_alignment`: of tensors for which a check names none, in bytes.
  explicit Checker(std::size_t tensor_alignment = kTensorAlignment)
      : tensor_alignment_(tensor_alignment) {}

  Status status() const { return status_; }
  /// In bytes, of a tensor of a type that need not be the Checker's own.
  std::size_t alignment_of(DType dtype) const {
    return std::max(tensor_alignment_, size_of(dtype));
  }

  Checker& range(const char* argument, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (!status_.ok() || (value >= low && value <= high)) return *this;
    if (low == high) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "%s: got %" PRId64 ", allowed: %" PRId64, argument, value, low);
    } else {
      status_ = Status::error(StatusCode::invalid_argument,
                              "%s: got %" PRId64 ", allowed: %" PRId64 " to %" PRId64, argument,
                              value, low, high);
    }
    return *this;
  }

  Checker& width(const char* argument, std::int64_t value) {
    if (status_.ok() && (value < 8 || value > kMaxWidth || value % 8 != 0)) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "%s: got %" PRId64 ", allowed: multiples of 8 from 8 to %" PRId64,
                              argument, value, kMaxWidth);
    }
    return *this;
  }

  Checker& tokens(std::int64_t value) { return range("tokens", value, 0, kMaxIndex); }
  Checker& experts(std::int64_t value) { return range("experts", value, 1, kMaxExperts); }

  Checker& top_k(std::int64_t value, std::int64_t experts) {
    if (status_.ok() && (value < 1 || value > experts)) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "top_k: got %" PRId64 ", allowed: 1 to experts (%" PRId64 ")", value,
                              experts);
    }
    return *this;
  }

  Checker& rows(std::int64_t tokens, std::int64_t top_k) {
    if (status_.ok() && tokens * top_k > kMaxIndex) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "tokens * top_k: got %" PRId64 ", allowed: at most %" PRId64,
                              tokens * top_k, kMaxIndex);
    }
    return *this;
  }
  /// Rows of a router mode: one for each pair. Call rows() first, which refuses a product that
  /// overflows.
  Checker& all_rows(std::int64_t value, std::int64_t tokens, std::int64_t top_k) {
    return status_.ok() ? range("rows", value, tokens * top_k, tokens * top_k) : *this;
  }
  /// The same of an operation that leaves out pairs without a row.
  Checker& some_rows(std::int64_t value, std::int64_t tokens, std::int64_t top_k) {
    return status_.ok() ? range("rows", value, 0, tokens * top_k) : *this;
  }

  /// `allowed` replaces all_names() in the text, for a descriptor that takes only some values.
  template <class Enum>
  Checker& known(const char* argument, Enum value, const char* allowed = nullptr) {
    if (status_.ok() && name(value)[0] == '?') {
      status_ = Status::error(StatusCode::invalid_argument, "%s: got %d, allowed: %s", argument,
                              static_cast<int>(value),
                              allowed != nullptr ? allowed : all_names<Enum>().c_str());
    }
    return *this;
  }

  Checker& dtype(DType value) { return known("dtype", value); }
  Checker& activation(const ActivationSpec& value) {
    if (!status_.ok()) return *this;
    const std::string reason = refusal(value);
    if (!reason.empty())
      status_ = Status::error(StatusCode::invalid_argument, "%s", reason.c_str());
    return *this;
  }
  Checker& layout(W1Layout value, const ActivationSpec& activation) {
    known("w1_layout", value);
    require(
        value != W1Layout::separate || is_glu(activation), "w1_layout", "separate",
        "interleaved, concatenated, transposed, transposed_interleaved for an activation without "
        "a gate");
    return *this;
  }

  Checker& require(bool condition, const char* argument, const char* value, const char* allowed) {
    if (status_.ok() && !condition) {
      status_ = Status::error(StatusCode::invalid_argument, "%s: got %s, allowed: %s", argument,
                              value, allowed);
    }
    return *this;
  }

  /// A tensor of `elements` elements that the call reads or writes. An empty one may be null.
  /// `alignment` 0: the Checker's own.
  Checker& tensor(const char* argument, const void* pointer, std::int64_t elements,
                  const char* shape, std::size_t alignment = 0) {
    if (!status_.ok() || elements == 0) return *this;
    if (alignment == 0) alignment = tensor_alignment_;
    if (pointer == nullptr) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "%s: got null, allowed: a pointer to %s", argument, shape);
    } else if (reinterpret_cast<std::uintptr_t>(pointer) % alignment != 0) {
      status_ = Status::error(StatusCode::invalid_argument,
                              "%s: got address %p, allowed: multiples of %zu bytes", argument,
                              pointer, alignment);
    }
    return *this;
  }
  Checker& ints(const char* argument, const void* pointer, std::int64_t elements,
                const char* shape) {
    return tensor(argument, pointer, elements, shape, 4);
  }
  /// May be null, but not misaligned.
  Checker& optional(const char* argument, const void* pointer, std::int64_t elements,
                    std::size_t alignment = 0) {
    return pointer == nullptr ? *this : tensor(argument, pointer, elements, "", alignment);
  }

  /// W1, dW1: one tensor, or two.
  Checker& up_weights(const char* argument, const char* up_argument, const void* pointer,
                      const void* up_pointer, const ExpertsDesc& d, std::size_t alignment = 0) {
    const bool two = d.w1_layout == W1Layout::separate;
    tensor(argument, pointer, 1,
           two              ? "the gate rows (E, n, d)"
           : d.transposed() ? "(E, d, 2n or n)"
                            : "(E, 2n or n, d)",
           alignment);
    if (two) tensor(up_argument, up_pointer, 1, "the up rows (E, n, d)", alignment);
    return *this;
  }
  Checker& up_bias(const char* argument, const char* up_argument, const void* pointer,
                   const void* up_pointer, const ExpertsDesc& d) {
    const bool two = d.w1_layout == W1Layout::separate;
    tensor(argument, pointer, 1, two ? "the gate biases (E, n)" : "(E, 2n or n)");
    if (two) tensor(up_argument, up_pointer, 1, "the up biases (E, n)");
    return *this;
  }
  /// W2, dW2.
  Checker& down_weights(const char* argument, const void* pointer, const ExpertsDesc& d,
                        std::size_t alignment = 0) {
    return tensor(argument, pointer, 1, d.transposed() ? "(E, n, d)" : "(E, d, n)", alignment);
  }

 private:
  std::size_t tensor_alignment_;
  Status status_;
};

}  // namespace sonicmoe
