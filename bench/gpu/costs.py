"""What copies and marks cost beside their bytes: the processor's time, and small copies' delay."""

import math
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.gpu.decode_loop import DecodeLoop, LoopShape
from bench.gpu.machine import Machine, elapsed_s
from services.executor.copies.copy_engine import Copy, Direction
from services.executor.copies.device.batch_copy import descriptors
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.streams import Event, OnFailure, Part, Rows, Stream

NUM_WARM_UP = 5


def loads(
    machine: Machine, *, num_blocks: Sequence[int], num_runs: int, page_bytes: int
) -> list[dict[str, Any]]:
    """Measure the engine thread's processor time per load: its submission and its wait.

    The blocks are scattered. In memory the device's own calls cost nothing.
    """
    rows = []
    for number in num_blocks:
        loop = DecodeLoop(
            machine,
            LoopShape(num_layers=1, num_requests=1, num_blocks=number, page_bytes=page_bytes),
        )
        kv = loop.requests[0][0]
        engine = loop.engine
        if machine.device.type == "cpu":
            engine = StreamCopyEngine(loop.pages, IdleDevice())
        blocks = {"slots": array("q", kv.slots), "block_ids": array("q", kv.own)}
        same = Copy(direction=Direction.H2D, group=0, **blocks)
        try:
            rows.append(
                {
                    "num_blocks": number,
                    "cpu_s_per_load": _load_s(machine, engine, [same] * num_runs),
                    "cpu_s_per_changed_load": _load_s(
                        machine, engine, [replace(same) for _ in range(num_runs)]
                    ),
                }
            )
        finally:
            engine.close()
            loop.close()
    return rows


def _load_s(machine: Machine, engine: StreamCopyEngine, loads: Sequence[Copy]) -> float:
    spent_s = []
    for copy in loads:
        begin_s = time.thread_time()
        engine.wait(engine.submit(copy))
        spent_s.append(time.thread_time() - begin_s)
        machine.finish()
    return statistics.median(spent_s[NUM_WARM_UP:])


class IdleEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_s(self, end: Event) -> float:
        return 0.0


class IdleStream:
    def record(self, *, timing: bool = False) -> IdleEvent:
        return IdleEvent()

    def wait(self, event: Event, timeout_s: float = math.inf) -> bool:
        return True

    def close(self, timeout_s: float) -> bool:
        return True


class IdleDevice:
    """A device whose calls do nothing: what is measured on it is the engine's own work."""

    max_chunks_ahead = 4

    def attach(self) -> None:
        pass

    def compute_stream(self) -> IdleStream:
        return IdleStream()

    def new_stream(self, direction: Direction | None = None) -> IdleStream:
        return IdleStream()

    def copy(
        self, stream: Stream, part: Part, *, source_is_stable: bool, failed: OnFailure
    ) -> None:
        if part.batch.prepared is None:
            part.batch.prepared = descriptors(part.batch)
        part.batch.prepared.of(part)

    def fill(self, rows: torch.Tensor, indices: npt.NDArray[np.int64], byte: int) -> None:
        pass

    def calculate(
        self, work: Callable[[], None], *, reads: Sequence[Rows], writes: Sequence[Rows]
    ) -> None:
        work()


def marks(machine: Machine, *, num_marks: int, **shape: Any) -> list[dict[str, Any]]:
    """Measure what a mark costs the processor, and a step with and without its two."""
    loop = DecodeLoop(machine, LoopShape(**shape))
    try:
        loop.fill()
        loop.poisons = False
        begin_s = time.thread_time()
        for _ in range(num_marks):
            loop.engine.mark()
        mark_s = (time.thread_time() - begin_s) / num_marks
        machine.finish()
        with_s = _step_s(loop)
        loop.marks.layers_begin = lambda step: None  # type: ignore[method-assign]
        loop.marks.layers_end = lambda: None  # type: ignore[method-assign]
        return [{"cpu_s_per_mark": mark_s, "step_s": with_s, "step_without_s": _step_s(loop)}]
    finally:
        loop.close()


def _step_s(loop: DecodeLoop, num_steps: int = 20) -> float:
    def run() -> None:
        for _ in range(num_steps):
            loop.run(loop.message())

    return elapsed_s(loop.machine, run) / num_steps


def small_copies(
    machine: Machine, *, num_runs: int, num_blocks: int, page_bytes: int
) -> list[dict[str, Any]]:
    """Measure how long sampled tokens take to the host, alone and beside copies of KV."""
    loop = DecodeLoop(
        machine,
        LoopShape(num_layers=1, num_requests=1, num_blocks=num_blocks, page_bytes=page_bytes),
    )
    kv, rows = loop.requests[0][0], []
    try:
        for beside in (None, *Direction):
            delays_s = []
            for _ in range(num_runs + NUM_WARM_UP):
                if beside is not None:
                    loop.engine.submit(
                        Copy(direction=beside, group=0, slots=kv.slots, block_ids=kv.own)
                    )
                delays_s.append(elapsed_s(machine, machine.small_copy))
                machine.finish()
            kept = sorted(delays_s[NUM_WARM_UP:])
            rows.append(
                {
                    "beside": beside.value if beside is not None else "nothing",
                    "median_s": statistics.median(kept),
                    "p99_s": kept[int(0.99 * (len(kept) - 1))],
                }
            )
        return rows
    finally:
        loop.close()
