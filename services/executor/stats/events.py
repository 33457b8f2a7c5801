"""What the scheduler did with KV, counted since the engine started."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEvents:
    """Running totals."""

    num_evicted_blocks: int = 0  # dropped from the pool because their host copy is complete
    num_restored_groups: int = 0
    num_mirrored_blocks: int = 0  # copied to the host while resident
    num_reclaimed_groups: int = 0  # taken from requests that did not run
    num_pauses: int = 0
    num_parks: int = 0
    num_resumes_in_place: int = 0  # of paused requests
    num_resumes_load: int = 0  # of parked and preempted requests
    num_resumes_recompute: int = 0
    num_resumes_host_resident: int = 0
    num_dropped_copies: int = 0  # parked requests that lost their host copies to others
    num_overdue_holds: int = 0  # pauses and parks that ended by themselves
    num_unknown_ids: int = 0  # orders about requests that are gone


def difference(now: KVEvents, before: KVEvents) -> dict[str, int]:
    """Return what has happened between two totals, without what has not."""
    old = asdict(before)
    return {name: n - old[name] for name, n in asdict(now).items() if n != old[name]}
