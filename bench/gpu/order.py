"""Layers read what they should, on real streams, whatever moves; and mistakes are found."""

import random
from typing import Any

from bench.gpu.decode_loop import DecodeLoop, LoopShape
from bench.gpu.machine import Machine


def order(
    machine: Machine, *, num_steps: int, broken: str = "", seed: int = 0, **shape: Any
) -> list[dict[str, Any]]:
    """Change placements and blocks at random; count the blocks that were wrong when read."""
    loop, rng = DecodeLoop(machine, LoopShape(**shape)), random.Random(seed)
    try:
        loop.fill()
        loop.break_it(broken)
        for request in range(loop.shape.num_requests):
            loop.offload(request, range(0, loop.shape.num_layers, 2))
        num_before = loop.num_checked
        for _ in range(num_steps):
            _random_step(loop, rng)
        num_checked, num_loads = loop.num_checked - num_before, loop.runner.num_loads
        loop.take_verdicts()
        num_wrong = machine.num_wrong()
        is_found = bool(loop.num_lost) if loop.shape.guarded else bool(broken)
        return [
            {
                "broken": broken,
                "num_staging": loop.shape.num_staging,
                "num_steps": num_steps,
                "num_loads": num_loads,
                "num_checked": num_checked,
                "num_wrong": num_wrong,
                "guarded": loop.shape.guarded,
                "num_lost": loop.num_lost,
                "as_it_should": bool(num_wrong) == bool(broken) == is_found,
            }
        ]
    finally:
        loop.close()


def _random_step(loop: DecodeLoop, rng: random.Random) -> None:
    shape, transfers = loop.shape, loop.message()
    request = rng.randrange(shape.num_requests)
    if rng.random() < 0.3:
        loop.offload(request, rng.sample(range(shape.num_layers), rng.randrange(1, 4)))
    if rng.random() < 0.2:
        loop.bring_back(request, rng.randrange(shape.num_layers), transfers)
    writes = [
        (r, rng.randrange(shape.num_layers), rng.randrange(shape.num_blocks))
        for r in range(shape.num_requests)
    ]
    loop.run(transfers, writes=writes)
