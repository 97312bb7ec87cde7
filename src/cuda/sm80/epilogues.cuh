#pragma once

#include <cstdint>

#include "cuda/device/warp.cuh"
#include "cuda/sm80/grouped_gemm.cuh"
#include "math/activation.h"

/// What the portable kernel does with a tile's sums. A piece of work is eight columns of a row, or
/// eight units of a hidden layer, and the threads of a warp take neighbouring pieces.
///
///     begin()   before the product
///     store()   after it, with the sums of the tile
namespace sonicmoe::cuda::sm80 {

/// Eight sums, which lie on 16 bytes.
__device__ __forceinline__ void take(float (&to)[8], const float* from) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  const float4 y = *reinterpret_cast<const float4*>(from + 4);
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  to[4] = y.x, to[5] = y.y, to[6] = y.z, to[7] = y.w;
}
template <class T>
__device__ __forceinline__ void read(float (&to)[8], const void* base, std::int64_t at) {
  const auto eight = *reinterpret_cast<const Eight<T>*>(static_cast<const T*>(base) + at);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(eight.value[i]);
}
template <class T>
__device__ __forceinline__ void write(void* base, std::int64_t at, const float (&from)[8]) {
  Eight<T> eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) eight.value[i] = from_float<T>(from[i]);
  *reinterpret_cast<Eight<T>*>(static_cast<T*>(base) + at) = eight;
}

/// Calls f(row, piece, sums) for this thread's pieces of the tile, which have kColumns columns
/// each, in `rows` rows. It reads the sums of kBatch pieces, then calls f for each of them, so that
/// a thread waits for shared memory once a batch.
template <int kTileN, int kColumns, int kBatch, class F>
__device__ __forceinline__ void for_each_piece(const Sums<kTileN>& sums, int rows, F&& f) {
  constexpr int kPieces = kTileN / kColumns, kThreads = kThreadsOf<kTileN>;
  static_assert(kTileM * kPieces % (kBatch * kThreads) == 0);
  const int last = min(rows, kTileM) * kPieces;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < last; first += kBatch * kThreads) {
    float v[kBatch][kColumns / 8][8];
    // The tile has sums for rows past the last one, too. They may be read, but mean nothing.
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * kThreads;
#pragma unroll
      for (int part = 0; part < kColumns / 8; ++part) {
        take(v[j][part], sums.at(i / kPieces, i % kPieces * kColumns + part * 8));
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * kThreads;
      if (i < last) f(i / kPieces, i % kPieces, v[j]);
    }
  }
}

/// The rows of down_proj, of dX~ and of the router's dx.
struct StoreRows {
  struct Params {
    void* out;                ///< (R, columns)
    const void* bias;         ///< (E, columns), or null
    const float* row_scores;  ///< (R), or null
    bool scores_bias;         ///< the score multiplies the bias, too
    int columns;

    __device__ __forceinline__ void begin() const {}
    template <class T, int kTileN>
    __device__ __forceinline__ void store(const Tile& tile, const Sums<kTileN>& sums) const {
      for_each_piece<kTileN, 8, 4>(
          sums, tile.rows - tile.m_block * kTileM, [&](int row, int piece, float(&sum)[1][8]) {
            const int column = tile.n_block * kTileN + piece * 8;
            if (column >= columns) return;
            const std::int64_t at = tile.first_row + tile.m_block * kTileM + row;
            float(&v)[8] = sum[0];
            float b[8] = {};
            if (bias != nullptr) read<T>(b, bias, std::int64_t{tile.expert} * columns + column);
            const float score = row_scores != nullptr ? row_scores[at] : 1.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              v[i] = scores_bias ? math::mul(score, math::add(v[i], b[i]))
                                 : math::fma(score, v[i], b[i]);
            }
            write<T>(out, at * columns + column, v);
          });
    }
  };
};

/// H and A of up_proj. With a gate the tile holds units in pairs of eight: see Weights::pairs.
struct StoreActivation {
  struct Params {
    void* preact;  ///< (R, W), or null
    void* act;     ///< (R, n)
    const void* bias[2];
    std::int64_t bias_stride, bias_expert_stride;
    std::int32_t* reset;  ///< (1) set to 0 for a later operation, or null
    int units;            ///< n
    bool alternates;      ///< H, and the tile, hold each gate beside its up
    ActivationSpec activation;

