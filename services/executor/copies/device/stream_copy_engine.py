"""Copies on two side streams of a device, beside the stream of the model.

What the model has enqueued by the time of a submission comes before the copy; what it enqueues
after a wait comes after it. The engine itself orders copies among each other: a load comes after
the saves that write its slots or read its blocks. Nothing ever synchronises the whole device, and
on a GPU no thread of the model waits for a copy. On a CPU the thread is the stream, and waits.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.executor.copies.copy_engine import (
    BACKGROUND,
    FOR_EVER,
    Copy,
    CopyFailedError,
    CopyHungError,
    Direction,
    TransferTotals,
)
from services.executor.copies.copy_job import CopyJob, Indices, between_pool_and_host
from services.executor.copies.device.lane import Lane, Saves
from services.executor.copies.device.loads import Loads
from services.executor.copies.pages import POISON_BYTE, GroupPages
from services.executor.copies.streams import CopyBatch, Device, Event
from services.executor.copies.timing.step_marks import Mark


class SaveHistory:
    """Knows the last save that touches a slot or block. Saves end in the order they were made."""

    def __init__(self, *, num_slots: int, num_blocks: int) -> None:
        self._slot_writers = np.zeros(num_slots, dtype=np.int64)  # numbers of saves, 0: none
        self._block_readers = np.zeros(num_blocks, dtype=np.int64)
        self._under_way: deque[CopyJob] = deque()
        self._num_saves = 0

    def covers(self, slots: Indices, block_ids: Indices) -> bool:
        """Whether all slots and blocks exist."""
        return _are_below(slots, len(self._slot_writers)) and _are_below(
            block_ids, len(self._block_readers)
        )

    def note(self, job: CopyJob) -> None:
        """Count a save in, and forget those that are over."""
        self._drop_ended()
        self._num_saves += 1
        self._slot_writers[job.slots] = self._num_saves
        self._block_readers[job.block_ids] = self._num_saves
        self._under_way.append(job)

    def last_before(self, slots: Indices, block_ids: Indices) -> CopyJob | None:
        """Return the last save that a load must follow; None if it is over."""
        self._drop_ended()
        if not self._under_way:
            return None
        num_over = self._num_saves - len(self._under_way)
        last = max(
            self._slot_writers[slots].max(initial=0),
            self._block_readers[block_ids].max(initial=0),
        )
        return self._under_way[int(last) - num_over - 1] if last > num_over else None

    def _drop_ended(self) -> None:
        while self._under_way and self._under_way[0].done:
            self._under_way.popleft()


def _are_below(rows: Indices, bound: int) -> bool:
    unsigned = rows.view(np.uint64)  # what is below zero is large without a sign
    return not len(rows) or bool(unsigned[unsigned.argmax()] < bound)


@dataclass(slots=True, eq=False)
class PreparedCopy:
    """A copy, looked through once however often it is submitted."""

    copy: Copy
    slots: Indices
    block_ids: Indices
    batch: CopyBatch
    exists: bool  # all of its slots and blocks do


class StreamCopyEngine:
    """`CopyEngine` whose waits are waits of the compute stream."""

    def __init__(
        self, pages: Sequence[GroupPages], device: Device, *, poison_targets: bool = False
    ) -> None:
        self.is_idle = False  # once closed: nothing can touch host memory any more
        self._pages = pages
        self.device = device
        self._poison_targets = poison_targets
        self._lanes: dict[Direction, Lane] = {
            Direction.H2D: Loads(device),
            Direction.D2H: Saves(device),
        }
        self._saves = SaveHistory(
            num_slots=pages[0].host[0].shape[0], num_blocks=pages[0].pool[0].shape[0]
        )
        self._loads: dict[int, PreparedCopy] = {}  # each group's last
        # Of the compute stream, in its order and not yet passed: waits, and marks.
        self._points: deque[tuple[Event, Event] | Mark] = deque()
        self._stall_s = self._told_stall_s = 0.0  # that passed waits took
        self._num_bytes = dict.fromkeys(Direction, 0)
        self._busy_s = dict.fromkeys(Direction, 0.0)

    def submit(self, copy: Copy) -> CopyJob:
        prepared = self._prepare(copy)
        slots, block_ids, pages = prepared.slots, prepared.block_ids, self._pages[copy.group]
        if self._poison_targets and copy.direction is Direction.H2D:
            for pool in pages.pool:
                self.device.fill(pool, block_ids, POISON_BYTE)
        ready = self.device.compute_stream().record()
        job = CopyJob(copy, slots, block_ids, pages, ready, prepared.batch)
        if not prepared.exists:  # as an address, it would be anybody's memory
            job.error = IndexError("a slot or block that does not exist")
        elif copy.direction is Direction.H2D:
            job.after_save = self._saves.last_before(slots, block_ids)
            self._lanes[Direction.H2D].submit(job)
        else:
            self._lanes[Direction.D2H].submit(job)
            self._saves.note(job)
        return job

    def _prepare(self, copy: Copy) -> "PreparedCopy":
        """Return what each submission of a copy shares: step after step loads the same."""
        prepared = self._loads.get(copy.group)
        if prepared is not None and prepared.copy is copy:
            return prepared
        slots = np.asarray(copy.slots, dtype=np.int64)
        block_ids = np.asarray(copy.block_ids, dtype=np.int64)
        batch = between_pool_and_host(copy.direction, self._pages[copy.group], slots, block_ids)
        exists = self._saves.covers(slots, block_ids)
        prepared = PreparedCopy(copy, slots, block_ids, batch, exists)
        if copy.direction is Direction.H2D and copy.urgency != BACKGROUND:
            self._loads[copy.group] = prepared
        return prepared

    def wait(self, ticket: CopyJob, timeout_s: float = FOR_EVER) -> float:
        if timeout_s <= 0 and not ticket.done:
            raise CopyHungError(f"not done after {timeout_s} s")
        self._lanes[ticket.copy.direction].settle(ticket)
        if ticket.end is not None and not ticket.end.query():
            self._hold_layers_up(ticket.end, timeout_s)
        if ticket.error is not None:
            raise CopyFailedError(str(ticket.error)) from ticket.error
        return self._take_stalls()

    def _hold_layers_up(self, end: Event, timeout_s: float) -> None:
        """Let what the compute stream is given from now on come after a copy's end."""
        compute = self.device.compute_stream()
        begin = compute.record(timing=True)
        has_passed = compute.wait(end, timeout_s)
        self._points.append((begin, compute.record(timing=True)))
        if not has_passed:
            raise CopyHungError(f"not done after {timeout_s} s")

    def drain(self, ticket: CopyJob) -> None:
        self._lanes[ticket.copy.direction].settle(ticket)
        if ticket.end is not None:
            ticket.end.synchronize()

    def cancel(self, ticket: CopyJob) -> None:
        self._lanes[ticket.copy.direction].cancel(ticket)

    def totals(self) -> TransferTotals:
        for direction, lane in self._lanes.items():
            num_bytes, busy_s = lane.take_busy()
            self._num_bytes[direction] += num_bytes
            self._busy_s[direction] += busy_s
        return TransferTotals(
            h2d_bytes=self._num_bytes[Direction.H2D],
            d2h_bytes=self._num_bytes[Direction.D2H],
            h2d_busy_s=self._busy_s[Direction.H2D],
            d2h_busy_s=self._busy_s[Direction.D2H],
        )

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.stop()
        # Saves first: loads may wait for them.
        has_ended = [self._lanes[direction].close() for direction in (Direction.D2H, Direction.H2D)]
        self.is_idle = all(has_ended)

    def mark(self) -> Mark:
        """Mark where the compute stream is."""
        mark = Mark(self.device.compute_stream().record(timing=True))
        self._points.append(mark)
        return mark

    def has_passed(self, mark: Mark) -> bool:
        self._pass_points()
        return mark.stall_s is not None

    def _take_stalls(self) -> float:
        """Return what waits of the compute stream took that have passed since the last call."""
        self._pass_points()
        stall_s, self._told_stall_s = self._stall_s - self._told_stall_s, self._stall_s
        return stall_s

    def _pass_points(self) -> None:
        while self._points:
            point = self._points[0]
            end = point.event if isinstance(point, Mark) else point[1]
            if not end.query():
                return
            self._points.popleft()
            if isinstance(point, Mark):
                point.stall_s = self._stall_s
            else:
                self._stall_s += point[0].elapsed_s(end)
