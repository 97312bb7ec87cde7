#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "sonicmoe/types.h"

namespace sonicmoe::cli {

/// Zeroed memory of a device, aligned for tensors and workspaces. Zeroing also touches the pages,
/// so that no page fault is timed.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes, Device device = {});

  /// Null when empty, as the library allows.
  void* data() const { return data_.get(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }
  std::size_t bytes() const { return bytes_; }
  Workspace workspace() const { return {data(), bytes_}; }

  /// From and to the host, as many bytes as are named.
  void upload(const void* from, std::size_t bytes, std::size_t offset = 0) const;
  void download(void* to, std::size_t bytes) const;
  template <class T>
  std::vector<T> contents() const {
    std::vector<T> all(bytes_ / sizeof(T));
    download(all.data(), all.size() * sizeof(T));
    return all;
  }

 private:
  struct Free {
    Device device;
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
  std::size_t bytes_ = 0;
  Device device_;
};

Buffer make_tensor(std::int64_t elements, DType dtype, Device device = {});
/// Normally distributed with standard deviation `scale`. Equal seeds give equal tensors. On CUDA a
/// large tensor repeats 2^22 - 3 numbers.
Buffer make_random(std::int64_t elements, DType dtype, double scale, std::uint64_t seed,
                   Device device = {});

}  // namespace sonicmoe::cli
