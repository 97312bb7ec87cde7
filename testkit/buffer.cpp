#include "testkit/buffer.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "testkit/device_memory.h"

#if defined(__SANITIZE_ADDRESS__)  // GCC
#define SONICMOE_HAS_ASAN
#elif defined(__has_feature)  // Clang
#if __has_feature(address_sanitizer)
#define SONICMOE_HAS_ASAN
#endif
#endif

#if defined(SONICMOE_HAS_ASAN)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size)
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

namespace sonicmoe::testkit {
namespace {

constexpr std::size_t kGuard = 256;

void fill(std::byte* begin, std::size_t size) {
  constexpr std::byte kPoison[] = {std::byte{0xa5}, std::byte{0x7f}};
  for (std::size_t done = 0; done < size;) {  // doubles what is filled
    const std::byte* from = done == 0 ? kPoison : begin;
    const std::size_t count = std::min(done == 0 ? 2 : done, size - done);
    std::memcpy(begin + done, from, count);
    done += count;
  }
}

bool filled(const std::byte* begin, std::size_t size) {
  if (size == 0) return true;
  if (begin[0] != std::byte{0xa5} || (size > 1 && begin[1] != std::byte{0x7f})) return false;
  return size <= 2 || std::memcmp(begin, begin + 2, size - 2) == 0;  // period 2
}

}  // namespace

GuardedBuffer::GuardedBuffer(std::size_t bytes, std::size_t alignment, Device device)
    : device_(device), bytes_(bytes) {
  size_ = bytes + 2 * kGuard + 2 * alignment;
  raw_ = static_cast<std::byte*>(allocate({}, size_));
  memory_ = raw_;
  if (device.type != DeviceType::cpu) memory_ = static_cast<std::byte*>(allocate(device, size_));
  // An odd multiple of the alignment.
  const auto base = reinterpret_cast<std::uintptr_t>(memory_) + kGuard;
  const std::uintptr_t start = (base / alignment + 1) * alignment;
  offset_ = start - reinterpret_cast<std::uintptr_t>(memory_);
  if (start / alignment % 2 == 0) offset_ += alignment;
  fill(raw_ + offset_ - kGuard, kGuard);
  fill(raw_ + offset_, bytes_);
  fill(raw_ + offset_ + bytes_, kGuard);
  if (!on_host()) {
    copy(device_, memory_ + offset_ - kGuard, raw_ + offset_ - kGuard, bytes_ + 2 * kGuard);
    return;
  }
  ASAN_POISON_MEMORY_REGION(raw_ + offset_ - kGuard, kGuard);
  ASAN_POISON_MEMORY_REGION(raw_ + offset_ + bytes_, kGuard);
}

GuardedBuffer::~GuardedBuffer() {
  ASAN_UNPOISON_MEMORY_REGION(raw_, size_);
  if (!on_host()) release(device_, memory_);
  release({}, raw_);
}

void GuardedBuffer::download() const {
  if (on_host()) return;
  copy(device_, raw_ + offset_ - kGuard, memory_ + offset_ - kGuard, bytes_ + 2 * kGuard);
}

std::span<std::byte> GuardedBuffer::bytes() const {
  download();
  return {raw_ + offset_, bytes_};
}

void GuardedBuffer::put(std::span<const std::byte> contents) const {
  if (contents.size() > bytes_) throw std::invalid_argument("more than the buffer holds");
  copy(device_, memory_ + offset_, contents.data(), contents.size());
}

void GuardedBuffer::poison() const {
  fill(raw_ + offset_, bytes_);
  if (!on_host()) copy(device_, memory_ + offset_, raw_ + offset_, bytes_);
}

bool GuardedBuffer::untouched() const {
  const std::span<const std::byte> now = bytes();
  return filled(now.data(), now.size());
}

bool GuardedBuffer::intact() const {
  download();
  ASAN_UNPOISON_MEMORY_REGION(raw_, size_);
  const bool result =
      filled(raw_ + offset_ - kGuard, kGuard) && filled(raw_ + offset_ + bytes_, kGuard);
  if (on_host()) {
    ASAN_POISON_MEMORY_REGION(raw_ + offset_ - kGuard, kGuard);
    ASAN_POISON_MEMORY_REGION(raw_ + offset_ + bytes_, kGuard);
  }
  return result;
}

const void* Arena::input(const std::string& name, std::span<const std::byte> bytes,
                         std::size_t alignment) {
  Entry& entry = entries_.emplace_back(name, bytes.size(), alignment, device_, true);
  entry.original.assign(bytes.begin(), bytes.end());
  entry.buffer.put(bytes);
  return entry.buffer.data();
}

void Arena::replace(const std::string& name, std::span<const std::byte> bytes) {
  for (Entry& entry : entries_) {
    if (entry.name != name) continue;
    entry.original.assign(bytes.begin(), bytes.end());
    entry.buffer.put(bytes);
    return;
  }
  throw std::out_of_range("no buffer named " + name);
}

const void* Arena::input(const std::string& name, const Tensor& values, DType type) {
  return input(name, encode(values, type));
}

const std::int32_t* Arena::input(const std::string& name, const std::vector<std::int32_t>& values) {
  return static_cast<const std::int32_t*>(
      input(name, std::as_bytes(std::span(values)), alignof(std::int32_t)));
}

void* Arena::output(const std::string& name, std::size_t bytes, std::size_t alignment) {
  return entries_.emplace_back(name, bytes, alignment, device_, false).buffer.data();
}

const GuardedBuffer& Arena::operator[](const std::string& name) const {
  for (const Entry& entry : entries_) {
    if (entry.name == name) return entry.buffer;
  }
  throw std::out_of_range("no buffer named " + name);
}

Tensor Arena::tensor(const std::string& name, DType type) const {
  return decode((*this)[name].bytes(), type);
}

std::vector<std::int32_t> Arena::int32(const std::string& name) const {
  const std::span<const std::byte> bytes = (*this)[name].bytes();
  std::vector<std::int32_t> values(bytes.size() / sizeof(std::int32_t));
  std::copy(bytes.begin(), bytes.end(), std::as_writable_bytes(std::span(values)).begin());
  return values;
}

std::string Arena::damage() const {
  for (const Entry& entry : entries_) {
    if (!entry.buffer.intact()) return "wrote outside the bounds of " + entry.name;
    if (entry.is_input && !std::ranges::equal(entry.buffer.bytes(), entry.original)) {
      return "changed the input " + entry.name;
    }
  }
  return "";
}

bool Arena::outputs_untouched() const {
  return std::all_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.is_input || entry.buffer.untouched(); });
}

}  // namespace sonicmoe::testkit
