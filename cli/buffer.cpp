#include "buffer.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "verify/numbers.h"

namespace sonicmoe::cli {
Buffer::Buffer(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  constexpr std::size_t kAlignment = 256;
  const std::size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  data_.reset(std::aligned_alloc(kAlignment, padded));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data(), 0, padded);
}

Buffer make_tensor(std::int64_t elements, DType dtype) {
  return Buffer(static_cast<std::size_t>(elements) * size_of(dtype));
}

Buffer make_random(std::int64_t elements, DType dtype, double scale, std::uint64_t seed) {
  Buffer buffer = make_tensor(elements, dtype);
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0.0, scale);
  // In pieces: the doubles of a whole weight tensor would be four times its size.
  verify::Tensor piece;
  for (std::int64_t done = 0; done < elements; done += static_cast<std::int64_t>(piece.size())) {
    piece.resize(static_cast<std::size_t>(std::min<std::int64_t>(elements - done, 1 << 16)));
    for (double& value : piece) value = normal(engine);
    const auto bytes = verify::encode(piece, dtype);
    std::memcpy(buffer.as<std::byte>() + static_cast<std::size_t>(done) * size_of(dtype),
                bytes.data(), bytes.size());
  }
  return buffer;
}

}  // namespace sonicmoe::cli
