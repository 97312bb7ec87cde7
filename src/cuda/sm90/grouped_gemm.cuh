#pragma once

#include "cuda/sm90/mainloop.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/scheduler.cuh"

/// The one kernel behind all grouped GEMMs: persistent, warp-specialised, wgmma. One producer
/// warpgroup fills a ring of stages, two consumer warpgroups multiply and run the epilogue.
namespace sonicmoe::cuda {

template <class Traits>
__device__ __forceinline__ void produce(const GemmParams& p,
                                        const typename Traits::Epilogue::Params& epilogue,
                                        SharedMemory<Traits> memory, int rank, int first,
                                        int stride) {
  // Uniform to the compiler, too, so that tile, block and stage are the warp's to it, not each
  // lane's: docs/findings/machine-code.md.
  const bool leader_warp = uniform(static_cast<int>(threadIdx.x) / 32) == 0;
  if (!Traits::kGathers && !leader_warp) return;
  TileWalk<Traits::kRows, kTileM, Traits::kCluster> walk(
      p.offsets, p.expert_order, p.experts, p.rows, p.part, p.gathered_width, p.n_blocks);
  Ring<Traits::kStages> pipe;
  Ring<Traits::kTileSlots> tiles;
  Tile tile;
  bool more = walk.find(first, rank, &tile);
  if constexpr (Traits::kALoad == ALoad::gather_m) wait_cycles(first * p.start_spread / stride);
  using Gather = typename Traits::Gather;
  // A gather along M looks up the tokens of the next tile before this one's epilogue blocks, when
  // it no longer needs the registers of its own addresses.
  constexpr bool kLooksAhead = Traits::kALoad == ALoad::gather_m;
  typename Gather::Ahead ahead{};
  if (more) ahead = Gather::look_up(p, tile);
  TileCounter<Traits> counter(p.tile_counter, memory, first, stride);
  while (more) {
    if (leader_warp) publish<Traits>(memory, tiles, tile);
    ++tiles.count;
    if constexpr (Traits::kDynamic) {
      if (leader_warp && elect_one()) counter.draw();
    }
    Gather gather(p, tile, ahead);
    const int blocks = k_blocks<Traits>(p, tile);
#pragma unroll Traits::kUnroll
    for (int block = 0; block < blocks; ++block) {
      const std::uint32_t own = memory.a(pipe.slot());
      const std::uint32_t full = memory.full(pipe.slot());
      if constexpr (Traits::kSeparateAEmpty) {
        mbarrier_wait(memory.a_empty(pipe.slot()), pipe.phase() ^ 1);
        gather.load(own, block);
        copy_async_arrive(full);
      }
      if (!Traits::kSeparateAEmpty || leader_warp) {
        mbarrier_wait(memory.empty(pipe.slot()), pipe.phase() ^ 1);
      }
      if (leader_warp && elect_one()) {
        load_boxes<Traits>(p, tile, block, own, memory.b(pipe.slot()), full, rank);
      }
      __syncwarp();
      if constexpr (!Traits::kSeparateAEmpty) {
        gather.load(own, block);
        if constexpr (Traits::kGathers) copy_async_arrive(full);
      }
      ++pipe.count;
      if constexpr (Traits::kDynamic) {
        if (block == counter.kSendAt && leader_warp && elect_one()) counter.send_index(tiles.count);
      }
    }
    const int index = counter.next(tiles.count);
    Tile next;
    if constexpr (kLooksAhead) {
      more = walk.find(index, rank, &next);
      if (more) ahead = Gather::look_up(p, next);
    }
#pragma unroll 1
    for (int block = 0; block < Traits::kEpilogueStages; ++block) {
      const std::uint32_t full = memory.full(pipe.slot());
      mbarrier_wait(memory.empty(pipe.slot()), pipe.phase() ^ 1);
      if (leader_warp && elect_one()) {
        if constexpr (Traits::kEpilogueStages > 0) {
          Traits::Epilogue::template load<Traits>(epilogue, tile, block, memory.a(pipe.slot()),
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
  if (leader_warp) publish<Traits>(memory, tiles, tile);
}

template <class Traits>
__device__ __forceinline__ void consume(const GemmParams& p,
                                        const typename Traits::Epilogue::Params& epilogue,
                                        SharedMemory<Traits> memory, int consumer) {
  Ring<Traits::kStages> pipe;
  Ring<Traits::kTileSlots> tiles;
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32) - 4;
  constexpr int kBlocks = Traits::kEpilogueStages;
  // What the tile before has left to store.
  typename Traits::Epilogue::template Deferred<Traits> deferred;
  const auto send = [&] {
    return Traits::Epilogue::template send<Traits>(epilogue, deferred, memory.warp(warp), consumer);
  };
  // The tile before may still be stored from its last stage. `pipe` is where this one begins.
  const auto give_back = [&] {
    if (kBlocks == 0 || pipe.count == 0) return;
    if (threadIdx.x % 32 == 0) store_wait_read<0>();
    __syncwarp();
    EpilogueStages<Traits>(memory, {pipe.count - 1}).give_back(0);
  };
  // The next tile is taken beside the last products of this one: 0 to 3 % of up_proj. Not where
  // epilogue blocks fill the ring: its announcement would wait for the stage of the last k block,
  // and that for us. Sums over rows gain nothing by it.
  constexpr bool kNextTileEarly = Traits::kRows && kBlocks < Traits::kStages;
  Tile next;
  const auto fetch_next = [&] { next = next_tile<Traits>(memory, tiles); };
  fetch_next();
  while (true) {
    // Here, and not where it is read, or the compiler takes it for each lane's own.
    const Tile tile = {uniform(next.expert), uniform(next.m_block), uniform(next.n_block),
                       uniform(next.first_row), uniform(next.rows)};
    if (tile.expert < 0) break;
    const int blocks = k_blocks<Traits>(p, tile);
    const int turn = static_cast<int>(tiles.count) - 1;
    if constexpr (Traits::kRows) pipe.count = turn * (blocks + kBlocks);
    if (Traits::kPingpong && turn % 2 != consumer) {
      fetch_next();
      continue;
    }

    // Turn k of consumer 0 follows turn k-1 of consumer 1, whose turn k follows that.
    const auto wait_for_turn = [&] {
      if (!Traits::kPingpong) return;
      mbarrier_wait(memory.order(consumer), (turn / 2 + 1 + consumer) % 2);
    };
    const auto end_turn = [&] {
      if (!Traits::kPingpong) return;
      if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.order(consumer ^ 1));
    };
    const int m_first = Traits::kPingpong ? 0 : consumer * Traits::kM64;
    if (Traits::kRows && tile.rows <= tile.m_block * kTileM + m_first * 64) {
      give_back();
      wait_for_turn();
      pass(memory, pipe, blocks + kBlocks);
      end_turn();
      fetch_next();
      continue;
    }
    float acc[Traits::kM64][Traits::kTileN / 2];  // begins where the epilogue or the products say
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
          if constexpr (kNextTileEarly) fetch_next();
        });
    while (send()) {  // where chunks outnumber blocks
    }
    run.finish(acc, deferred, EpilogueStages<Traits>(memory, pipe));
    if constexpr (!kNextTileEarly) fetch_next();
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
      if constexpr (Traits::kSeparateAEmpty) mbarrier_init(memory.a_empty(i), 8);
    }
    for (int i = 0; i < Traits::kTileSlots; ++i) {
      mbarrier_init(memory.published(i), 1);
      mbarrier_init(memory.consumed(i), 256);  // every consumer thread
    }
    for (int i = 0; i < Traits::kIndexSlots; ++i) mbarrier_init(memory.index_sent(i), 1);
    mbarrier_init(memory.order(0), 4);
    mbarrier_init(memory.order(1), 4);
    fence_mbarrier_init();
    prefetch_tensor_map(&p.b_maps[0]);
    prefetch_tensor_map(&p.b_maps[1]);
  }
  cluster_sync();
  // So far this may have run beside the end of the kernel before it, and so may the next one beside
  // ours: it runs only once every CTA of ours has been here. Who does not wait here relies on the
  // one before to have waited, before it let us start, for what made our operands. Those come past
  // L1, by the copy engine and cp.async, and what that kernel waited for is in L2.
  if (!p.overlap_previous) wait_for_previous();
  let_next_start();
  // All of the kernels before have counted.
  if constexpr (Traits::kALoad == ALoad::gather_m) {
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
  if (p.overlap_previous) wait_for_previous();
  // Nobody leaves while the peer may still write into its memory or arrive on its barriers.
  cluster_sync();
}

}  // namespace sonicmoe::cuda
