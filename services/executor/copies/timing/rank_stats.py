"""What one rank reports of its copies."""

from dataclasses import asdict

from services.executor.copies.copy_engine import TransferTotals
from services.executor.copies.transfer_runner import TransferRunner
from services.executor.stats.kv_stats import KVStats, RankTotals
from services.executor.step_messages import FailureCause


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
        now = self._now()
        before = asdict(self._reported)
        self._reported = now
        delta = {name: value - before[name] for name, value in asdict(now).items()}
        return KVStats(data={"ranks": {self._rank: delta}})

    def _now(self) -> RankTotals:
        watch = self._runner.watch
        totals: TransferTotals = watch.engine.totals()
        return RankTotals(
            **asdict(totals),
            num_failed_copies=watch.failures[FailureCause.FAILED],
            num_hung_copies=watch.failures[FailureCause.HUNG],
            num_corrupt_copies=watch.failures[FailureCause.CORRUPT],
            stall_s=watch.stall_s,
            num_loads=self._runner.num_loads,
            num_steps=self._runner.num_steps,
        )
