#pragma once

#include <cstdint>

#include "cuda/sm80/tile.cuh"

/// How operands come into shared memory, and from there into the registers of mma.sync.
///
/// A stage holds 64 elements of K of both operands in lines of 128 bytes. Piece p of line l lies at
/// piece p ^ (l % 8), so that neither cp.async nor ldmatrix meets bank conflicts.
///
///     K contiguous    line l: element l of M or N, 64 elements of K
///     MN contiguous   line 64 c + k: element k of K, elements 64 c to 64 c + 63 of M or N
///
/// cp.async writes zeros for pieces outside a matrix, and reads nothing there. So elements of K
/// past the end are zero in both operands, and no garbage meets a zero.
namespace sonicmoe::cuda::sm80 {

/// K as the products go through it: in one part, or in two with a matrix or columns of their own.
struct Contraction {
  int blocks;  ///< of kTileK elements; 0: the expert's rows are K
  int half;    ///< blocks of the first part
  int width;   ///< elements of a part, a multiple of 8
};

/// Where block `block` of K lies.
struct PlaceInK {
  int part, first;  ///< of K, and the first element in that part
  __device__ __forceinline__ PlaceInK(const Contraction& k, int block)
      : part(block >= k.half), first((block - (block >= k.half ? k.half : 0)) * kTileK) {}
};

/// Rows of a matrix, by token id or contiguous.
struct Rows {
  const void* base;
  const std::int32_t* row_tokens;  ///< (R), or null: contiguous
  std::int64_t part_offset;        ///< elements from the first part of columns to the second
  int stride;                      ///< bytes from row to row
  int width;                       ///< columns of a part, where the rows are K
  int half;                        ///< the same: tiles of the first part along M or N
};

/// A weight matrix of each expert.
struct Weights {
  const void* base[2];  ///< pairs: gate and up, with K contiguous. MN contiguous: by part of K
  std::int64_t expert_stride;
  std::int64_t part_offset;  ///< elements from the first part of the columns to the second
  int stride;                ///< bytes from line to line
  int width;                 ///< of M or N: all of it, or units in pairs
  bool pairs;                ///< N is 8 gates, their 8 ups, the next 8 gates, ...
};

/// `lines` lines of `stride` bytes on, by one instruction.
template <class T>
__device__ __forceinline__ const T* advance(const T* from, int lines, int stride) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) +
                                    std::int64_t{lines} * stride);
}
/// How many of `most` places, `apart` apart from `first` on, lie below `width`.
__device__ __forceinline__ int count_inside(int first, int width, int apart, int most) {
  return first < width ? min(most, (width - first + apart - 1) / apart) : 0;
}

/// The piece, and the first line, that a thread copies. Its further lines are kApart apart, so all
/// have the same place in their line.
template <int kThreads>
struct Copier {
  static constexpr int kApart = kThreads / kPieces;
  static constexpr std::uint32_t kBytesApart = kApart * kLineBytes;
  static constexpr int kOfK = kTileK / kApart;  ///< lines of a thread where lines are K
  static_assert(kApart % 16 == 0 && kTileK % kApart == 0);
  int piece, line;
  std::uint32_t offset;  ///< in the operand's part of a stage
  __device__ __forceinline__ Copier() {
    piece = static_cast<int>(threadIdx.x % kPieces);
    line = static_cast<int>(threadIdx.x / kPieces);
    offset = static_cast<std::uint32_t>(line * kLineBytes + ((piece ^ (line % 8)) * 16));
  }
};

/// Where the expert's row `row` lies: a number of rows, or -1 behind its last.
__device__ __forceinline__ int place_of_row(const Rows& p, const Tile& tile, int row) {
  const int at = row < tile.rows ? tile.first_row + row : -1;
  return p.row_tokens != nullptr && at >= 0 ? p.row_tokens[at] : at;
}

/// Operand A: the expert's rows are M, K contiguous.
template <class T, int kThreads>
class RowsAlongM {
 public:
  using Params = Rows;
  static constexpr bool kContiguousK = true;

