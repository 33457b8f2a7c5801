"""Every Redis key of the tracker.

All keys of one executor carry the hash tag `{executor_id}`, so they share a slot of a cluster and
one script may touch them all. Executor ids hold no braces (`convert` sees to it).
"""

from typing import NamedTuple

from services.tracker.types import ExecutorId

# Ids of executors that ever held a lease. In another slot, hence not atomic with the rest: a hint.
EXECUTORS = "evenflow:executors"


class ExecutorKeys(NamedTuple):
    """The keys of one executor, in the order in which the scripts take them."""

    lease: str  # hash
    by_expiry: str  # sorted set of request ids
    records: str  # hash: each request as JSON, by its id


def keys_of(executor_id: ExecutorId) -> ExecutorKeys:
    root = f"evenflow:{{{executor_id}}}:"
    return ExecutorKeys(root + "lease", root + "requests", root + "records")
