// Rows of tokens, written to the ranks that they go to.
#include <algorithm>
#include <cstring>

#include "core/backends.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"

namespace sonicmoe::cpu {
namespace {

Status run(const SendRowsDesc& d, const SendRowsArgs& a, void*, const Exec& exec) noexcept {
  const auto row_bytes = static_cast<std::size_t>(d.hidden) * size_of(d.dtype);
  const char* const x = static_cast<const char*>(a.x);
  for (std::int64_t rank = 0; rank < d.ranks; ++rank) {
    const std::int32_t* const tokens = a.row_tokens + rank * d.tokens;
    char* const to = static_cast<char*>(a.to[rank]);
    const std::int64_t rows = std::min<std::int64_t>(a.counts[rank], d.tokens);
    parallel_ranges(exec.threads, rows, kTokensPerPiece,
                    [&](int, std::int64_t begin, std::int64_t end) {
                      for (std::int64_t i = begin; i < end; ++i) {
                        if (tokens[i] < 0 || tokens[i] >= d.tokens) continue;
                        const auto token = static_cast<std::size_t>(tokens[i]);
                        std::memcpy(to + static_cast<std::size_t>(i) * row_bytes,
                                    x + token * row_bytes, row_bytes);
                      }
                    });
  }
  return {};
}

}  // namespace

const Kernel<SendRowsDesc> kSendRows = {
    .op = "send_rows",
    .name = "cpu.send_rows",
    .dtypes = kStorageTypes,
    .run = run,
};

}  // namespace sonicmoe::cpu
