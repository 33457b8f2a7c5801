"""Decode steps with layers away against the longest path through their layers and copies."""

import statistics
from typing import Any

from bench.gpu.decode_loop import DecodeLoop, LoopShape
from bench.gpu.machine import Machine
from services.executor.copies.timing.step_marks import LayersTime
from services.placement.step_time.latency import Fetch, step_timing
from services.placement.step_time.patterns import make_pattern

NUM_WARM_UP = 3


def overlap(machine: Machine, *, every: int, num_steps: int, **shape: Any) -> list[dict[str, Any]]:
    """Time steps with everything resident, then with every `every`-th layer of all away."""
    loop = DecodeLoop(machine, LoopShape(**shape))
    try:
        loop.fill()
        loop.poisons = False
        resident = _steps(loop, num_steps)
        layer_s = statistics.median(time.layers_s for time in resident) / loop.shape.num_layers
        layers = tuple(range(every - 1, loop.shape.num_layers, every))
        for request in range(loop.shape.num_requests):
            loop.offload(request, layers)
        before = loop.engine.totals()
        away = _steps(loop, num_steps)
        machine.finish()
        after = loop.engine.totals()
        h2d_bytes, busy_s = after.h2d_bytes - before.h2d_bytes, after.h2d_busy_s - before.h2d_busy_s
        copy_s = busy_s / (num_steps + NUM_WARM_UP) / len(layers) / loop.shape.num_requests
        pattern = make_pattern(layers, min(loop.shape.num_staging, len(layers)))
        fetches = [Fetch(pattern=pattern, layer_s=copy_s)] * loop.shape.num_requests
        path_s = step_timing([layer_s] * loop.shape.num_layers, fetches).total_s
        # From the first layer to the last: what the path has, and nothing of the host's.
        step_s = statistics.median(time.layers_s + time.stall_s for time in away)
        return [
            {
                "every": every,
                "num_staging": loop.shape.num_staging,
                "layer_s": layer_s,
                "copy_s": copy_s,
                "link_bytes_per_s": h2d_bytes / busy_s,
                "path_s": path_s,
                "step_s": step_s,
                "period_s": statistics.median(time.period_s or 0.0 for time in away),
                "ratio": step_s / path_s,
            }
        ]
    finally:
        loop.close()


def _steps(loop: DecodeLoop, num_steps: int) -> list[LayersTime]:
    """Return the times of steps, but for the first few and the last."""
    times = []
    for _ in range(num_steps + NUM_WARM_UP):
        loop.run(loop.message())
        loop.machine.finish()
        times.append(loop.marks.take())
    return [time for time in times[NUM_WARM_UP:] if time.step]
