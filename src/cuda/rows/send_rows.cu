// Rows of tokens, written to the ranks that they go to: into memory of other GPUs, too.
#include <algorithm>

#include "core/backends.h"
#include "cuda/device/warp.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTogether = 4;  // pieces of a lane in flight
// Of a multiprocessor. They keep the links busy, and leave room for the kernels of other streams.
constexpr int kBlocks = 2;

struct Parameters {
  SendRowsArgs a;
  std::int64_t rows, tokens;
  int ranks, pieces;  ///< a piece of a row has 16 bytes
  uint4* to[SendRowsDesc::kMostRanks];
};

/// A warp has a row at a time. Neighbours have rows of different ranks, so that all links are busy.
__global__ void __launch_bounds__(kThreads) send(const __grid_constant__ Parameters p) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  wait_for_previous();
  let_next_start();
  for (std::int64_t row = first; row < p.rows; row += std::int64_t{gridDim.x} * kWarps) {
    const auto rank = static_cast<int>(static_cast<std::uint32_t>(row) % p.ranks);
    const std::int64_t i = static_cast<std::uint32_t>(row) / p.ranks;
    if (i >= p.a.counts[rank]) continue;
    const std::int64_t token = p.a.row_tokens[rank * p.tokens + i];
    if (token < 0 || token >= p.tokens) continue;
    const uint4* const from = static_cast<const uint4*>(p.a.x) + token * p.pieces;
    uint4* const to = p.to[rank] + i * p.pieces;
    for (int at = lane_id(); at < p.pieces; at += kTogether * kWarp) {
      uint4 piece[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        piece[j] = load_kept(from + at + j * kWarp, at + j * kWarp < p.pieces);
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (at + j * kWarp < p.pieces) to[at + j * kWarp] = piece[j];
      }
    }
  }
}

Status run(const SendRowsDesc& d, const SendRowsArgs& a, void*, const Exec& exec) noexcept {
  Parameters p{
      .a = a,
      .rows = d.tokens * d.ranks,
      .tokens = d.tokens,
      .ranks = static_cast<int>(d.ranks),
      .pieces = static_cast<int>(d.hidden * static_cast<std::int64_t>(size_of(d.dtype)) / 16),
      .to = {}};
  if (p.rows == 0) return {};
  for (int rank = 0; rank < p.ranks; ++rank) p.to[rank] = static_cast<uint4*>(a.to[rank]);
  const auto most = static_cast<unsigned>(kBlocks * exec.traits.multiprocessors);
  launch_early(send, std::min(blocks_for(p.rows, kWarps), most), kThreads, 0, exec, p);
  return launched("send_rows: launch");
}

}  // namespace

const Kernel<SendRowsDesc> kSendRows = {
    .op = "send_rows",
    .name = "cuda.send_rows",
    .arch = 80,
    .and_later = true,
    .dtypes = kStorageTypes,
    .run = run,
};

}  // namespace sonicmoe::cuda
