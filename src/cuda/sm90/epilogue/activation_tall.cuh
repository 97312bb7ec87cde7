#pragma once

#include "cuda/sm90/epilogue/activation.cuh"

/// Epilogue of up_proj for tall tiles: as StoreActivation, from a consumer's own 64 rows and its
/// half of the third stripe.
namespace sonicmoe::cuda {

/// With a gate, without biases. The tile's quarters hold gates, ups, gates and ups, of 64 units
/// each, so that a consumer's half of the third stripe is the one chunk of 64 units that has its
/// number.
template <class Fn>
struct StoreActivationTall : StoreActivation<OneActivation<Fn>, false> {
  using Params = ActivationParams<OneActivation<Fn>>;
  /// Everything leaves from the stages that follow the last k block: A from where the gates were.
  static constexpr int kWarpBytes = 0;
  static_assert(Fn::kIsGlu);

  template <class Traits>
  class Run {
   public:
    using T = typename Traits::T;
    using Stages = EpilogueBlocks<Traits>;
    static constexpr int kOf64 = 32;  // accumulators of 64 rows x 64 columns
    static constexpr int kUnits = Traits::kN / 2;
    static_assert(kUnits == 128 && Traits::kMBlocks == 1 && Traits::kThird == 2 * kOf64);

    __device__ __forceinline__ Run(const Params& e, const Tile& tile, int consumer)
        : e_(e), tile_(tile), consumer_(consumer) {}

    /// The H of a piece is on its way while A of the one before is computed and sent.
    template <bool kHasThird>
    __device__ __forceinline__ void finish(float (&acc)[Traits::kN / 2],
                                           float (&third)[Traits::kThird], const Stages& stages) {
      constexpr int kPieces = kHasThird ? 3 : 2;
      const int lane = here(static_cast<int>(threadIdx.x)) % 32;
      const int warp_row = uniform(here(static_cast<int>(threadIdx.x)) % 128 / 32) * 16;
      // The third stripe in the middle: consumer 0, whose part of it is in chunk 0, too, gives that
      // chunk's stage back before its last piece.
      const auto piece = [&](auto index) {
        constexpr bool kIsThird = kHasThird && index == 1;
        const int chunk = kIsThird ? consumer_ : index > 0;
        const int row = (kIsThird ? Traits::kOwn - 64 : consumer_ * 64) + warp_row;
        const std::uint32_t stage = uniform(stages.wait(chunk)) + row * kLineBytes;
        return Piece{kIsThird ? third : acc + (index > 0 ? 2 * kOf64 : 0), chunk, row,
                     WarpTile(stage + Stages::place(0), lane),
                     WarpTile(stage + Stages::place(1), lane)};
      };
      store_preact(piece(std::integral_constant<int, 0>{}), lane);
      static_for<kPieces>([&](auto index) {
        const Piece now = piece(index);
        Block blocks[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          blocks[i] = activate<T, kOf64>(e_.activations.fn, now.acc, i);
        }
        constexpr bool kLast = index + 1 == kPieces;
        if constexpr (!kLast) store_preact(piece(std::integral_constant<int, index + 1>{}), lane);
        // All but the H just sent has been read: what A takes the place of, and the piece before.
        if (lane == 0) store_wait_read<kLast ? 0 : 1>();
        __syncwarp();
        if (index > 0 && (!kHasThird || index == 2 - consumer_)) stages.give_back(0);
        put_all(now.gate, blocks);
        fence_async_proxy();
        __syncwarp();
        const int n = e_.intermediate, left = rows_of(now);
        if (left < WarpTile::kRows) {
          T* const act = static_cast<T*>(e_.act) + std::int64_t{row_of(now)} * n + unit_of(now);
          now.gate.store(act, n, left, n - unit_of(now));
          // Read before the copy engine writes there.
          fence_async_proxy();
          __syncwarp();
        } else if (lane == 0) {
          store_box(&e_.act_boxes, now.gate.address(), unit_of(now), row_of(now), 0);
        }
        if (lane == 0) store_commit();
      });
    }

   private:
    /// 64 rows x 64 units: a warp has 16 of the rows.
    struct Piece {
      const float* acc;  // of the gates, then of the ups
      int chunk;
      int row;  // this warp's first, in the tile
      WarpTile gate, up;
    };

    /// One group of stores, empty for inference.
    __device__ __forceinline__ void store_preact(const Piece& piece, int lane) {
      if (e_.preact != nullptr) {
        put_rounded<T>(piece.gate, piece.acc);
        put_rounded<T>(piece.up, piece.acc + kOf64);
        fence_async_proxy();
        __syncwarp();
        const int n = e_.intermediate, left = rows_of(piece);
        if (left < WarpTile::kRows) {
          const std::int64_t width = 2 * n;
          T* const gate = static_cast<T*>(e_.preact) + row_of(piece) * width + unit_of(piece);
          piece.gate.store(gate, width, left, n - unit_of(piece));
          piece.up.store(gate + n, width, left, n - unit_of(piece));
        } else if (lane == 0) {
          store_box(&e_.preact_boxes[0], piece.gate.address(), unit_of(piece), row_of(piece), 0);
          store_box(&e_.preact_boxes[1], piece.up.address(), unit_of(piece), row_of(piece), 0);
        }
        __syncwarp();
      }
      if (lane == 0) store_commit();
    }

    __device__ __forceinline__ int unit_of(const Piece& piece) const {
      return tile_.shared * kUnits + piece.chunk * 64;
    }
    /// This warp's first row of H and A, and how many of the expert's there are from it on.
    __device__ __forceinline__ int row_of(const Piece& piece) const {
      return tile_.first_row + piece.row;
    }
    __device__ __forceinline__ int rows_of(const Piece& piece) const {
      return tile_.rows - piece.row;
    }

    const Params& e_;
    const Tile& tile_;
    int consumer_;
  };
};

}  // namespace sonicmoe::cuda
