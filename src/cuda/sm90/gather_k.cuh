#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/sm90/gather_m.cuh"

/// Gather of operand A along K, for the weight gradients; and which gather a kernel has.
namespace sonicmoe::cuda {

/// Stands for a gather where the copy engine loads A.
struct NoGather {
  struct Ahead {};
  static __device__ __forceinline__ Ahead look_up(const OperandA&, const Tile&) { return {}; }
  __device__ NoGather(const OperandA&, const Tile&, const Ahead&) {}
  __device__ __forceinline__ void load(std::uint32_t, int) {}
};

/// Offsets of rows count pieces of 16 bytes, so that 32 bits reach 64 GiB; this one is no row.
inline constexpr std::uint32_t kNoRow = 0xffffffff;

/// `base` + 16 * `pieces` bytes, by shifts and additions. A producer must not execute a wide
/// multiplication (IMAD.WIDE) in every block: it holds up wgmma, probably for the registers' ports.
/// The compiler turns plain shifts into one, but not a funnel shift (docs/findings/machine-code.md,
/// 24; tools/check_machine_code.py).
__device__ __forceinline__ const char* at_piece(const char* base, std::uint32_t pieces) {
  std::uint64_t address;
  asm("{\n.reg .b32 low, high, base_low, base_high;\n"
      "mov.b64 {base_low, base_high}, %1;\n"
      "shl.b32 low, %2, 4;\n"
      "shf.l.wrap.b32 high, %2, 0, 4;\n"
      "add.cc.u32 low, low, base_low;\n"
      "addc.u32 high, high, base_high;\n"
      "mov.b64 %0, {low, high};\n}"
      : "=l"(address)
      : "l"(base), "r"(pieces));
  return reinterpret_cast<const char*>(address);
}

/// Rows of a (T, width) tensor by token id, along K: a stage gets two chunks of 64 columns x 64 k,
/// columns contiguous, zeros past the expert's last row. Eight threads copy the 128 bytes of a row
/// in each chunk; thread t serves k = t/8, t/8 + 16, ...
class GatherK {
 public:
  struct Ahead {};
  static __device__ __forceinline__ Ahead look_up(const OperandA&, const Tile&) { return {}; }
  __device__ __forceinline__ GatherK(const OperandA& a, const Tile& tile, const Ahead&)
      : row_tokens_(a.row_tokens),
        first_row_(tile.first_row),
        rows_(tile.rows),
        row_pieces_(a.width / 8) {
    const int width = a.width, column = tile.m_block * kTileM;
    const int t = static_cast<int>(threadIdx.x) % kProducerThreads;
    const int piece = t % 8;
    line_ = t / 8;
    base_ = static_cast<const char*>(a.rows) + (column + piece * 8) * 2;
    left_ = width - column - piece * 8;
    full_ = column + kTileM <= width;
    place_ = line_ * kLineBytes + (piece ^ (line_ % 8)) * 16;
    next_ = token_of(0);
  }

  /// Copies k block `block` to `stage`; called with 0, 1, 2, ... in order.
  __device__ __forceinline__ void load(std::uint32_t stage, int block) {
    // A warp serves 16 k of a block, so its lanes hold the offsets of two blocks, and look up the
    // tokens of the next two. Those tokens arrive no sooner than the copies before them. Nothing
    // may touch them until then: even a move to another register would wait for memory.
    if (block % 2 == 0) {
      offset_ = next_ < 0 ? kNoRow : static_cast<std::uint32_t>(next_) * row_pieces_;
      next_ = token_of(block + 2);
    }
    const char* from[4];
    unsigned rows = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t row = __shfl_sync(~0u, offset_, block % 2 * 16 + 4 * i + line_ % 4);
      from[i] = at_piece(base_, row);
      rows |= (row != kNoRow) << i;
    }
    const std::uint32_t to = stage + place_;
    if (full_ && (block + 1) * kTileK <= rows_) {
      each([&](int i, int chunk, int at) { copy_async_16(to + at, from[i] + chunk * kLineBytes); });
    } else {
      each([&](int i, int chunk, int at) {
        copy_async_16(to + at, from[i] + chunk * kLineBytes, left_ > chunk * 64 && (rows >> i & 1));
      });
    }
  }

 private:
  /// copy(i, chunk, place in the stage) for each of this thread's pieces, both of a row together.
  template <class F>
  static __device__ __forceinline__ void each(F&& copy) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        copy(i, chunk, chunk * kChunkBytes + i * 16 * kLineBytes);
      }
    }
  }

  /// The token of this lane's row of blocks `block` and `block` + 1; negative: there is none.
  __device__ __forceinline__ int token_of(int block) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int line = line_ / 4 * 4 + lane % 4 + lane % 16 / 4 * 16;
    // Unsigned: past 2^31 where an expert has nearly as many rows.
    const unsigned row = static_cast<unsigned>(block + lane / 16) * kTileK + line;
    return row < static_cast<unsigned>(rows_) ? row_tokens_[first_row_ + row] : -1;
  }

  const char* base_;  // this thread's piece of row 0
  const std::int32_t* row_tokens_;
  std::int64_t first_row_;
  int rows_;
  std::uint32_t row_pieces_;
  int line_;
  int left_;   // columns from this thread's piece on
  bool full_;  // the tile's columns all exist
  std::uint32_t place_;
  std::uint32_t offset_ = kNoRow;
  int next_;  // the token of this lane's row of the two blocks after those of `offset_`
};

template <class Traits>
using GatherOf =
    std::conditional_t<Traits::kALoad == ALoad::gather_m, GatherM<Traits::kUnroll>,
                       std::conditional_t<Traits::kALoad == ALoad::gather_k, GatherK, NoGather>>;

}  // namespace sonicmoe::cuda
