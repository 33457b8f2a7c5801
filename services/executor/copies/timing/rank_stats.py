"""What one rank reports of its copies."""

from dataclasses import fields
from operator import attrgetter

from services.executor.copies.copy_engine import TransferTotals
from services.executor.copies.transfer_runner import TransferRunner
from services.executor.stats.kv_stats import KVStats, RankTotals
from services.executor.step_messages import FailureCause

NAMES = tuple(field.name for field in fields(RankTotals))
values_of = attrgetter(*NAMES)  # `asdict` takes many times as long, and most steps ask


class RankStats:
    """Turns a runner's running totals into what happened since the last report."""

    def __init__(self, runner: TransferRunner, rank: int) -> None:
        self._runner = runner
        self._rank = str(rank)
        self._reported = self._now()
        self._was_idle = False  # at the last call

    def take(self) -> KVStats | None:
        """Return what happened since the last report; None if nothing moved, as in most steps."""
        was_idle, self._was_idle = self._was_idle, self._runner.watch.is_idle
        if was_idle and self._was_idle:
            return None
        before, self._reported = self._reported, self._now()
        grown = zip(NAMES, values_of(self._reported), values_of(before), strict=True)
        return KVStats(
            data={"ranks": {self._rank: {name: now - then for name, now, then in grown}}}
        )

    def _now(self) -> RankTotals:
        watch = self._runner.watch
        totals: TransferTotals = watch.engine.totals()
        return RankTotals(
            h2d_bytes=totals.h2d_bytes,
            d2h_bytes=totals.d2h_bytes,
            h2d_busy_s=totals.h2d_busy_s,
            d2h_busy_s=totals.d2h_busy_s,
            num_checked_blocks=totals.num_checked_blocks,
            num_failed_copies=watch.failures[FailureCause.FAILED],
            num_hung_copies=watch.failures[FailureCause.HUNG],
            num_corrupt_copies=watch.failures[FailureCause.CORRUPT],
            stall_s=watch.stall_s,
            num_loads=self._runner.num_loads,
            num_steps=self._runner.num_steps,
        )
