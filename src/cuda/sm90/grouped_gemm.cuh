#pragma once

#include <climits>

#include "cuda/device/ptx.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/sm90/operands.cuh"
#include "cuda/sm90/tile_walk.cuh"
#include "cuda/sm90/traits.cuh"

/// The one kernel behind all grouped GEMMs: persistent, warp-specialised, wgmma. One producer
/// warpgroup fills a ring of stages, two consumer warpgroups multiply and run the epilogue.
namespace sonicmoe::cuda {

/// An expert without rows has a block of zeros: its gradient is written, too.
template <class Traits>
__device__ __forceinline__ int k_blocks(const GemmParams& p, const Tile& tile) {
  if constexpr (Traits::kRows) return p.k_blocks;
  return max(1, static_cast<int>((static_cast<unsigned>(tile.rows) + kK - 1) / kK));
}

/// The bulk copies of one stage, by one thread.
template <class Traits>
__device__ __forceinline__ void load_boxes(const GemmParams& p, const Tile& tile, int block,
                                           std::uint32_t own, std::uint32_t shared,
                                           std::uint32_t full, int rank) {
  constexpr int kN = Traits::kN;
  // An expert without rows: its gradient comes from zeros, which zero_tail() writes.
  if (!Traits::kRows && tile.rows == 0) return mbarrier_arrive(full);
  // Who has too few registers asks for the rank again.
  if constexpr (!Traits::kGathers || Traits::kDealt) rank = static_cast<int>(cluster_rank());
  const Share share{rank, Traits::kRows && tile.apart != 0};
  constexpr int kOwnBox = Traits::kGathers ? 0 : kOwnBytes;
  mbarrier_expect(full, kN * kLineBytes + kOwnBox);
  if constexpr (Traits::kRows) {
    const int half = block >= p.k_half;
    const int k = (block - half * p.k_half) * kK;
    if constexpr (Traits::kSharedMajor == Major::k) {
      const CUtensorMap* const maps[2] = {&p.shared[0], &p.shared[1]};
      const int first = tile.shared * (p.paired ? kN / 2 : kN);
      load_shared_k<kN>(shared, full, share, maps, {first, first + (p.paired ? 0 : kN / 2)}, k,
                        tile.expert);
    } else {
      load_shared_mn<kN>(shared, full, share, &p.shared[half], tile.shared * kN, p.shared_last, k,
                         tile.expert);
    }
    if constexpr (!Traits::kGathers) {
      load_box(own, &p.own[half], full, k, tile.first_row + tile.own * kOwn, 0);
    }
  } else {
    const int half = tile.shared >= p.shared_half;
    // Zeros past the end come here: to look for it costs 0.3 to 4 % where no tile reaches past it
    // (docs/findings/past-the-end.md).
    constexpr int kNoLast = INT_MAX;
    load_shared_mn<kN>(shared, full, share, &p.shared[half],
                       (tile.shared - half * p.shared_half) * kN, kNoLast,
                       tile.first_row + block * kK, 0);
    if constexpr (!Traits::kGathers) {
#pragma unroll
      for (int chunk = 0; chunk < kOwn / 64; ++chunk) {
        load_box(own + chunk * kChunkBytes, &p.own[0], full, tile.own * kOwn + chunk * 64,
                 tile.first_row + block * kK, 0);
      }
    }
  }
}

/// Tells the consumers which tile comes next; a negative expert ends the work. By the first warp of
/// the producer, which walks ahead of them. They need no walk of their own, and its registers.
template <class Traits>
__device__ __forceinline__ void announce(SharedMemory<Traits> memory, Ring<Traits::kTiles> tiles,
                                         const Tile& tile) {
  mbarrier_wait(memory.taken(tiles.slot()), tiles.phase() ^ 1);
  if (elect_one()) {
    const std::uint32_t at = memory.tile(tiles.slot());
    asm volatile(
        "st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n"
        "st.shared.b32 [%0 + 16], %5;" ::"r"(at),
        "r"(tile.expert), "r"(tile.own), "r"(tile.shared), "r"(tile.first_row), "r"(tile.rows)
        : "memory");
    mbarrier_arrive(memory.announced(tiles.slot()));
  }
  __syncwarp();
}

/// The next tile, as each lane has read it. Every lane says that it has: for racecheck, to which
/// the arrival of one says nothing about the others of its warp.
template <class Traits>
__device__ __forceinline__ Tile take(SharedMemory<Traits> memory, Ring<Traits::kTiles>& tiles) {
  mbarrier_wait(memory.announced(tiles.slot()), tiles.phase());
  const std::uint32_t at = memory.tile(tiles.slot());
  Tile tile{};
  asm volatile(
      "ld.shared.v4.b32 {%0, %1, %2, %3}, [%5];\n"
      "ld.shared.b32 %4, [%5 + 16];"
      : "=r"(tile.expert), "=r"(tile.own), "=r"(tile.shared), "=r"(tile.first_row), "=r"(tile.rows)
      : "r"(at)
      : "memory");
  mbarrier_arrive(memory.taken(tiles.slot()));
  ++tiles.count;
  return tile;
}

/// The number of the tile that a cluster has after the one it has: every stride-th; or, with a
/// counter, tiles are dealt in order to whoever asks next. By stride a cluster that is slower than
/// others falls behind with every tile, and no longer finds their operands in L2
/// (docs/findings/dealing.md).
///
/// The leader of the first CTA draws while a tile is loaded, and tells both CTAs. No number is
/// overwritten before all have read it: a CTA is at most kStages blocks ahead of its peer. A
/// cluster's first tile is not drawn, and whoever draws a number past the last tile ends. Without
/// kDealt there is next() alone.
template <class Traits>
class Dealer {
 public:
  /// The block, from 0, by which there is an answer. Every tile that is dealt has it.
  static constexpr int kTellAt = 3;