    __device__ __forceinline__ void begin() const {
      if (reset != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *reset = 0;
    }
    template <class T, int kTileN>
    __device__ __forceinline__ void store(const Tile& tile, const Sums<kTileN>& sums) const {
      math::visit_activation(activation, [&](const auto& fn) {
        using Fn = std::decay_t<decltype(fn)>;
        constexpr int kUnits = Fn::kIsGlu ? kTileN / 2 : kTileN;
        constexpr int kParts = Fn::kIsGlu ? 2 : 1;
        constexpr int kBatch = kTileN / kNarrow;  // a narrow tile mostly has another one beside it
        for_each_piece<kTileN, 8 * kParts, kBatch>(
            sums, tile.rows - tile.m_block * kTileM,
            [&](int row, int piece, const float(&sum)[kParts][8]) {
              const int unit = tile.n_block * kUnits + piece * 8;
              if (unit >= units) return;
              store_units<T, Fn::kIsGlu>(fn, tile, sum, row, unit);
            });
      });
    }

    template <class T, bool kGated, class Fn>
    __device__ __forceinline__ void store_units(const Fn& fn, const Tile& tile,
                                                const float (&sum)[kGated ? 2 : 1][8], int row,
                                                int unit) const {
      const std::int64_t at = tile.first_row + tile.m_block * kTileM + row;
      float h[2][8] = {};  // the sixteen columns of the tile, then gates and ups
#pragma unroll
      for (int i = 0; i < (kGated ? 16 : 8); ++i) h[i / 8][i % 8] = sum[i / 8][i % 8];
      if (kGated && alternates) part_pairs(h);
      if (bias[0] != nullptr) {
#pragma unroll
        for (int part = 0; part < (kGated ? 2 : 1); ++part) {
          const T* const b = static_cast<const T*>(bias[part]) + tile.expert * bias_expert_stride;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            h[part][i] = math::add(h[part][i], to_float(b[(unit + i) * bias_stride]));
          }
        }
      }
      float a[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i] = fn.forward(h[0][i], h[1][i]);
      write<T>(act, at * units + unit, a);
      if (preact == nullptr) return;
      if (!kGated) return write<T>(preact, at * units + unit, h[0]);
      write_pair<T>(preact, at * 2 * units, unit, units, alternates, h);
    }
  };

  /// From g0 u0 g1 u1 ... to gates and ups, and back.
  static __device__ __forceinline__ void part_pairs(float (&h)[2][8]) {
    float parted[2][8];
#pragma unroll
    for (int i = 0; i < 16; ++i) parted[i % 2][i / 2] = h[i / 8][i % 8];
    copy(h, parted);
  }
  static __device__ __forceinline__ void join_pairs(float (&h)[2][8]) {
    float joined[2][8];
#pragma unroll
    for (int i = 0; i < 16; ++i) joined[i / 8][i % 8] = h[i % 2][i / 2];
    copy(h, joined);
  }
  /// Eight gates and ups of the row of H or dH that begins at `row`.
  template <class T>
  static __device__ __forceinline__ void write_pair(void* to, std::int64_t row, int unit, int units,
                                                    bool alternates, float (&h)[2][8]) {
    if (alternates) join_pairs(h);
    const std::int64_t first = row + (alternates ? 2 * unit : unit);
    write<T>(to, first, h[0]);
    write<T>(to, first + (alternates ? 8 : units), h[1]);
  }
  template <class T>
  static __device__ __forceinline__ void read_pair(float (&h)[2][8], const void* from,
                                                   std::int64_t row, int unit, int units,
                                                   bool alternates) {
    const std::int64_t first = row + (alternates ? 2 * unit : unit);
    read<T>(h[0], from, first);
    read<T>(h[1], from, first + (alternates ? 8 : units));
    if (alternates) part_pairs(h);
  }

 private:
  static __device__ __forceinline__ void copy(float (&to)[2][8], const float (&from)[2][8]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) to[i / 8][i % 8] = from[i / 8][i % 8];
  }
};

/// dH, A' and dS of down_proj_dgrad from dA' and H. dS of a row: each lane adds its eight products
/// in order, then lanes pairwise; the n blocks' sums follow in another kernel.
struct StoreActivationGrad {
  struct Params {
    const void* preact;       ///< (R, W)
    void* dpreact;            ///< (R, W), maybe the same
    void* scaled_act;         ///< (R, n)
    const float* row_scores;  ///< (R), or null: 1
    float* dscores;           ///< (n blocks, R), or null
    std::int64_t capacity;    ///< R
    std::int32_t* reset;      ///< as in StoreActivation
    int units;
    bool alternates;
    ActivationSpec activation;

    __device__ __forceinline__ void begin() const {
      if (reset != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *reset = 0;
    }
    template <class T, int kTileN>
    __device__ __forceinline__ void store(const Tile& tile, const Sums<kTileN>& sums) const {
      constexpr int kPieces = kTileN / 8;  // of a row
      static_assert(kPieces == 16, "half a warp");
      math::visit_activation(activation, [&](const auto& fn) {
        using Fn = std::decay_t<decltype(fn)>;
        const int rows = tile.rows - tile.m_block * kTileM;
        // Whole warps go round, for the sums over lanes.
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < kTileM * kPieces; i += kThreadsOf<kTileN>) {
          const int row = i / kPieces, piece = i % kPieces;
          if (i / 32 * 32 / kPieces >= rows) break;
          const std::int64_t at = tile.first_row + tile.m_block * kTileM + row;
          const int unit = tile.n_block * kTileN + piece * 8;
          float sum = 0.0f;
          if (row < rows && unit < units) {
            sum = store_units<T, Fn::kIsGlu>(fn, sums.at(row, piece * 8), at, unit);
          }
          if (dscores == nullptr) continue;
#pragma unroll
          for (int step = kPieces / 2; step > 0; step /= 2) {
            sum = math::add(sum, __shfl_xor_sync(~0u, sum, step));
          }
          if (row < rows && piece == 0) dscores[tile.n_block * capacity + at] = sum;
        }
      });
    }

