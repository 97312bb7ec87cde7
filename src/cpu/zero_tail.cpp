// Zeros in the rows that no expert owns: before, between and behind the experts' segments.
#include <cstring>

#include "core/backends.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"

namespace sonicmoe::cpu {
namespace {

Status run(const ZeroTailDesc& d, const ZeroTailArgs& a, void*, const Exec& exec) noexcept {
  const std::int64_t row_bytes = d.hidden * static_cast<std::int64_t>(size_of(d.dtype));
  const auto clear = [&](std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    if (a.values != nullptr) std::fill(a.values + begin, a.values + end, 0.0f);
    if (a.rows == nullptr) return;
    char* const rows = static_cast<char*>(a.rows) + begin * row_bytes;
    parallel_ranges(exec.threads, end - begin, kTokensPerPiece,
                    [&](int, std::int64_t first, std::int64_t last) {
                      std::memset(rows + first * row_bytes, 0,
                                  static_cast<std::size_t>((last - first) * row_bytes));
                    });
  };
  std::int64_t from = 0;
  for (std::int64_t e = 0; e < d.experts; ++e) {
    clear(from, a.begins[e]);
    from = a.ends[e];
  }
  clear(from, d.rows);
  return {};
}

}  // namespace

const Kernel<ZeroTailDesc> kZeroTail = {
    .op = "zero_tail",
    .name = "cpu.zero_tail",
    .dtypes = kStorageTypes,
    .run = run,
};

}  // namespace sonicmoe::cpu