  /// `counter`: null where tiles go by stride.
  __device__ __forceinline__ Dealer(std::int32_t* counter, SharedMemory<Traits> memory, int first,
                                    int stride)
      : counter_(counter), memory_(memory), stride_(stride), number_(first) {}

  /// By one thread of each CTA, before the blocks of a tile. Nothing waits for the answer here, and
  /// elect_one() elects the same thread for tell().
  __device__ __forceinline__ void ask() {
    if (counter_ != nullptr && cluster_rank() == 0) drawn_ = atomicAdd(counter_, 1);
  }
  /// By the same thread, later. `tiles`: how many this cluster has had, with this one.
  __device__ __forceinline__ void tell(unsigned tiles) {
    if (counter_ == nullptr) return;
    const Ring<Traits::kTold> place{tiles - 1};
    mbarrier_expect(memory_.told(place.slot()), 4);
    if (cluster_rank() != 0) return;
    // What is below 0 or past this, because the counter did not begin with 0, is past the last
    // tile: no operands have so many.
    constexpr unsigned kMost = 1u << 30;
    const int number = static_cast<int>(min(static_cast<unsigned>(drawn_), kMost)) + stride_;
#pragma unroll
    for (int to = 0; to < Traits::kCluster; ++to) {
      store_async(memory_.told_number(place.slot()), memory_.told(place.slot()), to, number);
    }
  }
  /// By all threads that produce.
  __device__ __forceinline__ int next(unsigned tiles) {
    if constexpr (Traits::kDealt) {
      if (counter_ != nullptr) {
        const Ring<Traits::kTold> place{tiles - 1};
        mbarrier_wait(memory_.told(place.slot()), place.phase());
        return uniform(load_shared_word(memory_.told_number(place.slot())));
      }
    }
    return number_ += stride_;
  }

