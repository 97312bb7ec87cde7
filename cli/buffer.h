#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "sonicmoe/types.h"

namespace sonicmoe::cli {

/// Zeroed host memory, aligned for tensors and workspaces. Zeroing also touches the pages, so that
/// no page fault is timed.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes);

  /// Null when empty, as the library allows.
  void* data() const { return data_.get(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }
  std::size_t bytes() const { return bytes_; }
  Workspace workspace() const { return {data(), bytes_}; }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<void, Free> data_;
  std::size_t bytes_ = 0;
};

Buffer make_tensor(std::int64_t elements, DType dtype);
/// Normally distributed with standard deviation `scale`. Equal seeds give equal tensors.
Buffer make_random(std::int64_t elements, DType dtype, double scale, std::uint64_t seed);

}  // namespace sonicmoe::cli
