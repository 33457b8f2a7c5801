"""One step of the engine: its layers, and the copies that these wait for.

An event simulation, not a formula. The copy of an offloaded layer group may begin when one of its
request's staging buffers is free: the first m at the start of the step, each later one when the
group m places before it has been computed. What may begin at one moment for one group is one copy,
of all requests together. The queue is ordered by the group that needs the data.
A group is computed when all copies for it are there, and what a chunk of a prompt left in its
staging buffer is on the host. While a chunk is under way to the GPU, compute is slower by a fixed
share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.device.copies import ALL_REDUCE, LOAD, CopyJob, Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRequest:
    """One request whose KV is partly on the host."""

    offloaded: Sequence[int]  # layer groups, ascending
    num_buffers: int  # staging buffers, >= 1
    group_bytes: int  # of one group, copied in every step, >= 0
    filled_bytes: int = 0  # of one group, that the step fills in a staging buffer, >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one step does."""

    compute_s: Sequence[float]  # per layer group, without copies beside it
    outside_s: float  # after the layers
    staged: Sequence[StagedRequest] = ()
    num_reduces: Sequence[int] = ()  # per layer group: all-reduces that its compute contains
    reduce_bytes: int = 0  # of each, over the link to the GPU; 0: not over it


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCosts:
    """What copies cost beside the time that they hold the link."""

    slowdown_frac: float = 0.0  # of compute beside a copy to the GPU, >= 0
    submit_s: float = 0.0  # in which nothing is computed, per group and request, >= 0


NO_COSTS = CopyCosts()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How one step went."""

    end_s: float
    compute_s: float  # of all layers, slower where copies ran beside them, with what they submit
    stalls_s: tuple[float, ...]  # before each layer group
    num_loads: int = 0  # groups of requests that were copied in
    reduced_bytes: int = 0  # by all-reduces on the lane to the GPU


class StepRun:
    """One step on the lanes, of which it advances the first up to its own end."""

    def __init__(self, work: StepWork, lane: Lane, d2h: Lane, costs: CopyCosts) -> None:
        """`lane` leads to the GPU, `d2h` to the host."""
        self._work, self._lane, self._d2h, self._costs = work, lane, d2h, costs
        self._slowdown = 1.0 + costs.slowdown_frac
        num_groups = len(work.compute_s)
        self._awaited: list[list[CopyJob]] = [[] for _ in range(num_groups)]
        # What of each group may be copied once so many groups have been computed: bytes of each
        # request.
        self._released: list[dict[int, list[int]]] = [{} for _ in range(num_groups + 1)]
        # Bytes that a group leaves in a buffer, and the group that has the buffer next.
        self._left: list[list[tuple[int, int | None]]] = [[] for _ in range(num_groups)]
        self._freed: list[list[CopyJob]] = [[] for _ in range(num_groups)]
        self._num_loads = 0
        for request in work.staged:
            self._plan(request)

    def _plan(self, request: StagedRequest) -> None:
        chain, depth = request.offloaded, request.num_buffers
        for place, group in enumerate(chain):
            after = 0 if place < depth else chain[place - depth] + 1
            if request.group_bytes:
                self._released[after].setdefault(group, []).append(request.group_bytes)
                self._num_loads += 1
            if request.filled_bytes:
                heir = chain[place + depth] if place + depth < len(chain) else None
                self._left[group].append((request.filled_bytes, heir))

    def run(self, start_s: float) -> StepTimes:
        """Return how the step goes that starts at `start_s`."""
        self._lane.advance(start_s)
        if not self._work.staged and self._lane.is_idle:
            return self._undisturbed(start_s)
        now_s, compute_s, stalls_s = self._release(0, start_s), 0.0, []
        for group, work_s in enumerate(self._work.compute_s):
            ready_s = self._wait(group, now_s)
            stalls_s.append(ready_s - now_s)
            now_s = self._compute_group(group, work_s, ready_s)
            if self._left[group]:
                self._save(group, now_s)
            now_s = self._release(group + 1, now_s)
            compute_s += now_s - ready_s
        end_s = now_s + self._work.outside_s
        self._lane.advance(end_s)
        return StepTimes(
            end_s=end_s,
            compute_s=compute_s,
            stalls_s=tuple(stalls_s),
            num_loads=self._num_loads,
            reduced_bytes=self._work.reduce_bytes * sum(self._work.num_reduces),
        )

    def _undisturbed(self, start_s: float) -> StepTimes:
        """Return the same, where no copy is under way, waits or will begin."""
        now_s, compute_s = start_s, 0.0
        for work_s in self._work.compute_s:
            end_s = now_s + work_s
            compute_s += end_s - now_s
            now_s = end_s
        end_s = now_s + self._work.outside_s
        self._lane.advance(end_s)
        stalls_s = (0.0,) * len(self._work.compute_s)
        return StepTimes(end_s=end_s, compute_s=compute_s, stalls_s=stalls_s)

    def _release(self, num_computed: int, now_s: float) -> float:
        """Queue the copies whose buffers are free once so many groups have been computed.

        Returns when they are queued.
        """
        released = self._released[num_computed]
        if not released:
            return now_s
        for group, parts in sorted(released.items()):
            job = CopyJob(num_bytes=sum(parts), priority=(LOAD, group))
            self._lane.submit(job, now_s)
            self._awaited[group].append(job)
            if self._costs.submit_s:
                now_s += self._costs.submit_s * len(parts)
                self._lane.advance(now_s)
        return now_s

    def _save(self, group: int, now_s: float) -> None:
        """Queue the copies of what a group has left in staging buffers."""
        self._d2h.advance(now_s)
        for num_bytes, heir in self._left[group]:
            job = CopyJob(num_bytes=num_bytes)
            self._d2h.submit(job, now_s)
            if heir is not None:
                self._freed[heir].append(job)

    def _wait(self, group: int, now_s: float) -> float:
        if not (self._freed[group] or self._awaited[group]):
            return now_s
        for lane, jobs in ((self._d2h, self._freed[group]), (self._lane, self._awaited[group])):
            for job in jobs:
                while job.done_s is None:
                    lane.begin(now_s)
                    lane.finish()
                now_s = max(now_s, job.done_s)
        return now_s

    def _compute_group(self, group: int, work_s: float, now_s: float) -> float:
        """Return when a group has been computed; its all-reduces wait for the chunk under way."""
        if not self._work.reduce_bytes:
            return self._compute(work_s, now_s)
        lane, num_reduces = self._lane, self._work.num_reduces[group]
        alone_s = lane.alone_s(self._work.reduce_bytes)
        for _ in range(num_reduces):
            now_s = self._compute(max(0.0, work_s / num_reduces - alone_s), now_s)
            job = CopyJob(num_bytes=self._work.reduce_bytes, priority=(ALL_REDUCE,))
            lane.submit(job, now_s)
            while job.done_s is None:
                lane.begin(now_s)
                lane.finish()
            now_s = job.done_s
        return now_s

    def _compute(self, work_s: float, now_s: float) -> float:
        """Return when `work_s` of compute has been done from `now_s` on."""
        lane = self._lane
        while work_s > 0.0 and (chunk_end_s := lane.begin(now_s)) is not None:
            beside_s = work_s * self._slowdown
            if chunk_end_s > now_s + beside_s:
                return now_s + beside_s
            lane.finish()
            work_s = max(0.0, work_s - (chunk_end_s - now_s) / self._slowdown)
            now_s = max(now_s, chunk_end_s)
        end_s = now_s + work_s
        lane.advance(end_s)
        return end_s
