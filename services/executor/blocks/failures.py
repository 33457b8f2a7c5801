"""Counts what goes wrong with copies, and says when a request has had enough of it."""

from enum import Enum
from typing import Any, Protocol

from services.control.counters import Counters
from services.control.requests.request_record import RequestRecord
from services.executor.step_messages import FailureCause

MAX_LOSSES = 3  # of its KV; the last one ends a request
MAX_FAILED_SAVES = 3  # steps with failed copies to the host; after the last one it has no copies


class Fate(Enum):
    """What becomes of a request whose KV was lost."""

    RECOMPUTE = "recompute"
    GIVE_UP = "give_up"


def note_loss(
    record: RequestRecord[Any], counters: Counters, cause: FailureCause, *, may_run_again: bool
) -> Fate:
    """Count that a request's KV was lost, and say what becomes of it."""
    record.num_losses += 1
    match cause:
        case FailureCause.FAILED:
            counters.num_losses_failed += 1
        case FailureCause.HUNG:
            counters.num_losses_hung += 1
        case FailureCause.CORRUPT:
            counters.num_losses_corrupt += 1
    if may_run_again and record.num_losses < MAX_LOSSES:
        counters.num_recomputed_requests += 1
        return Fate.RECOMPUTE
    counters.num_given_up_requests += 1
    return Fate.GIVE_UP


class Saved(Protocol):
    """A request, or a trunk."""

    num_failed_saves: int  # steps


def note_failed_saves(one: Saved, counters: Counters, num_saves: int) -> bool:
    """Count a step in which saves of one failed; True: it shall have no more host copies."""
    counters.num_failed_saves += num_saves
    one.num_failed_saves += 1
    if one.num_failed_saves != MAX_FAILED_SAVES:
        return False
    counters.num_unmirrored_requests += 1
    return True


def may_mirror(record: RequestRecord[Any]) -> bool:
    """Return whether a request may have host copies."""
    return record.num_failed_saves < MAX_FAILED_SAVES
