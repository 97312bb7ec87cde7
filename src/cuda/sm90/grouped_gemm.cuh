#pragma once

#include "cuda/sm90/epilogue/epilogue.cuh"
#include "cuda/sm90/mainloop.cuh"
#include "cuda/sm90/scheduler.cuh"

/// The one kernel behind all grouped GEMMs: persistent, warp-specialised, wgmma. A CTA has one
/// producer and two consumer warpgroups; two CTAs make a cluster and share operand B. One tile:
///
///   producer   publish(tile)  load k0 k1 .. kn  load E0 E1    publish(next)  load k0 ..
///                    |              | full           | full          |         ^ waits for empty
///   consumers      begin()  products k0 k1 .. kn       finish() E0 E1    begin()  products k0 ..
///                                    |        |                |                           |
///                         during(), send()  next_tile()   H and A leave          E1 is released
///
/// k0 .. kn are stages with operands, E0 and E1 stages that the epilogue loads or stores from. In
/// ping-pong the consumers take turns: one's finish() overlaps the other's products.
///
///   barrier          arrivals            who arrives, when                       this before that
///   full[stage]      1 + bytes; a        producer thread: issued boxes or has    loads -> products
///                    gather: + 128       none; gather: a thread's copies landed
///   empty[stage]     2 CTAs x 8 warps    consumer warp, in both CTAs: products   reads -> loads
///                    (ping-pong: x 4)    or the copy engine have read the stage  of both CTAs
///   a_empty[stage]   8 warps             as empty, in its CTA (gather_k)         reads -> loads
///   published[slot]  1                   producer warp 0: wrote tiles[slot]      write -> reads
///   consumed[slot]   256 threads         consumer thread: read tiles[slot]       reads -> write
///   turn[consumer]   4 warps             other consumer: issued its last         its products
///                                        products or skipped (ping-pong)         -> ours
///   index_sent[slot] 1 + 4 bytes         own producer thread: expects; CTA 0:    write -> reads
///                                        sends the index (dynamic scheduling)
///   named 1          256 threads         consumer thread: zeroed its part of B   zeros -> products
///   named 2, 3       128 threads         consumer thread: filled its part of     writes -> store
///                                        staging (store_transposed.cuh)
namespace sonicmoe::cuda {

/// The producer warpgroup. Its first warp also schedules tiles; without a gather it works alone.
template <class Traits>
__device__ __forceinline__ void produce(const GemmParams& p,
                                        const typename Traits::Epilogue::Params& epilogue,
                                        SharedStorage<Traits>& memory) {
  // uniform(): so the compiler keeps tile, block and stage once a warp, not in every lane.
  const bool leader_warp = uniform(static_cast<int>(threadIdx.x) / 32) == 0;
  if (!Traits::kGathers && !leader_warp) return;
  using Gather = GatherOf<Traits>;
  TileScheduler<Traits> scheduler(p, memory);
  Ring<Traits::kStages> pipe;
  Ring<Traits::kTileSlots> tiles;
  Tile tile;
  typename Gather::Ahead ahead{};
  bool more = scheduler.first(&tile);
  if (more) ahead = Gather::look_up(p.a, tile);
  while (more) {
    if (leader_warp) publish(memory, tiles, tile);
    ++tiles.count;
    if (Traits::kDynamic && leader_warp && elect_one()) scheduler.draw();
    Gather gather(p.a, tile, ahead);
    const int blocks = k_blocks<Traits>(p, tile);
#pragma unroll Traits::kUnroll
    for (int block = 0; block < blocks; ++block, ++pipe.count) {
      load(p, tile, block, gather, memory, pipe, leader_warp);
      if constexpr (Traits::kDynamic) {
        const bool sends = block == scheduler.kSendAt && leader_warp;
        if (sends && elect_one()) scheduler.send_index(tiles.count);
      }
    }
    // Before the epilogue stages: the gather no longer needs its registers.
    Tile next;
    more = scheduler.next(tiles.count, &next);
    if (more) ahead = Gather::look_up(p.a, next);
#pragma unroll 1
    for (int block = 0; block < Traits::kEpilogueStages; ++block, ++pipe.count) {
      const int stage = pipe.slot();
      memory.empty[stage].wait(pipe.phase() ^ 1);
      if (leader_warp && elect_one()) {
        Traits::Epilogue::template load<Traits>(
            epilogue, tile, block, shared_address(&memory.stages[stage]), memory.full[stage]);
      }
      __syncwarp();
      if constexpr (Traits::kGathers) copy_async_arrive(memory.full[stage].address());
    }
    tile = next;
  }
  tile.expert = -1;
  if (leader_warp) publish(memory, tiles, tile);
}

/// A consumer warpgroup.
template <class Traits>
__device__ __forceinline__ void consume(const GemmParams& p,
                                        const typename Traits::Epilogue::Params& epilogue,
                                        SharedStorage<Traits>& memory, int consumer) {
  using Epilogue = typename Traits::Epilogue;
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32) - kProducerThreads / 32;
  const std::uint32_t staging = shared_address(memory.staging[warp]);
  const int m_first = Traits::kPingpong ? 0 : consumer * Traits::kM64;  // in blocks of 64 rows
  Ring<Traits::kStages> pipe;
  Ring<Traits::kTileSlots> tiles;
  typename Epilogue::template Deferred<Traits> deferred;
  const auto send = [&] {
    return Epilogue::template send<Traits>(epilogue, deferred, staging, consumer);
  };
  // The last epilogue stage of the tile before, from which boxes may still leave.
  const auto release_last_stage = [&] {
    if (Traits::kEpilogueStages == 0 || pipe.count == 0) return;
    if (threadIdx.x % 32 == 0) store_wait_read<0>();
    __syncwarp();
    EpilogueStages<Traits>(memory, pipe.count - 1).release(0);
  };
  // Beside a tile's last products: saves 0 to 3 % of up_proj. Not where epilogue stages fill the
  // ring: their last one reuses the last k block's stage, which is released after issued().
  constexpr bool kNextTileEarly = Traits::kRowsAreM && Traits::kEpilogueStages < Traits::kStages;
  Tile next = next_tile(memory, tiles);
  while (true) {
    // uniform() here and not in next_tile(), or the compiler forgets it on the way.
    const Tile tile = {uniform(next.expert), uniform(next.m_block), uniform(next.n_block),
                       uniform(next.first_row), uniform(next.rows)};
    if (tile.expert < 0) break;
    const auto fetch_next = [&] { next = next_tile(memory, tiles); };
    const int blocks = k_blocks<Traits>(p, tile);
    const int number = static_cast<int>(tiles.count) - 1;
    if constexpr (Traits::kRowsAreM) pipe.count = number * (blocks + Traits::kEpilogueStages);
    if (Traits::kPingpong && number % 2 != consumer) {
      fetch_next();
      continue;
    }
    // Turn i of consumer 0 follows turn i - 1 of consumer 1, whose turn i follows that.
    const auto wait_for_turn = [&] {
      if (Traits::kPingpong) memory.turn[consumer].wait((number / 2 + 1 + consumer) % 2);
    };
    const auto end_turn = [&] {
      if (Traits::kPingpong && threadIdx.x % 32 == 0) memory.turn[consumer ^ 1].arrive();
    };
    if (Traits::kRowsAreM && tile.rows <= tile.m_block * kTileM + m_first * 64) {
      release_last_stage();
      wait_for_turn();
      skip(memory, pipe, blocks + Traits::kEpilogueStages);
      end_turn();
      fetch_next();
      continue;
    }
    float acc[Traits::kM64][Traits::kTileN / 2];  // begin() or the first products set it
    typename Epilogue::template Run<Traits> run{epilogue, p, tile, m_first, staging};
    run.begin(acc);
    wait_for_turn();
    const auto during = [&] {
      release_last_stage();
      run.prefetch();
    };
    const auto issued = [&] {
      end_turn();
      if constexpr (kNextTileEarly) fetch_next();
    };
    multiply(memory, pipe, blocks, tile.rows, m_first, acc, run, during, send, issued);
    while (send()) continue;  // a tile may have fewer k blocks than deferred chunks
    run.finish(acc, deferred, EpilogueStages<Traits>(memory, pipe.count));
    if constexpr (!kNextTileEarly) fetch_next();
  }
  while (send()) continue;
  store_wait();
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const __grid_constant__ GemmParams p,
                 const __grid_constant__ typename Traits::Epilogue::Params epilogue) {
  static_assert(Epilogue<typename Traits::Epilogue, Traits>);
  extern __shared__ __align__(1024) char raw[];
  auto& memory = reinterpret_cast<SharedStorage<Traits>&>(raw);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (threadIdx.x == 0) {
    init_barriers(memory);
    prefetch_tensor_map(&p.b.maps[0]);
    prefetch_tensor_map(&p.b.maps[1]);
  }
  cluster_sync();
  // So far this may run beside the end of kernel N-1 in the stream. The next kernel may start once
  // every CTA has called let_next_start(). With overlap_previous, an earlier kernel produced our
  // operands, and kernel N-1 (or the last one before it without overlap_previous) waited for its
  // end before it triggered a launch. What that kernel wrote is in L2, and no L1 has it yet.
  if (!p.chain.overlap_previous) wait_for_previous();
  let_next_start();
  if constexpr (Traits::kRowsAreM) {  // for a later kernel: core/handoff.h
    const bool resets = p.chain.next_tile_counter != nullptr && blockIdx.x == 0;
    if (resets && threadIdx.x == 0) *p.chain.next_tile_counter = 0;
  }
  if (warpgroup == 0) {
    lower_registers<Traits::kProducerRegisters>();
    produce(p, epilogue, memory);
  } else {
    raise_registers<Traits::kConsumerRegisters>();
    consume(p, epilogue, memory, warpgroup - 1);
  }
  // A kernel that waits for our end relies on the end of all kernels before us.
  __syncwarp();
  if (p.chain.overlap_previous) wait_for_previous();
  // A CTA stays until its peer no longer writes into its memory or arrives on its barriers.
  cluster_sync();
}

}  // namespace sonicmoe::cuda