  __device__ __forceinline__ RowsAlongM(const Rows& p, const Contraction& k, const Tile& tile,
                                        int m_block)
      : p_(p), k_(k) {
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const int row = m_block * kTileM + copier_.line + i * Copier<kThreads>::kApart;
      at_[i] = place_of_row(p, tile, row);
    }
  }
  __device__ __forceinline__ void load(std::uint32_t stage, int block, bool live) const {
    const PlaceInK at(k_, block);
    const int first = at.first + copier_.piece * 8;
    const bool inside = live && first < k_.width;
    const T* const from = static_cast<const T*>(p_.base) + at.part * p_.part_offset + first;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      copy_async_16(stage + copier_.offset + i * Copier<kThreads>::kBytesApart,
                    advance(from, at_[i], p_.stride), inside && at_[i] >= 0);
    }
  }

 private:
  static constexpr int kLines = kTileM / Copier<kThreads>::kApart;
  const Rows& p_;
  const Contraction& k_;
  Copier<kThreads> copier_;
  int at_[kLines];
};

/// Operand B: weights with K contiguous, lines are N.
template <class T, int kTileN>
class WeightsAlongK {
 public:
  static constexpr int kThreads = kThreadsOf<kTileN>;
  using Params = Weights;
  static constexpr bool kContiguousK = true;

  __device__ __forceinline__ WeightsAlongK(const Weights& p, const Contraction& k, const Tile& tile,
                                           int n_block)
      : p_(p), k_(k) {
    const int line = copier_.line;
    const int part = p.pairs ? line / 8 % 2 : 0;
    const int first =
        p.pairs ? n_block * (kTileN / 2) + line / 16 * 8 + line % 8 : n_block * kTileN + line;
    from_ = advance(static_cast<const T*>(p.base[part]) + tile.expert * p.expert_stride, first,
                    p.stride) +
            copier_.piece * 8;
    lines_ = count_inside(first, p.width, apart(), kLines);
  }
  __device__ __forceinline__ void load(std::uint32_t stage, int block, bool live) const {
    const PlaceInK at(k_, block);
    const bool inside = live && at.first + copier_.piece * 8 < k_.width;
    const T* const from = from_ + at.part * p_.part_offset + at.first;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      copy_async_16(stage + copier_.offset + i * Copier<kThreads>::kBytesApart,
                    advance(from, i * apart(), p_.stride), inside && i < lines_);
    }
  }

 private:
  static constexpr int kLines = kTileN / Copier<kThreads>::kApart;
  /// Lines of the matrix from one copy of this thread to the next.
  __device__ __forceinline__ int apart() const {
    return Copier<kThreads>::kApart / (p_.pairs ? 2 : 1);
  }
  const Weights& p_;
  const Contraction& k_;
  Copier<kThreads> copier_;
  const T* from_;
  int lines_;  ///< that this thread copies: the others lie past the matrix
};

/// Operand B: weights with N contiguous, lines are K.
template <class T, int kTileN>
class WeightsAlongN {
 public:
  static constexpr int kThreads = kThreadsOf<kTileN>;
  using Params = Weights;
  static constexpr bool kContiguousK = false;

  __device__ __forceinline__ WeightsAlongN(const Weights& p, const Contraction& k, const Tile& tile,
                                           int n_block)
      : p_(p), k_(k) {
    const int piece = copier_.piece;
    const int column =
        p.pairs ? n_block * (kTileN / 2) + piece / 2 * 8 : n_block * kTileN + piece * 8;
    offset_ = tile.expert * p.expert_stride + column;
    offset_ += p.pairs && piece % 2 != 0 ? p.part_offset : 0;
    chunks_ = count_inside(column, p.width, apart(), kChunks);
  }
  __device__ __forceinline__ void load(std::uint32_t stage, int block, bool live) const {
    const PlaceInK at(k_, block);
    const int line = at.first + copier_.line, left = live ? k_.width - line : 0;
    const T* const from =
        advance(static_cast<const T*>(p_.base[at.part]) + offset_, line, p_.stride);
#pragma unroll
    for (int i = 0; i < Copier<kThreads>::kOfK; ++i) {
      const int further = i * Copier<kThreads>::kApart;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        copy_async_16(stage + copier_.offset +
                          (chunk * Copier<kThreads>::kOfK + i) * Copier<kThreads>::kBytesApart,
                      advance(from, further, p_.stride) + chunk * apart(),
                      further < left && chunk < chunks_);
      }
    }
  }

 private:
  static constexpr int kChunks = kTileN / kTileK;
  /// Columns from one chunk to the next.
  __device__ __forceinline__ int apart() const { return p_.pairs ? kTileK / 2 : kTileK; }
  const Weights& p_;
  const Contraction& k_;
  Copier<kThreads> copier_;
  std::int64_t offset_;
  int chunks_;  ///< that this thread copies: the others lie past the matrix
};

