#!/usr/bin/env python3
"""A model of one multiprocessor, for docs/findings/lagging-consumer.md: prints receipts/lagging-consumer.log.

Two consumer warpgroups split the tiles of a persistent kernel; a ring of stages feeds both, and one
tensor pipe serves them. No measurement: what a lag of consumer 1 gains if stages fill in so many
cycles. Steps of 16 cycles.
"""

from dataclasses import dataclass, field

STEP = 16
PRODUCT = 128  # cycles of a 64 x 256 x 16 product; a k block is four of them
EVERY = 900  # cycles between two stages that fill, at least
GIVEN_BACK = 100  # until the producer hears that a stage is free
HEARD = 60  # until consumer 1 hears that consumer 0 has ended
TILES = 12


@dataclass
class Kernel:
    blocks: int  # along K
    epilogue_blocks: int  # of a tile's stages, after those
    both: int  # cycles of one of those while both consumers are at it ...
    alone: int  # ... and while one is
    between: int  # cycles from a tile's epilogue to the next tile
    stages: int = 4


@dataclass
class Consumer:
    tile: int = 0
    phase: str = "products"  # then "epilogue", "between"
    issued: int = 0  # k blocks of the tile
    running: list = field(default_factory=list)  # [place in the ring, products left], at most two
    over: list = field(default_factory=list)  # places whose products are over, not given back
    chunk: int = 0  # of the epilogue
    left: float = 0  # cycles of the phase
    waited: int = -1000  # when it last waited for the other
    ends: list = field(default_factory=list)


def cycles_per_tile(kernel: Kernel, latency: int, lag: int, gives_back: bool) -> float:
    """`gives_back`: consumer 1 gives the block before the lag back before it waits."""
    of_tile = kernel.blocks + kernel.epilogue_blocks
    places = TILES * of_tile
    full, free = [None] * places, [[None] * places for _ in range(2)]
    filled = last_full = 0
    consumers = [Consumer(), Consumer()]
    at_work, left, turn, now = None, 0, 0, 0
    while any(c.tile < TILES for c in consumers):
        while filled < places:
            before = filled - kernel.stages
            if before >= 0 and any(f[before] is None or f[before] + GIVEN_BACK > now for f in free):
                break
            full[filled] = now
            if filled % of_tile < kernel.blocks:
                full[filled] = last_full = max(now + latency, last_full + EVERY)
            filled += 1
        for i, c in enumerate(consumers):
            if c.tile == TILES:
                continue
            other, first = consumers[1 - i], c.tile * of_tile
            if c.phase == "products":
                while c.issued < kernel.blocks and len(c.running) < 2:
                    place = first + c.issued
                    if full[place] is None or full[place] > now:
                        break
                    if i == 1 and lag and c.issued >= max(0, kernel.blocks - lag):
                        if other.tile == c.tile and other.phase == "products":
                            c.waited = now
                            break
                        if now < c.waited + HEARD:
                            break
                    c.running.append([place, 4])
                    c.issued += 1
                if c.issued == kernel.blocks and not c.running:
                    c.phase, c.chunk, c.left = "epilogue", 0, kernel.alone
            elif c.phase == "epilogue" and c.chunk < kernel.epilogue_blocks:
                place = first + kernel.blocks + c.chunk
                if full[place] is not None and full[place] <= now:
                    shares = other.phase == "epilogue" and other.tile < TILES
                    c.left -= STEP * (kernel.alone / kernel.both if shares else 1)
                    if c.left <= 0:
                        free[i][place] = now
                        c.chunk, c.left = c.chunk + 1, kernel.alone
            elif c.phase == "epilogue":
                c.phase, c.left = "between", kernel.between
            else:
                c.left -= STEP
                if c.left <= 0:
                    c.tile, c.phase, c.issued = c.tile + 1, "products", 0
                    c.ends.append(now)
        for i, c in enumerate(consumers):
            for place in list(c.over):
                # A stage goes back while the next is multiplied, or at the end.
                block = place % of_tile
                last = block == kernel.blocks - 1 or c.phase != "products"
                if last or c.issued > block + 1 or (gives_back and c.waited >= now - STEP):
                    free[i][place] = now
                    c.over.remove(place)
        if at_work is None:
            for i in (turn, 1 - turn):
                if consumers[i].running:
                    at_work, left, turn = consumers[i], PRODUCT, 1 - i
                    break
        if at_work is not None:
            left -= STEP
            if left <= 0:
                at_work.running[0][1] -= 1
                if at_work.running[0][1] == 0:
                    at_work.over.append(at_work.running.pop(0)[0])
                at_work = None
        now += STEP
    ends = consumers[1].ends
    return (ends[-1] - ends[2]) / (len(ends) - 3)


def table(title: str, blocks: tuple, latencies: tuple, **of_kernel) -> None:
    print(f"\n{title}: {of_kernel}")
    for count in blocks:
        kernel = Kernel(blocks=count, **of_kernel)
        for latency in latencies:
            none = cycles_per_tile(kernel, latency, 0, False)
            print(f"{count:4} blocks, {latency} cycles from empty to full: {none:.0f} cycles a tile")
            for lag in range(1, kernel.stages):
                kept, given = (
                    100 * (cycles_per_tile(kernel, latency, lag, back) / none - 1)
                    for back in (False, True)
                )
                print(f"       lag of {lag}: {kept:+.1f} %, block before given back: {given:+.1f} %")


def main() -> None:
    print("$ python benchmarks/lag_model.py, which says what the numbers mean: a model, no measurement")
    times = (1200, 1800, 2400, 3000)
    table("up_proj", (12, 24), times, epilogue_blocks=2, both=1600, alone=1300, between=600)
    table("dgrad", (12, 24), times, epilogue_blocks=4, both=2500, alone=2000, between=800)
    table("held tiles", (4, 8, 16), times[:3], epilogue_blocks=0, both=1, alone=1, between=1100)


if __name__ == "__main__":
    main()
