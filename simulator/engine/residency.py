"""Where KV is over time: samples of an engine, evenly thinned out as a run gets longer."""

from dataclasses import dataclass

from services.control.kv import holders_of
from services.control.prefixes.trunks import num_duplicate_blocks, own_columns
from services.control.requests.life import State
from simulator.engine.scheduler import Scheduler

MAX_SAMPLES = 512  # kept of a run, at least half of it once there were so many steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySample:
    """The engine at the end of a step, or when it has nothing left to do."""

    time_s: float
    pool_used_frac: float
    host_used_frac: float
    # Of the layer groups of all running requests that are not on their way to the queue, and of
    # their trunks.
    offloaded_frac: float
    num_running: int  # paused ones included
    num_paused: int
    num_waiting: int


def sample_of(scheduler: Scheduler, now_s: float) -> ResidencySample:
    """Return where KV is now."""
    running, host = scheduler.running, scheduler.host
    staying = (one for one in running if one.record.state is not State.LEAVING)
    holders = list(holders_of(request.kv for request in staying))
    offloaded = sum(len(holder.offloaded) for holder in holders)
    return ResidencySample(
        time_s=now_s,
        pool_used_frac=1.0 - scheduler.pool.num_free / scheduler.pool.num_blocks,
        host_used_frac=1.0 - host.num_unpromised / host.num_blocks if host.num_blocks else 0.0,
        offloaded_frac=offloaded / max(1, len(holders) * scheduler.shape.num_groups),
        num_running=len(running),
        num_paused=sum(bool(request.record.holds) for request in running),
        num_waiting=len(scheduler.waiting),
    )


def duplicate_frac(scheduler: Scheduler) -> float:
    """Return the share of the pool that would be free if live requests shared prefixes there."""
    holders = [(own_columns(one), one.offloaded) for one in scheduler.moves.all()]
    num_blocks = num_duplicate_blocks(holders, num_groups=scheduler.shape.num_groups)
    return num_blocks / scheduler.pool.num_blocks


class ResidencyLog:
    """Keeps at most MAX_SAMPLES, at even distances."""

    def __init__(self) -> None:
        self._kept: list[ResidencySample] = []
        self._interval_s = 0.0

    @property
    def samples(self) -> tuple[ResidencySample, ...]:
        return tuple(self._kept)

    def add(self, sample: ResidencySample) -> None:
        """Take in a sample, not earlier than those before it."""
        soon = self._kept and sample.time_s - self._kept[-1].time_s < self._interval_s
        if soon and sample.num_running:
            return
        self._kept.append(sample)
        if len(self._kept) > MAX_SAMPLES:
            span_s = sample.time_s - self._kept[0].time_s
            self._interval_s = 2.0 * span_s / MAX_SAMPLES
            self._kept = self._thinned()

    def _thinned(self) -> list[ResidencySample]:
        kept = self._kept[:1]
        for sample in self._kept[1:]:
            if sample.time_s - kept[-1].time_s >= self._interval_s:
                kept.append(sample)
        return kept
