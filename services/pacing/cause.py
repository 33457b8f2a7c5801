"""Why a promise to a reader was not kept: each miss has one cause."""

from dataclasses import dataclass
from enum import Enum


class Cause(Enum):
    """What a late token waited for longest."""

    __hash__ = object.__hash__  # of every late token; an Enum's own is a call into Python

    QUEUE = "queue"  # to be let in
    PROMPTS = "prompts"  # for other requests' prompts, in its own steps
    COPIES = "copies"  # for KV on its way to its layers, in its own steps
    PAUSE = "pause"  # paused, parked or preempted, until it ran again
    # For its own steps: the batch, and where KV lives, make them longer than the pace allows.
    PLANNER = "planner"
    READER = "reader"  # for its reader to take what is there
    NETWORK = "network"  # on the way from the engine to the reader's connection
    FAILOVER = "failover"  # for another executor to go on with the answer; the gateway's own


@dataclass(frozen=True, slots=True)
class Delay:
    """What the engine added to one token's way to its reader."""

    cause: Cause
    late_s: float  # after the token's turn, > 0


def cause_of(late_s: float, *, delay: Delay | None, reader_s: float) -> Cause:
    """Return what most of a token's lateness at its reader, > 0, is due to.

    The engine was late itself by `delay` (None: it was in time), the token was there for its
    reader for `reader_s`; the rest is the way between. Of equals the first is to blame.
    """
    engine_s = 0.0 if delay is None else delay.late_s
    network_s = late_s - engine_s - reader_s
    if delay is not None and engine_s >= max(reader_s, network_s):
        return delay.cause
    return Cause.READER if reader_s >= network_s else Cause.NETWORK
