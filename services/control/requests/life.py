"""The life of one request: the states that it passes through, and what may keep it from running."""

from enum import Enum


class State(Enum):
    """Where a live request is. It may end in any of these.

    ```
    arrives ──▶ WAITING ◀─────────▶ LOADING ◀─────▶ READY
                 ▲  │ ▲                              │ │
                 │  │ └───── its blocks are taken ───┘ │
       preempted │  └───────── admitted ───────────────┤
                 │                                     ▼
                 ├──────────────────────────────  RUNNING ◀───┐
                 │                                 │    │     │
                 │                            held │    │     │ no hold is left
                 │                                 │    ▼     │
                 ├─────────────────────────────────│── PAUSED ┘
                 │                                 ▼    ▲  │
                 └── no token is in flight ─── LEAVING ─┘◀─┘
    ```
    """

    WAITING = "waiting"  # in the queue, without a block of the pool
    LOADING = "loading"  # in the queue; its KV is on its way to the pool
    READY = "ready"  # in the queue, with all that it needs to run
    RUNNING = "running"
    PAUSED = "paused"  # keeps its place and is passed over; others may reclaim its blocks
    LEAVING = "leaving"  # sent to the queue, as soon as its newest token has come

    @property
    def is_queued(self) -> bool:
        return self in QUEUED

    @property
    def is_skipped(self) -> bool:
        """Whether it keeps a place among those that run, and does not run."""
        return self is State.PAUSED or self is State.LEAVING


QUEUED = frozenset({State.WAITING, State.LOADING, State.READY})

EDGES = {
    State.WAITING: frozenset({State.LOADING, State.RUNNING}),
    State.LOADING: frozenset({State.WAITING, State.READY}),
    State.READY: frozenset({State.WAITING, State.LOADING, State.RUNNING}),
    State.RUNNING: frozenset({State.WAITING, State.PAUSED, State.LEAVING}),
    State.PAUSED: frozenset({State.WAITING, State.RUNNING, State.LEAVING}),
    State.LEAVING: frozenset({State.WAITING, State.PAUSED}),
}


class Hold(Enum):
    """Why a request may not run, wherever it is."""

    READER = "reader"  # its reader has stopped
    REST = "rest"  # its reader has enough in hand
    PLAN = "plan"  # the plan in force pauses it


OF_READERS = frozenset({Hold.READER, Hold.REST})  # whatever a plan says
