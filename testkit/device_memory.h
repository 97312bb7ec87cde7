#pragma once

#include <cstddef>

#include "sonicmoe/status.h"
#include "sonicmoe/types.h"

/// Memory of a device and what happens to it, without its types. On the CPU this is the heap. All
/// but `synchronize` and `in_stream` wait until they are done and throw std::runtime_error with the
/// device's own text.
namespace sonicmoe::testkit {

void* allocate(Device device, std::size_t bytes);
void release(Device device, void* memory) noexcept;
/// Between host and device, either way, or within one of them.
void copy(Device device, void* to, const void* from, std::size_t bytes);
void zero(Device device, void* memory, std::size_t bytes);
/// Bytes that the device has left; 0 on the CPU.
std::size_t free_bytes(Device device);
/// Waits for all that was started. ok, or the first error of it.
Status synchronize(Device device) noexcept;

/// A stream of its own. On the CPU there is none, and everything is done when it returns.
class OwnStream {
 public:
  explicit OwnStream(Device device);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator Stream() const { return {handle_}; }  // NOLINT: implicit by design

 private:
  Device device_;
  void* handle_ = nullptr;
};

/// What a function starts on a stream, recorded once and started again any number of times. CUDA
/// only.
class Graph {
 public:
  static void begin(Device device, Stream stream);
  /// Ends the recording of what has been started on `stream` since begin(). Throws if that is more
  /// than kernels, copies and memsets: memory taken from the device, say, or a call of the host.
  Graph(Device device, Stream stream);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(Stream stream) const;

 private:
  Device device_;
  void* graph_ = nullptr;
};

}  // namespace sonicmoe::testkit