    template <class T, bool kGated, class Fn>
    __device__ __forceinline__ float store_units(const Fn& fn, const float* from, std::int64_t at,
                                                 int unit) const {
      float d[8], h[2][8] = {}, a[8];
      take(d, from);
      if constexpr (kGated) {
        StoreActivation::read_pair<T>(h, preact, at * 2 * units, unit, units, alternates);
      } else {
        read<T>(h[0], preact, at * units + unit);
      }
      const float score = row_scores != nullptr ? row_scores[at] : 1.0f;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const math::Gradients r = fn.backward(h[0][i], h[1][i], math::mul(score, d[i]));
        sum = math::fma(d[i], r.act, sum);
        h[0][i] = r.dgate;
        h[1][i] = r.dup;
        a[i] = math::mul(score, r.act);
      }
      write<T>(scaled_act, at * units + unit, a);
      if constexpr (kGated) {
        StoreActivation::write_pair<T>(dpreact, at * 2 * units, unit, units, alternates, h);
      } else {
        write<T>(dpreact, at * units + unit, h[0]);
      }
      return sum;
    }
  };
};

/// A matrix (M, N) of each expert: dW1, dW2, and parts of the router's dWr.
struct StoreMatrix {
  struct Params {
    void* out[2];  ///< by part of M
    std::int64_t expert_stride, row_stride;
    std::int64_t part_offset;  ///< elements from the first part of N to the second
    int rows, columns;         ///< of a part
    int m_half, n_half;        ///< tiles of the first part
    bool f32, accumulate;

    __device__ __forceinline__ void begin() const {}
    template <class T, int kTileN>
    __device__ __forceinline__ void store(const Tile& tile, const Sums<kTileN>& sums) const {
      if (f32) return store_as<float>(tile, sums);
      store_as<T>(tile, sums);
    }
    template <class Out, int kTileN>
    __device__ __forceinline__ void store_as(const Tile& tile, const Sums<kTileN>& sums) const {
      const int m_part = tile.m_block >= m_half, n_part = tile.n_block >= n_half;
      const int first_row = (tile.m_block - m_part * m_half) * kTileM;
      const int first_column = (tile.n_block - n_part * n_half) * kTileN;
      const std::int64_t base = tile.expert * expert_stride + n_part * part_offset;
      for_each_piece<kTileN, 8, 1>(
          sums, rows - first_row, [&](int row, int piece, float(&sum)[1][8]) {
            const int column = first_column + piece * 8;
            if (column >= columns) return;
            const std::int64_t at = base + (first_row + row) * row_stride + column;
            float(&v)[8] = sum[0];
            if (accumulate) {
              float old[8];
              read<Out>(old, out[m_part], at);
#pragma unroll
              for (int i = 0; i < 8; ++i) v[i] = math::add(v[i], old[i]);
            }
            write<Out>(out[m_part], at, v);
          });
    }
  };
};

/// The router's logits (T, E), of any E. kSplit: Wr is fp32, in three parts. 16 experts take 64
/// columns: their tiny parts, their small ones, their big ones, and 16 idle ones.
template <bool kSplit>
struct StoreLogits {
  struct Params {
    void* out;          ///< (T, E) T or fp32
    const float* bias;  ///< (E), or null
    int experts;
    float small_factor;  ///< of small parts
    bool f32;

    __device__ __forceinline__ void begin() const {}
    template <class T, int kTileN>
    __device__ __forceinline__ void store(const Tile& tile, const Sums<kTileN>& sums) const {
      if (f32) return store_as<float>(tile, sums);
      store_as<T>(tile, sums);
    }
    template <class Out, int kTileN>
    __device__ __forceinline__ void store_as(const Tile& tile, const Sums<kTileN>& sums) const {
      constexpr int width = kSplit ? kTileN / 4 : kTileN;
      const int first = tile.n_block * width;
      const int last = min(tile.rows - tile.m_block * kTileM, kTileM) * width;
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < last; i += kThreadsOf<kTileN>) {
        const int row = i / width, column = i % width, expert = first + column;
        if (expert >= experts) continue;
        float v;
        if constexpr (kSplit) {
          const float* const parts = sums.at(row, column / 16 * 64 + column % 16);
          v = math::fma(math::fma(parts[0], small_factor, parts[16]), small_factor, parts[32]);
        } else {
          v = *sums.at(row, column);
        }
        if (bias != nullptr) v = math::add(v, bias[expert]);
        const std::int64_t at = tile.first_row + tile.m_block * kTileM + row;
        static_cast<Out*>(out)[at * experts + expert] = from_float<Out>(v);
      }
    }
  };
};

}  // namespace sonicmoe::cuda::sm80
