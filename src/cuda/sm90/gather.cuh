#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/sm90/tile.cuh"

/// Gathers of operand A.
namespace sonicmoe::cuda {

/// Eight addresses in registers of their own. Without this the compiler computes each into the same
/// register, and every copy waits until the one before has read its address.
__device__ __forceinline__ void keep_apart(const char* (&addresses)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) asm volatile("" : "+l"(addresses[i]));
}

// A gather belongs to one tile. What it looks up in memory to begin with may be looked up during
// the tile before (`Ahead`).

/// Nothing is gathered.
struct NoGather {
  struct Ahead {};
  template <class Params>
  static __device__ __forceinline__ Ahead look_up(const Params&, const Tile&) {
    return {};
  }
  template <class Params>
  __device__ NoGather(const Params&, const Tile&, const Ahead&) {}
  __device__ __forceinline__ void load(std::uint32_t, int) {}
};

/// Rows of a (T, width) tensor by token id, along M: the K-contiguous tile of 128 rows x 64 k.
/// Eight threads fetch the 128 bytes of a row; thread t serves rows t/8, t/8 + 16, ...
///
/// Rows of M do not mix, so lines past the expert's last row may hold anything: those of 32 rows of
/// which none is there keep what they had, other lines repeat the last row. That all eight copies
/// of a block are of one form is worth more than what they save: with another for partial tiles
/// beside it, each copy of either waits for its own predicate.
///
/// The addresses are moved on once in kUnroll blocks. produce() unrolls its loop by as many,
/// so that a block's place among them is a constant. With 2 the compiler keeps the addresses where
/// copies can use them; with 1 it moves each there first, which waits until the copy before has
/// read its own (docs/findings/machine-code.md, 23).
template <int kUnroll>
class RowGather {
 public:
  struct Ahead {
    int token[8];
  };
  template <class Params>
  static __device__ __forceinline__ Ahead look_up(const Params& p, const Tile& tile) {
    const int t = static_cast<int>(threadIdx.x) % kProducerThreads;
    Ahead ahead;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // A tile without rows is of an expert that has some.
      const int row = max(min(tile.m_block * kTileM + t / 8 + 16 * i, tile.rows - 1), 0);
      ahead.token[i] = p.row_tokens[tile.first_row + row];
    }
    return ahead;
  }

  template <class Params>
  __device__ __forceinline__ RowGather(const Params& p, const Tile& tile, const Ahead& ahead) {
    const int t = static_cast<int>(threadIdx.x) % kProducerThreads;
    const int width = p.gathered_width;
    left_ = width - t % 8 * 8;
    rows_ = tile.rows - tile.m_block * kTileM;
    // The swizzle: 16-byte piece c of line r lies at piece c ^ (r % 8). All our rows agree in r
    // % 8.
    place_ = t / 8 * kLineBytes + ((t % 8) ^ (t / 8 % 8)) * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      from_[i] = static_cast<const char*>(p.gathered) +
                 (static_cast<std::int64_t>(ahead.token[i]) * width + t % 8 * 8) * 2;
    }
  }

  /// Calls with block = 0, 1, 2, ... in order.
  __device__ __forceinline__ void load(std::uint32_t stage, int block) {
    const std::uint32_t to = stage + place_;
    const int turn = block % kUnroll;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // The next block wants the bytes beside these.
      if (i / 2 * 32 < rows_) {
        copy_async_16_of_256(to + i * 16 * kLineBytes, from_[i] + turn * kLineBytes,
                             left_ > turn * kTileK);
      }
    }
    if (turn + 1 < kUnroll) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) from_[i] += kUnroll * kLineBytes;
    keep_apart(from_);
    left_ -= kUnroll * kTileK;
  }

 private:
  const char* from_[8];  // this thread's piece of each of its rows
  std::uint32_t place_;
  int rows_;  // from the tile's first on; none where the peer alone has some
  int left_;  // columns from this thread's piece on
};

/// Offsets of rows count pieces of 16 bytes, so that 32 bits reach 64 GiB; this one is no row.
inline constexpr std::uint32_t kNoRow = 0xffffffff;

/// Address of the piece that many after `base`, by shifts and additions. Nothing that producers do
/// in every block may be a wide multiplication (IMAD.WIDE), which holds up wgmma, it seems for the
/// registers' ports. The compiler makes one of plain shifts, too, but not of a funnel shift:
/// docs/findings/machine-code.md, 24; tools/check_machine_code.py.
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

/// Rows of a (T, width) tensor by token id, along K: two chunks of 64 columns x 64 k, columns
/// contiguous. Eight threads fetch the 128 bytes of a row in each chunk; thread t serves k = t/8,
/// t/8 + 16, ...
class ContractionGather {
 public:
  struct Ahead {};
  template <class Params>
  static __device__ __forceinline__ Ahead look_up(const Params&, const Tile&) {
    return {};
  }
  template <class Params>
  __device__ __forceinline__ ContractionGather(const Params& p, const Tile& tile, const Ahead&)
      : row_tokens_(p.row_tokens),
        first_row_(tile.first_row),
        rows_(tile.rows),
        row_pieces_(p.gathered_width / 8) {
    const int width = p.gathered_width, column = tile.m_block * kTileM;
    const int t = static_cast<int>(threadIdx.x) % kProducerThreads;
    const int piece = t % 8;
    line_ = t / 8;
    base_ = static_cast<const char*>(p.gathered) + (column + piece * 8) * 2;
    left_ = width - column - piece * 8;
    full_ = column + kTileM <= width;
    place_ = line_ * kLineBytes + (piece ^ (line_ % 8)) * 16;
    next_ = token_of(0);
  }

  /// Calls with block = 0, 1, 2, ... in order.
  __device__ __forceinline__ void load(std::uint32_t stage, int block) {
    // A warp serves 16 k of a block, so its 32 lanes hold the offsets of two blocks, and the tokens
    // of two more are asked for: they come no sooner than the copies asked for before them. Nothing
    // touches those in between, not even to move them to other registers: that would wait for
    // memory.
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
  /// copy(i, chunk, place in the tile) for all pieces of this thread's, both of a row together.
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
    // Past 2^31 where an expert has nearly as many rows.
    const unsigned row = static_cast<unsigned>(block + lane / 16) * kTileK + line;
    return row < static_cast<unsigned>(rows_) ? row_tokens_[first_row_ + row] : -1;
  }

  const char* base_;
  const std::int32_t* row_tokens_;
  std::int64_t first_row_;
  int rows_;
  std::uint32_t row_pieces_;
  int line_;
  int left_;  // columns from this thread's piece on
  bool full_;
  std::uint32_t place_;
  std::uint32_t offset_ = kNoRow;
  int next_;  // the token of this lane's row of the two blocks after those of `offset_`
};

}  // namespace sonicmoe::cuda
