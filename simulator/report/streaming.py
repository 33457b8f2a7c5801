"""What the readers of a run felt, by TokenFlow's figures (arXiv 2510.02758, sections 3 and 7.1.3).

Seconds are of virtual time. A reader takes a token when it is due behind Token-Deposit; what is
generated and not due yet is in his buffer. What comes after a reader has left counts for nothing.
"""

from collections.abc import Iterable, Mapping

from services.pacing import reading
from services.pacing.deposit import release_interval_s
from simulator.engine.records import Outcome

DEFINITIONS: Mapping[str, str] = {
    "rebuffering": reading.REBUFFERING,
    "effective_tokens_per_s": f"{reading.EFFECTIVE}; per second",
    "qos": f"{reading.QOS}; per second",
}


def figures(served: Iterable[Outcome], seconds: float) -> dict[str, float]:
    """Return the figures of requests that were served within so many seconds."""
    waited_s = reading_s = effective = missed = 0.0
    for outcome in served:
        rebuffered_s, read_s = rebuffering(outcome)
        waited_s, reading_s = waited_s + rebuffered_s, reading_s + read_s
        interval_s = release_interval_s(outcome.level)
        effective += reading.effective_of(outcome.read_s, interval_s)
        if interval_s:
            missed += (outcome.generated_s[0] - outcome.arrival_s + rebuffered_s) / interval_s
    return {
        "rebuffering": waited_s / reading_s if reading_s else 0.0,
        "effective_tokens_per_s": effective / seconds,
        "qos": (effective - missed) / seconds,
    }


def rebuffering(outcome: Outcome) -> tuple[float, float]:
    """Return how long a reader waits beyond its pace, and how long it reads. Seconds."""
    interval_s = release_interval_s(outcome.level)
    if not interval_s:
        return 0.0, 0.0
    # Virtual time has no noise to tolerate.
    read = reading.reading_of(outcome.read_s, interval_s, tolerance_s=0.0)
    return read.waited_s, read.reading_s