/// Either operand of a weight gradient, 128 wide like the tile either way: the expert's rows are K,
/// columns M or N.
template <class T>
class RowsAlongK {
 public:
  static constexpr int kTile = kNarrow, kThreads = kThreadsOf<kNarrow>;
  static_assert(kTile == kTileM);
  using Params = Rows;
  static constexpr bool kContiguousK = false;

  __device__ __forceinline__ RowsAlongK(const Rows& p, const Contraction&, const Tile& tile,
                                        int mn_block)
      : p_(p), tile_(tile) {
    const int part = mn_block >= p.half;
    const int column = (mn_block - part * p.half) * kTile + copier_.piece * 8;
    base_ = static_cast<const T*>(p.base) + part * p.part_offset + column;
    chunks_ = count_inside(column, p.width, kTileK, kChunks);
    find(0);
  }
  /// Blocks that are not live have no rows: at_ says so.
  __device__ __forceinline__ void load(std::uint32_t stage, int block, bool /*live*/) {
#pragma unroll
    for (int i = 0; i < Copier<kThreads>::kOfK; ++i) {
      const T* const from = advance(base_, at_[i], p_.stride);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        copy_async_16(stage + copier_.offset +
                          (chunk * Copier<kThreads>::kOfK + i) * Copier<kThreads>::kBytesApart,
                      from + chunk * kTileK, at_[i] >= 0 && chunk < chunks_);
      }
    }
    find(block + 1);
  }

 private:
  static constexpr int kChunks = kTile / kTileK;
  /// Looks up where this thread's rows of the next block are.
  __device__ __forceinline__ void find(int block) {
#pragma unroll
    for (int i = 0; i < Copier<kThreads>::kOfK; ++i) {
      const int row = block * kTileK + copier_.line + i * Copier<kThreads>::kApart;
      at_[i] = place_of_row(p_, tile_, row);
    }
  }
  const Rows& p_;
  const Tile& tile_;
  Copier<kThreads> copier_;
  const T* base_;
  int chunks_;  ///< that this thread copies: the others lie past the matrix
  int at_[Copier<kThreads>::kOfK];
};

__device__ __forceinline__ void ldmatrix(std::uint32_t (&to)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(std::uint32_t (&to)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

/// Reads 16 x 16 elements of an operand at a time, as mma.sync wants them. Four 8 x 8 matrices: in
/// operand A M comes first (rows 0-7 and 8-15, then K 8-15), in operand B K does.
template <bool kContiguousK, bool kIsA>
class Fragments {
 public:
  /// `first`: of the warp along M or N, a multiple of 64.
  __device__ __forceinline__ explicit Fragments(int first) {
    const int lane = static_cast<int>(threadIdx.x % 32), low = lane % 8;
    const int second = lane / 8 % 2, third = lane / 16;  // which of the four matrices
    const int mn = kIsA ? second : third, k = kIsA ? third : second;
    if constexpr (kContiguousK) {
      offset_ = (first + mn * 8 + low) * kLineBytes + ((k ^ low) * 16);
    } else {
      offset_ = (first + k * 8 + low) * kLineBytes + ((mn ^ low) * 16);
    }
  }
  /// Elements 16 i on along M or N, 16 step on along K.
  __device__ __forceinline__ void load(std::uint32_t (&to)[4], std::uint32_t operand, int i,
                                       int step) const {
    if constexpr (kContiguousK) {
      ldmatrix(to, operand + (offset_ ^ (step * 32)) + i * 16 * kLineBytes);
    } else {
      ldmatrix_transposed(to, operand + (offset_ ^ (i * 32)) + step * 16 * kLineBytes);
    }
  }

 private:
  std::uint32_t offset_;
};

}  // namespace sonicmoe::cuda::sm80
