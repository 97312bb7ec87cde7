#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace sonicmoe {

/// Books named regions of one workspace while a plan is made. Calls find a region by its offset.
///
/// Regions whose contents are never needed at the same time may share memory: `restart_at` moves
/// the end of the book back, and size() is the highest end.
class Ledger {
 public:
  static constexpr std::size_t kAlignment = 256;

  /// Books a region at the end and returns its offset, a multiple of kAlignment bytes.
  std::size_t book(const char* region, std::size_t bytes) {
    const std::size_t offset = end_;
    end_ = offset + (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (end_ > size_) size_ = end_;
    lines_.push_back({region, offset, bytes});
    return offset;
  }
  std::size_t end() const { return end_; }
  void restart_at(std::size_t offset) { end_ = offset; }
  std::size_t size() const { return size_; }

  /// "<what> workspace, 512 bytes", then a line for each region: offset, bytes, name.
  std::string explain(const char* what) const {
    std::string text = std::string(what) + " workspace, " + std::to_string(size_) + " bytes\n";
    for (const Line& line : lines_) {
      text += "  " + std::to_string(line.offset) + " + " + std::to_string(line.bytes) + " " +
              line.region + "\n";
    }
    return text;
  }

 private:
  struct Line {
    const char* region;
    std::size_t offset;
    std::size_t bytes;
  };
  std::size_t end_ = 0;
  std::size_t size_ = 0;
  std::vector<Line> lines_;
};

}  // namespace sonicmoe
