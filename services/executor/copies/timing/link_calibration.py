"""Measures an idle link before the first step: copies of one block, and of many at once."""

from typing import Any, Protocol

from services.control.measures.step_timing import CopyTime, LinkCalibration
from services.executor.copies.copy_engine import Copy, CopyEngine, Direction

NUM_SMALL = 4
MAX_LARGE_S = 0.02  # what a large copy may take by the small ones' measure


class MeasurableEngine(CopyEngine, Protocol):
    """A copy engine whose copies the host can wait for."""

    def drain(self, ticket: Any) -> None:
        """Block the calling thread until a copy is done, so that `totals` counts it."""


def calibrate(
    engine: MeasurableEngine, *, num_blocks: int, chunk_blocks: int
) -> LinkCalibration | None:
    """Copy blocks of layer group 0 out and back; None if there is no room for one.

    `num_blocks`: in pool and host at least, none of them in use. `chunk_blocks`: blocks that one
    copy moves at most. What the pool's blocks hold stays as it is.
    """
    if num_blocks < 1:
        return None
    small_d2h = _measure(engine, Direction.D2H, num_blocks=1, num_copies=NUM_SMALL)
    small_h2d = _measure(engine, Direction.H2D, num_blocks=1, num_copies=NUM_SMALL)
    one_s = max(small_d2h.busy_s, small_h2d.busy_s) / NUM_SMALL
    affordable = int(MAX_LARGE_S / one_s) if one_s > 0.0 else chunk_blocks
    large = max(1, min(num_blocks, chunk_blocks, affordable))
    large_d2h = _measure(engine, Direction.D2H, num_blocks=large, num_copies=1)
    large_h2d = _measure(engine, Direction.H2D, num_blocks=large, num_copies=1)
    return LinkCalibration(
        small_h2d=small_h2d, large_h2d=large_h2d, small_d2h=small_d2h, large_d2h=large_d2h
    )


def _measure(
    engine: MeasurableEngine, direction: Direction, *, num_blocks: int, num_copies: int
) -> CopyTime:
    before = engine.totals()
    for _ in range(num_copies):
        copy = Copy(
            direction=direction,
            group=0,
            slots=list(range(num_blocks)),
            block_ids=list(range(1, num_blocks + 1)),  # block 0 is vLLM's null block
        )
        engine.drain(engine.submit(copy))
    after = engine.totals()
    if direction is Direction.H2D:
        num_bytes, busy_s = after.h2d_bytes - before.h2d_bytes, after.h2d_busy_s - before.h2d_busy_s
    else:
        num_bytes, busy_s = after.d2h_bytes - before.d2h_bytes, after.d2h_busy_s - before.d2h_busy_s
    return CopyTime(num_bytes=num_bytes, busy_s=busy_s, num_copies=num_copies)
