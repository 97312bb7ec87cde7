#include "buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>

#include "testkit/device_memory.h"
#include "testkit/numbers.h"

namespace sonicmoe::cli {

Buffer::Buffer(std::size_t bytes, Device device)
    : data_(nullptr, Free{device}), bytes_(bytes), device_(device) {
  if (bytes == 0) return;
  constexpr std::size_t kAlignment = 256;
  const std::size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const bool host = device.type == DeviceType::cpu;
  data_.reset(host ? std::aligned_alloc(kAlignment, padded) : testkit::allocate(device, padded));
  if (data_ == nullptr) throw std::bad_alloc();
  testkit::zero(device, data(), padded);
}

void Buffer::Free::operator()(void* data) const { testkit::release(device, data); }

void Buffer::upload(const void* from, std::size_t bytes, std::size_t offset) const {
  testkit::copy(device_, as<std::byte>() + offset, from, bytes);
}

void Buffer::download(void* to, std::size_t bytes) const {
  testkit::copy(device_, to, data(), bytes);
}

Buffer make_tensor(std::int64_t elements, DType dtype, Device device) {
  return Buffer(static_cast<std::size_t>(elements) * size_of(dtype), device);
}

Buffer make_random(std::int64_t elements, DType dtype, double scale, std::uint64_t seed,
                   Device device) {
  Buffer buffer = make_tensor(elements, dtype, device);
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0.0, scale);
  // A device gets the same numbers again and again: drawing all of them would take minutes. Their
  // count is prime, so of fewer rows than that no two begin at the same number.
  constexpr std::int64_t kDrawn = (1 << 22) - 3;
  const std::int64_t drawn = device.type == DeviceType::cpu ? elements : std::min(elements, kDrawn);
  // In pieces: the doubles of a whole weight tensor would be four times its size.
  testkit::Tensor piece;
  for (std::int64_t done = 0; done < drawn; done += static_cast<std::int64_t>(piece.size())) {
    piece.resize(static_cast<std::size_t>(std::min<std::int64_t>(drawn - done, 1 << 16)));
    for (double& value : piece) value = normal(engine);
    const auto bytes = testkit::encode(piece, dtype);
    buffer.upload(bytes.data(), bytes.size(), static_cast<std::size_t>(done) * size_of(dtype));
  }
  for (std::int64_t done = drawn; done < elements;) {
    const std::int64_t count = std::min(elements - done, drawn);
    buffer.upload(buffer.data(), static_cast<std::size_t>(count) * size_of(dtype),
                  static_cast<std::size_t>(done) * size_of(dtype));
    done += count;
  }
  return buffer;
}

}  // namespace sonicmoe::cli