 private:
  std::int32_t* counter_;
  SharedMemory<Traits> memory_;
  int stride_;
  int number_;     // of the tile, by stride
  int drawn_ = 0;  // by the thread that asks and tells
};

template <class Traits>
__device__ __forceinline__ void produce(const GemmParams& p,
                                        const typename Traits::Epilogue::Params& epilogue,
                                        SharedMemory<Traits> memory, int rank, int first,
                                        int stride) {
  // Uniform to the compiler, too, so that tile, block and stage are the warp's to it, not each
  // lane's: docs/findings/machine-code.md.
  const bool leader_warp = uniform(static_cast<int>(threadIdx.x) / 32) == 0;
  if (!Traits::kGathers && !leader_warp) return;
  TileWalk<Traits::kRows, kOwn, Traits::kCluster> walk(p.offsets, p.expert_order, p.experts, p.rows,
                                                       p.part, p.gathered_width, p.shared_tiles);
  Ring<Traits::kStages> pipe;
  Ring<Traits::kTiles> tiles;
  Tile tile;
  bool more = walk.find(first, rank, &tile);
  if constexpr (Traits::kOwnLoad == Own::gather_rows) wait_cycles(first * p.start_spread / stride);
  using Gather = typename Traits::Gather;
  // A gather along M looks up the tokens of the next tile before this one's epilogue blocks, when
  // it no longer needs the registers of its own addresses.
  constexpr bool kLooksAhead = Traits::kOwnLoad == Own::gather_rows;
  typename Gather::Ahead ahead{};
  if (more) ahead = Gather::look_up(p, tile);
  Dealer<Traits> dealer(p.tile_counter, memory, first, stride);
  while (more) {
    if (leader_warp) announce<Traits>(memory, tiles, tile);
    ++tiles.count;
    if constexpr (Traits::kDealt) {
      if (leader_warp && elect_one()) dealer.ask();
    }
    Gather gather(p, tile, ahead);
    const int blocks = k_blocks<Traits>(p, tile);
#pragma unroll Traits::kBlocksInTurn
    for (int block = 0; block < blocks; ++block) {
      const std::uint32_t own = memory.own(pipe.slot());
      const std::uint32_t full = memory.full(pipe.slot());
      if constexpr (Traits::kOwnEmpties) {
        mbarrier_wait(memory.own_empty(pipe.slot()), pipe.phase() ^ 1);
        gather.load(own, block);
        copy_async_arrive(full);
      }
      if (!Traits::kOwnEmpties || leader_warp) {
        mbarrier_wait(memory.empty(pipe.slot()), pipe.phase() ^ 1);
      }
      if (leader_warp && elect_one()) {
        load_boxes<Traits>(p, tile, block, own, memory.shared(pipe.slot()), full, rank);
      }
      __syncwarp();
      if constexpr (!Traits::kOwnEmpties) {
        gather.load(own, block);
        if constexpr (Traits::kGathers) copy_async_arrive(full);
      }
      ++pipe.count;
      if constexpr (Traits::kDealt) {
        if (block == dealer.kTellAt && leader_warp && elect_one()) dealer.tell(tiles.count);
      }
    }
    const int index = dealer.next(tiles.count);
    Tile next;
    if constexpr (kLooksAhead) {
      more = walk.find(index, rank, &next);
      if (more) ahead = Gather::look_up(p, next);
    }
#pragma unroll 1
    for (int block = 0; block < Traits::kEpilogueBlocks; ++block) {
      const std::uint32_t full = memory.full(pipe.slot());
      mbarrier_wait(memory.empty(pipe.slot()), pipe.phase() ^ 1);
      if (leader_warp && elect_one()) {
        if constexpr (Traits::kEpilogueBlocks > 0) {
          Traits::Epilogue::template load<Traits>(epilogue, tile, block, memory.own(pipe.slot()),
                                                  full);
        }
      }
      __syncwarp();
      if constexpr (Traits::kGathers) copy_async_arrive(full);
      ++pipe.count;
    }
    if constexpr (kLooksAhead) {
      tile = next;
    } else {
      more = walk.find(index, rank, &tile);
    }
  }
  tile.expert = -1;
  if (leader_warp) announce<Traits>(memory, tiles, tile);
}

/// This warp has read the stage, its own and the peer's copy of the shared operand alike.
template <class Traits>
__device__ __forceinline__ void release(SharedMemory<Traits> memory, int stage) {
  const unsigned lane = threadIdx.x % 32;
  if (lane < Traits::kCluster) mbarrier_arrive_at(memory.empty(stage), lane);
  if constexpr (Traits::kOwnEmpties) {
    if (lane == Traits::kCluster) mbarrier_arrive(memory.own_empty(stage));
  }
}

/// The stages after those of a tile's k blocks, which belong to its epilogue: for what it reads,
/// and to store from. It waits for each, in order, and gives back all but the last, which goes back
/// during the next tile.
template <class Traits>
class EpilogueBlocks {
 public:
  __device__ __forceinline__ EpilogueBlocks(SharedMemory<Traits> memory,
                                            const Ring<Traits::kStages>& pipe)
      : memory_(memory), first_(pipe) {}

  /// Where part 0 or 1 of a tile's rows x 64 columns lies in a stage: away from the gathered
  /// operand where there is room, else the second in its place.
  static constexpr int place(int part) {
    static_assert(Traits::kStageBytes >= 2 * kOwnBytes);
    const int at = (1 + part) * kOwnBytes;
    return at + kOwnBytes <= Traits::kStageBytes ? at : 0;
  }

