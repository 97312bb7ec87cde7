#pragma once

#include <cstdint>

#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/operands.cuh"
#include "cuda/sm80/tile.cuh"

/// The portable kernel: one tile of D = A B^T of one expert for each thread block, by cp.async,
/// ldmatrix and mma.sync.
///
///     stages    | 0 | 1 | 2 | 0 | 1 ...   cp.async brings a later block while one is multiplied
///     fragments  a b a b ...              ldmatrix brings step s + 1 while step s is multiplied
///
/// All warps copy and multiply, and each has 64 x 64 of the tile. Sums go up in K, 16 elements a
/// step. At the end the fp32 sums take the stages' place, and an epilogue reads them by rows.
namespace sonicmoe::cuda::sm80 {

inline constexpr int kAddUpBlocks = 4;  ///< k blocks of a sum with kSplitLogits: 256 elements

/// What differs between kernels: the type, the operands, the tile's width and the epilogue.
template <class T_, class A_, class B_, int kTileN_, class Epilogue_>
struct Config {
  using T = T_;
  using A = A_;
  using B = B_;
  using Epilogue = Epilogue_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kThreads = kThreadsOf<kTileN>;
  static constexpr int kBlocks =
      kMostThreads / kThreads;  ///< of a multiprocessor, at the same time
  static constexpr int kStages = kStagesOf<kTileN>;
  static constexpr int kStageBytes = (kTileM + kTileN) * kLineBytes;
  static constexpr int kBytes = kStages * kStageBytes;
  /// Of each 64 columns of B the last 16 are idle, and the 16 before are to have fp32's precision.
  static constexpr bool kSplitLogits = false;
};

/// The tile's sums in shared memory, in fp32. The padding keeps stores free of bank conflicts.
template <int kTileN>
struct Sums {
  static constexpr int kStride = kTileN + 8;
  const float* first;
  __device__ __forceinline__ const float* at(int row, int column) const {
    return first + row * kStride + column;
  }
};

template <class Config>
struct Params {
  typename Config::A::Params a;
  typename Config::B::Params b;
  Contraction k;
  Extents extents;
  typename Config::Epilogue::Params epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    grouped_gemm(const __grid_constant__ Params<Config> p) {
  using T = typename Config::T;
  using A = typename Config::A;
  using B = typename Config::B;
  constexpr int kTileN = Config::kTileN, kStages = Config::kStages;
  constexpr int kAcross = Config::kSplitLogits ? 6 : 8;  // blocks of 8 columns of a warp
  static_assert(sizeof(float) * kTileM * Sums<kTileN>::kStride <= Config::kBytes);
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ TileSearch search;

  p.epilogue.begin();
  const Tile tile = find_tile<Config::kThreads>(p.extents, static_cast<int>(blockIdx.x), search);
  if (tile.expert < 0) return;
  const int blocks = p.k.blocks > 0 ? p.k.blocks : (tile.rows + kTileK - 1) / kTileK;

  const std::uint32_t stages = shared_address(memory);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int warp_m = warp % 2 * 64, warp_n = warp / 2 * 64;
  A a(p.a, p.k, tile, tile.m_block);
  B b(p.b, p.k, tile, tile.n_block);
  const Fragments<A::kContiguousK, true> a_fragments(warp_m);
  const Fragments<B::kContiguousK, false> b_fragments(warp_n);

  float acc[4][kAcross][4] = {};
  float sums_outside[4][2][4] = {};  // with kSplitLogits, of the last 16 columns
  // Tensor cores truncate where fp32 rounds (docs/findings/archive/fp32-router.md).
  const auto add_up = [&] {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = acc[m][kAcross - 2 + n][i];
          sums_outside[m][n][i] = math::add(sums_outside[m][n][i], sum);
          sum = 0.0f;
        }
      }
    }
  };
  std::uint32_t af[2][4][4], bf[2][4][4];
  // A block past the last one becomes zeros: a branch would keep products from going on beside it.
  const auto fetch_a = [&](int block, std::uint32_t stage) {
    a.load(stage, block, block < blocks);
  };
  const auto fetch_b = [&](int block, std::uint32_t stage) {
    b.load(stage + kTileM * kLineBytes, block, block < blocks);
  };
  const auto load = [&](int buffer, std::uint32_t stage, int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a_fragments.load(af[buffer][i], stage, i, step);
      if (i >= kAcross / 2) continue;
      b_fragments.load(bf[buffer][i], stage + kTileM * kLineBytes, i, step);
    }
  };
  const auto next = [&](std::uint32_t stage) {
    stage += Config::kStageBytes;
    return stage == stages + Config::kBytes ? stages : stage;
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    fetch_b(s, stages + s * Config::kStageBytes);
    fetch_a(s, stages + s * Config::kStageBytes);
    copy_async_commit();
  }
  copy_async_wait<kStages - 2>();
  __syncthreads();  // the first block is there
  load(0, stages, 0);
  std::uint32_t now = stages;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    const std::uint32_t after = next(now);
    // The stage before it in the ring, which no warp reads any more.
    const std::uint32_t free =
        (now == stages ? stages + Config::kBytes : now) - Config::kStageBytes;
    constexpr int kSteps = kTileK / 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps - 1) {
        copy_async_wait<kStages - 2>();
        __syncthreads();  // the next block is there, and no warp reads this one any more
      }
      load((step + 1) % 2, step == kSteps - 1 ? after : now, (step + 1) % kSteps);
      if (step == 0) fetch_b(block + kStages - 1, free);
      if (step == 1) {  // apart from B's copies: fewer addresses in registers at a time
        fetch_a(block + kStages - 1, free);
        copy_async_commit();
      }
      // Four products in turn share B's fragment, and the next four begin with the same one of A:
      // so they read fewer registers.
#pragma unroll
      for (int n = 0; n < kAcross; ++n) {
#pragma unroll
        for (int down = 0; down < 4; ++down) {
          const int m = n % 2 == 0 ? down : 3 - down;
          multiply<T>(acc[m][n], af[step % 2][m], &bf[step % 2][n / 2][n % 2 * 2]);
        }
      }
    }
    if (Config::kSplitLogits && block % kAddUpBlocks == kAddUpBlocks - 1) add_up();
    now = after;
  }
  if constexpr (Config::kSplitLogits) {
    add_up();
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][kAcross - 2 + n][i] = sums_outside[m][n][i];
      }
    }
  }
  copy_async_wait<0>();
  __syncthreads();  // no warp reads a stage any more

  float* const sums = reinterpret_cast<float*>(memory);
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int n = 0; n < kAcross; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_m + m * 16 + half * 8 + lane / 4;
        const int column = warp_n + n * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(sums + row * Sums<kTileN>::kStride + column) =
            make_float2(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
      }
    }
  }
  __syncthreads();  // all sums are there
  // Read again, rather than kept in registers through the product.
  const Tile done = search.found;
  p.epilogue.template store<T, kTileN>(done, Sums<kTileN>{sums});
}

}  // namespace sonicmoe::cuda::sm80
