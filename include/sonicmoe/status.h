#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "sonicmoe/export.h"

namespace sonicmoe {

/// Why a call was refused or failed.
enum class StatusCode : std::int32_t {
  ok = 0,
  invalid_argument,  ///< a size, enum, pointer or combination is not allowed
  unsupported,       ///< allowed, but no compiled kernel runs it on this device
  invalid_data,      ///< the contents of an input are not allowed (NaN logits, ids out of range)
  device_error,      ///< the device reported an error; see Status::device_code()
  out_of_memory,     ///< make_plan got no host memory
};

/// The outcome of a call: a code, one line of text that names the argument, its value and what is
/// allowed, and the device's own error code if there is one. The text lives inside the object, so
/// making, copying and returning a Status never allocates.
class [[nodiscard, gnu::visibility("default")]] Status {
 public:
  constexpr Status() noexcept = default;

  /// printf-style; text past 255 characters is cut.
  [[gnu::format(printf, 2, 3)]] static Status error(StatusCode code, const char* format,
                                                    ...) noexcept;
  /// A device_error with the device's own code; `what` names the operation and its failed step.
  static Status device(int device_code, const char* what) noexcept;

  constexpr bool ok() const noexcept { return code_ == StatusCode::ok; }
  constexpr StatusCode code() const noexcept { return code_; }
  constexpr int device_code() const noexcept { return device_code_; }
  constexpr const char* message() const noexcept { return text_; }

 private:
  StatusCode code_ = StatusCode::ok;
  int device_code_ = 0;
  char text_[256] = {};
};

/// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}               // NOLINT: implicit by design
  Result(const Status& status) noexcept : status_(status) {}  // NOLINT: implicit by design

  bool ok() const noexcept { return value_.has_value(); }
  const Status& status() const noexcept { return status_; }

  /// Precondition: ok().
  T& value() & noexcept { return *value_; }
  const T& value() const& noexcept { return *value_; }
  T&& value() && noexcept { return std::move(*value_); }
  T* operator->() noexcept { return &*value_; }
  const T* operator->() const noexcept { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace sonicmoe