  /// Address of stage `block`, once it is there.
  __device__ __forceinline__ std::uint32_t wait(int block) const {
    const Ring<Traits::kStages> at = ring(block);
    mbarrier_wait(memory_.full(at.slot()), at.phase());
    return memory_.own(at.slot());
  }
  /// This warp has read stage `block`, or the copy engine has what it stored from there. Like
  /// release(), but the arrival on our own barrier is a local one: threads that read and wrote the
  /// stage themselves are followed in this CTA by threads that fill it.
  __device__ __forceinline__ void give_back(int block) const {
    const std::uint32_t empty = memory_.empty(ring(block).slot());
    const unsigned lane = threadIdx.x % 32;
    if (lane == cluster_rank()) {
      mbarrier_arrive(empty);
    } else if (lane < Traits::kCluster) {
      mbarrier_arrive_at(empty, lane);
    }
  }

 private:
  __device__ __forceinline__ Ring<Traits::kStages> ring(int block) const {
    return {first_.count + block};
  }
  SharedMemory<Traits> memory_;
  Ring<Traits::kStages> first_;
};

/// Rows that a step of the products takes.
inline constexpr int kStepRows = 16;

/// The last k block of an expert has rows of other experts in its multicast operand, and zero times
/// their NaN would be NaN: zero those lines, as far as the last step goes. The gathered operand
/// came with zeros there.
template <class Traits>
__device__ __forceinline__ void zero_tail(SharedMemory<Traits> memory, int stage, int valid) {
  const int t = static_cast<int>(threadIdx.x) - 128;
  const int lines = max(1, (valid + kStepRows - 1) / kStepRows) * kStepRows - valid;
  if (lines == 0) return;
  constexpr int kPieces = Traits::kN / 64 * 8;  // 16-byte pieces of one k
  for (int i = t; i < lines * kPieces; i += 256) {
    const int line = valid + i / kPieces;
    const std::uint32_t at =
        memory.shared(stage) + i % kPieces / 8 * kChunkBytes + line * kLineBytes + i % 8 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  fence_async_proxy();
  named_barrier(1, 256);
}

/// Keeps the pipeline going through a tile of which this warpgroup's part has no rows. Its last
/// epilogue block is seen full too, and goes back when the next tile begins, as always.
template <class Traits>
__device__ __forceinline__ void pass(SharedMemory<Traits> memory, Ring<Traits::kStages>& pipe,
                                     int blocks) {
#pragma unroll 1  // unrolled, it takes registers from all of the kernel
  for (int block = 0; block < blocks; ++block, ++pipe.count) {
    mbarrier_wait(memory.full(pipe.slot()), pipe.phase());
    const bool held = Traits::kEpilogueBlocks > 0 && block + 1 == blocks;
    if (!held) release(memory, pipe.slot());
  }
}

/// acc = the products of all k blocks of a tile, added to what is there if the epilogue says so.
/// Calls during() beside those of the first, send() beside those of each in the loop, and issued()
/// when the last are on their way.
template <class Traits, class During, class Send, class Issued>
__device__ __forceinline__ void multiply(SharedMemory<Traits> memory, Ring<Traits::kStages>& pipe,
                                         int blocks, int rows, int m_first,
                                         float (&acc)[Traits::kMBlocks][Traits::kN / 2],
                                         During&& during, Send&& send, Issued&& issued) {
  constexpr Major kMajorA = Traits::kOwnMajor;
  constexpr Major kMajorB = Traits::kSharedMajor;
  const std::uint32_t first_a =
      descriptor<kMajorA>(memory.own(0) + m_first * kChunkBytes, kChunkBytes);
  const std::uint32_t first_b = descriptor<kMajorB>(memory.shared(0), kChunkBytes);
  const auto pin_all = [&] {
#pragma unroll
    for (int m = 0; m < Traits::kMBlocks; ++m) pin(acc[m]);
  };
  const auto stage_offset = [&] {
    return static_cast<std::uint32_t>(pipe.slot() * (Traits::kStageBytes >> 4));
  };
  // `later`: 0 for the first step of a tile.
  const auto step = [&](std::uint32_t a, std::uint32_t b, int later) {
#pragma unroll
    for (int m = 0; m < Traits::kMBlocks; ++m) {
      wgmma<typename Traits::T, Traits::kN, kMajorA, kMajorB>(acc[m], a + m * (kChunkBytes >> 4), b,
                                                              Traits::Epilogue::kAdds ? 1 : later);
    }
  };
  // Contractions: the last block need not have all its rows.
  const int whole = Traits::kRows ? blocks : static_cast<int>(static_cast<unsigned>(rows) / kK);

  int previous = -1;
  const auto whole_block = [&](int block, auto later) {
    mbarrier_wait(memory.full(pipe.slot()), pipe.phase());
    // The gathered operand was written through the generic proxy; we have acquired those writes
    // and pass them on to wgmma, which reads through the async proxy.
    if constexpr (Traits::kGathers) fence_async_proxy();
    const std::uint32_t at = stage_offset();
    pin_all();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kK / kStepRows; ++i) {
      step(first_a + at + i * kStepK16<kMajorA>, first_b + at + i * kStepK16<kMajorB>,
           i > 0 ? 1 : static_cast<int>(later));
    }
    wgmma_commit();
    pin_all();
    if (block == 0) during();
    // In the loop: another copy of its code beside the first block gains nothing.
    if constexpr (std::is_same_v<decltype(later), int>) send();
    // A stage goes back once the next block is being multiplied.
    wgmma_wait<1>();
    if (previous >= 0) release(memory, previous);
    previous = pipe.slot();
    ++pipe.count;
  };
  int block = 0;
  if constexpr (Traits::kRows) whole_block(block++, std::integral_constant<int, 0>{});
  for (; block < whole; ++block) whole_block(block, Traits::kRows ? 1 : block);
  if constexpr (!Traits::kRows) {
    if (whole < blocks) {
      mbarrier_wait(memory.full(pipe.slot()), pipe.phase());
      const int valid = rows - whole * kK;
      zero_tail(memory, pipe.slot(), valid);
      if constexpr (Traits::kGathers) fence_async_proxy();
      std::uint32_t a = first_a + stage_offset(), b = first_b + stage_offset();
      int later = whole;
      int left = valid;
#pragma unroll 1
      do {
        pin_all();
        wgmma_fence();
        step(a, b, later);
        wgmma_commit();
        pin_all();
        later = 1;
        a += kStepK16<kMajorA>;
        b += kStepK16<kMajorB>;
        left -= kStepRows;
      } while (left > 0);
      if (whole == 0) during();
      wgmma_wait<1>();
      if (previous >= 0) release(memory, previous);
      previous = pipe.slot();
      ++pipe.count;
    }
  }
  issued();
  wgmma_wait<0>();
  pin_all();
  release(memory, previous);
}

template <class Traits>
__device__ __forceinline__ void consume(const GemmParams& p,
                                        const typename Traits::Epilogue::Params& epilogue,
                                        SharedMemory<Traits> memory, int consumer) {
  Ring<Traits::kStages> pipe;
  Ring<Traits::kTiles> tiles;
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32) - 4;
  constexpr int kBlocks = Traits::kEpilogueBlocks;
  // What the tile before has left to store.
  typename Traits::Epilogue::template Held<Traits> held;
  const auto send = [&] {
    return Traits::Epilogue::template send<Traits>(epilogue, held, memory.warp(warp), consumer);
  };
  // The tile before may still be stored from its last stage. `pipe` is where this one begins.
  const auto give_back = [&] {
    if (kBlocks == 0 || pipe.count == 0) return;
    if (threadIdx.x % 32 == 0) store_wait_read<0>();
    __syncwarp();
    EpilogueBlocks<Traits>(memory, {pipe.count - 1}).give_back(0);
  };
  // The next tile is taken beside the last products of this one: 0 to 3 % of up_proj. Not where
  // epilogue blocks fill the ring: its announcement would wait for the stage of the last k block,
  // and that for us. Sums over rows gain nothing by it.
  constexpr bool kTakesEarly = Traits::kRows && kBlocks < Traits::kStages;
  Tile next;
  const auto take_next = [&] { next = take<Traits>(memory, tiles); };
  take_next();
  while (true) {
    // Here, and not where it is read, or the compiler takes it for each lane's own.
    const Tile tile = {uniform(next.expert), uniform(next.own), uniform(next.shared),
                       uniform(next.first_row), uniform(next.rows)};
    if (tile.expert < 0) break;
    const int blocks = k_blocks<Traits>(p, tile);
    const int turn = static_cast<int>(tiles.count) - 1;
    if constexpr (Traits::kRows) pipe.count = turn * (blocks + kBlocks);
    if (Traits::kPingpong && turn % 2 != consumer) {
      take_next();
      continue;
    }

    // Turn k of consumer 0 follows turn k-1 of consumer 1, whose turn k follows that.
    const auto wait_for_turn = [&] {
      if (!Traits::kPingpong) return;
      mbarrier_wait(memory.turn(consumer), (turn / 2 + 1 + consumer) % 2);
    };
    const auto end_turn = [&] {
      if (!Traits::kPingpong) return;
      if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.turn(consumer ^ 1));
    };
    const int m_first = Traits::kPingpong ? 0 : consumer * Traits::kMBlocks;
    if (Traits::kRows && tile.rows <= tile.own * kOwn + m_first * 64) {
      give_back();
      wait_for_turn();
      pass(memory, pipe, blocks + kBlocks);
      end_turn();
      take_next();
      continue;
    }
    float acc[Traits::kMBlocks][Traits::kN / 2];  // begins where the epilogue or the products say
    typename Traits::Epilogue::template Run<Traits> run(epilogue, p, tile, m_first,
                                                        memory.warp(warp));
    run.begin(acc);
    wait_for_turn();
    multiply<Traits>(
        memory, pipe, blocks, tile.rows, m_first, acc,
        [&] {
          give_back();
          run.prefetch();
        },
        send,
        [&] {
          end_turn();
          if constexpr (kTakesEarly) take_next();
        });
    while (send()) {  // where chunks outnumber blocks
    }
    run.finish(acc, held, EpilogueBlocks<Traits>(memory, pipe));
    if constexpr (!kTakesEarly) take_next();
  }
  while (send()) {
  }
  store_wait();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    grouped_gemm(const __grid_constant__ GemmParams p,
                 const __grid_constant__ typename Traits::Epilogue::Params epilogue) {
  extern __shared__ __align__(1024) char raw[];
  const SharedMemory<Traits> memory{shared_address(raw)};
  const int rank = static_cast<int>(cluster_rank());
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages; ++i) {
      // The leader's expect, and one arrival of each gathering thread.
      mbarrier_init(memory.full(i), 1 + (Traits::kGathers ? kProducerThreads : 0));
      // Every warp that reads the stage, in every CTA that wrote into it.
      mbarrier_init(memory.empty(i), Traits::kCluster * (Traits::kPingpong ? 4 : 8));
      if constexpr (Traits::kOwnEmpties) mbarrier_init(memory.own_empty(i), 8);
    }
    for (int i = 0; i < Traits::kTiles; ++i) {
      mbarrier_init(memory.announced(i), 1);
      mbarrier_init(memory.taken(i), 256);  // every consumer thread
    }
    for (int i = 0; i < Traits::kTold; ++i) mbarrier_init(memory.told(i), 1);
    mbarrier_init(memory.turn(0), 4);
    mbarrier_init(memory.turn(1), 4);
    fence_mbarrier_init();
    prefetch_tensor_map(&p.shared[0]);
    prefetch_tensor_map(&p.shared[1]);
  }
  cluster_sync();
  // So far this may have run beside the end of the kernel before it, and so may the next one beside
  // ours: it runs only once every CTA of ours has been here. Who does not wait here relies on the
  // one before to have waited, before it let us start, for what made our operands. Those come past
  // L1, by the copy engine and cp.async, and what that kernel waited for is in L2.
  if (!p.beside_previous) wait_for_previous();
  let_next_start();
  // All of the kernels before have counted.
  if constexpr (Traits::kOwnLoad == Own::gather_rows) {
    if (p.next_tile_counter != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
      *p.next_tile_counter = 0;
  }

  const int first = static_cast<int>(blockIdx.x) / Traits::kCluster;
  const int stride = static_cast<int>(gridDim.x) / Traits::kCluster;
  if (warpgroup == 0) {
    lower_registers<Traits::kProducerRegisters>();
    produce<Traits>(p, epilogue, memory, rank, first, stride);
  } else {
    raise_registers<Traits::kConsumerRegisters>();
    consume<Traits>(p, epilogue, memory, warpgroup - 1);
  }
  // Our end implies the end of all before us, for whoever waits for us.
  __syncwarp();
  if (p.beside_previous) wait_for_previous();
  // Nobody leaves while the peer may still write into its memory or arrive on its barriers.
  cluster_sync();
}

}  // namespace sonicmoe::cuda
