#include "verify/buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

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

namespace sonicmoe::verify {
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

GuardedBuffer::GuardedBuffer(std::size_t bytes, std::size_t alignment) : bytes_(bytes) {
  size_ = bytes + 2 * kGuard + 2 * alignment;
  raw_ = static_cast<std::byte*>(std::malloc(size_));
  if (raw_ == nullptr) throw std::bad_alloc();
  // An odd multiple of the alignment.
  const auto base = reinterpret_cast<std::uintptr_t>(raw_) + kGuard;
  const std::uintptr_t start = (base / alignment + 1) * alignment;
  offset_ = start - reinterpret_cast<std::uintptr_t>(raw_);
  if (start / alignment % 2 == 0) offset_ += alignment;
  fill(raw_ + offset_ - kGuard, kGuard);
  fill(raw_ + offset_, bytes_);
  fill(raw_ + offset_ + bytes_, kGuard);
  ASAN_POISON_MEMORY_REGION(raw_ + offset_ - kGuard, kGuard);
  ASAN_POISON_MEMORY_REGION(raw_ + offset_ + bytes_, kGuard);
}

GuardedBuffer::~GuardedBuffer() {
  ASAN_UNPOISON_MEMORY_REGION(raw_, size_);
  std::free(raw_);
}

void GuardedBuffer::poison() { fill(raw_ + offset_, bytes_); }

bool GuardedBuffer::untouched() const { return filled(raw_ + offset_, bytes_); }

bool GuardedBuffer::intact() const {
  ASAN_UNPOISON_MEMORY_REGION(raw_, size_);
  const bool result =
      filled(raw_ + offset_ - kGuard, kGuard) && filled(raw_ + offset_ + bytes_, kGuard);
  ASAN_POISON_MEMORY_REGION(raw_ + offset_ - kGuard, kGuard);
  ASAN_POISON_MEMORY_REGION(raw_ + offset_ + bytes_, kGuard);
  return result;
}

const void* Arena::input(const std::string& name, std::span<const std::byte> bytes,
                         std::size_t alignment) {
  Entry& entry = entries_.emplace_back(name, bytes.size(), alignment, true);
  entry.original.assign(bytes.begin(), bytes.end());
  std::copy(bytes.begin(), bytes.end(), entry.buffer.bytes().begin());
  return entry.buffer.data();
}

const void* Arena::input(const std::string& name, const Tensor& values, DType type) {
  return input(name, encode(values, type));
}

const std::int32_t* Arena::input(const std::string& name, const std::vector<std::int32_t>& values) {
  return static_cast<const std::int32_t*>(
      input(name, std::as_bytes(std::span(values)), alignof(std::int32_t)));
}

void* Arena::output(const std::string& name, std::size_t bytes, std::size_t alignment) {
  return entries_.emplace_back(name, bytes, alignment, false).buffer.data();
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

}  // namespace sonicmoe::verify
