#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/sm90/traits.cuh"

/// Gather of operand A along M, by the producer's 128 threads. A gather object serves one tile.
/// look_up() reads its tokens earlier, during the tile before.
namespace sonicmoe::cuda {

/// Rows of a (T, width) tensor by token id, along M: a stage gets 128 rows x 64 k, K contiguous.
/// Eight threads copy the 128 bytes of a row; thread t copies rows t/8, t/8 + 16, ...
///
/// Rows of M do not mix in the products, so lines past the expert's last row may hold anything.
/// They repeat the last row; a group of 32 rows that has none keeps what it had. All copies have
/// one form: beside a second form for partial tiles each copy would wait for a predicate.
///
/// The addresses advance once in kUnroll blocks, and the producer unrolls its loop as often. With
/// kUnroll = 1 the compiler moves each address before its copy, which waits until the copy before
/// has read its own (docs/findings/machine-code.md, 23).
template <int kUnroll>
class GatherM {
 public:
  struct Ahead {
    int token[8];
  };
  static __device__ __forceinline__ Ahead look_up(const OperandA& a, const Tile& tile) {
    const int t = static_cast<int>(threadIdx.x) % kProducerThreads;
    Ahead ahead;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // A tile without rows belongs to an expert that has some, so first_row exists.
      const int row = max(min(tile.m_block * kTileM + t / 8 + 16 * i, tile.rows - 1), 0);
      ahead.token[i] = a.row_tokens[tile.first_row + row];
    }
    return ahead;
  }

  __device__ __forceinline__ GatherM(const OperandA& a, const Tile& tile, const Ahead& ahead) {
    const int t = static_cast<int>(threadIdx.x) % kProducerThreads;
    left_ = a.width - t % 8 * 8;
    rows_ = tile.rows - tile.m_block * kTileM;
    // The swizzle puts 16-byte piece c of line r at piece c ^ (r % 8); this thread's rows agree in
    // r % 8.
    place_ = t / 8 * kLineBytes + ((t % 8) ^ (t / 8 % 8)) * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      from_[i] = static_cast<const char*>(a.rows) +
                 (static_cast<std::int64_t>(ahead.token[i]) * a.width + t % 8 * 8) * 2;
    }
  }

  /// Copies k block `block` to `stage`; called with 0, 1, 2, ... in order.
  __device__ __forceinline__ void load(std::uint32_t stage, int block) {
    const std::uint32_t to = stage + place_;
    const int step = block % kUnroll;  // blocks since the addresses advanced
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // L2 fetches 256 bytes: the next block reads the 128 bytes beside these.
      if (i / 2 * 32 < rows_) {
        copy_async_16_of_256(to + i * 16 * kLineBytes, from_[i] + step * kLineBytes,
                             left_ > step * kTileK);
      }
    }
    if (step + 1 < kUnroll) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) from_[i] += kUnroll * kLineBytes;
      // Keeps each address in a register of its own. In one register for all, a copy would wait
      // until the copy before has read its address.
#pragma unroll
    for (int i = 0; i < 8; ++i) asm volatile("" : "+l"(from_[i]));
    left_ -= kUnroll * kTileK;
  }

 private:
  const char* from_[8];  // this thread's piece of each of its rows
  std::uint32_t place_;  // of the first of them in the stage
  int rows_;             // of the expert from the tile's first on; none if only the peer has some
  int left_;             // columns from this thread's piece on
};

}  // namespace sonicmoe::cuda
