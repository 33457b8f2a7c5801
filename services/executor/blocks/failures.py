"""Counts what goes wrong with copies, and says when a request has had enough of it."""

from collections import Counter
from enum import Enum

from services.control.counters import Counters
from services.executor.transfer_types import FailureCause

MAX_LOSSES = 3  # of its KV; the last one ends a request
MAX_FAILED_SAVES = 3  # steps with failed copies to the host; after the last one it has no copies


class Verdict(Enum):
    """What becomes of a request whose KV was lost."""

    RECOMPUTE = "recompute"
    GIVE_UP = "give_up"


class FailureLedger:
    """One entry per live request that something went wrong with."""

    def __init__(self, counters: Counters) -> None:
        self._losses: Counter[str] = Counter()
        self._failed_saves: Counter[str] = Counter()
        self._unmirrored: set[str] = set()
        self._counters = counters

    def note_loss(self, request_id: str, cause: FailureCause, *, may_run_again: bool) -> Verdict:
        """Count that a request's KV was lost, and say what becomes of it."""
        self._losses[request_id] += 1
        match cause:
            case FailureCause.FAILED:
                self._counters.num_losses_failed += 1
            case FailureCause.HUNG:
                self._counters.num_losses_hung += 1
            case FailureCause.CORRUPT:
                self._counters.num_losses_corrupt += 1
        if may_run_again and self._losses[request_id] < MAX_LOSSES:
            self._counters.num_recomputed_requests += 1
            return Verdict.RECOMPUTE
        self._counters.num_given_up_requests += 1
        return Verdict.GIVE_UP

    def note_failed_saves(self, request_id: str, num_saves: int) -> bool:
        """Count a step in which saves of a request failed; True: it shall have no host copies."""
        self._counters.num_failed_saves += num_saves
        self._failed_saves[request_id] += 1
        if self._failed_saves[request_id] != MAX_FAILED_SAVES:
            return False
        self._unmirrored.add(request_id)
        self._counters.num_unmirrored_requests += 1
        return True

    def note_failed_restore(self) -> None:
        self._counters.num_failed_restores += 1

    def may_mirror(self, request_id: str) -> bool:
        return request_id not in self._unmirrored

    def forget(self, request_id: str) -> None:
        """Drop the entry of a request that ended."""
        self._losses.pop(request_id, None)
        self._failed_saves.pop(request_id, None)
        self._unmirrored.discard(request_id)
