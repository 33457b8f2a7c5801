"""What a report draws of one run, in few enough points for a page."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

from simulator.engine.records import Outcome, RunRecord
from simulator.report.figures import delivered_s, quantile

NUM_QUANTILES = 200  # of a distribution; point k is the k / NUM_QUANTILES quantile
MAX_POINTS = 300  # of one curve

T = TypeVar("T")


def view_of(run: RunRecord, *, num_timelines: int = 0) -> dict[str, Any]:
    """Return distributions, residency over time, and the timeline of one telling request.

    `num_timelines`: of other requests beside it, evenly taken by arrival.
    """
    done = [outcome for outcome in run.outcomes if outcome.generated_s]
    by_arrival = sorted(done, key=lambda outcome: outcome.arrival_s)
    return {
        "generated_gaps_s": quantiles(
            [b - a for outcome in done for a, b in pairwise(outcome.generated_s)]
        ),
        "delivered_gaps_s": quantiles(
            [b - a for outcome in done for a, b in pairwise(delivered_s(outcome))]
        ),
        "ttft_s": quantiles([outcome.generated_s[0] - outcome.arrival_s for outcome in done]),
        "residency": [
            [
                sample.time_s,
                sample.pool_used_frac,
                sample.offloaded_frac,
                sample.host_used_frac,
                sample.num_running,
                sample.num_paused,
                sample.num_waiting,
            ]
            for sample in thinned(run.samples)
        ],
        "timeline": timeline(max(done, key=telling)) if done else None,
        "timelines": [timeline(outcome) for outcome in thinned(by_arrival, num_timelines)],
    }


def quantiles(values: Sequence[float]) -> list[float]:
    """Return NUM_QUANTILES + 1 quantiles, the smallest and the largest among them; or none."""
    ordered = sorted(values)
    points = range(NUM_QUANTILES + 1)
    return [quantile(ordered, k / NUM_QUANTILES) for k in points] if ordered else []


def telling(outcome: Outcome) -> tuple[int, float]:
    """Order requests by how much happened to them: pauses and preemptions, then the longest gap."""
    gaps_s = [b - a for a, b in pairwise(outcome.generated_s)]
    return outcome.num_pauses + outcome.num_preemptions, max(gaps_s, default=0.0)


def timeline(outcome: Outcome) -> dict[str, Any]:
    """Return when one request's tokens were generated and delivered, and when it was paused."""
    written_s = delivered_s(outcome)
    numbers = thinned(range(len(outcome.generated_s)))
    return {
        "request_id": outcome.request_id,
        "arrival_s": outcome.arrival_s,
        "token": [number + 1 for number in numbers],
        "generated_s": [outcome.generated_s[number] for number in numbers],
        "delivered_s": [written_s[number] for number in numbers],
        "pauses_s": [list(pause) for pause in outcome.pauses_s],
        "num_preemptions": outcome.num_preemptions,
    }


def thinned(values: Sequence[T], most: int = MAX_POINTS) -> list[T]:
    """Return at most so many values, evenly taken, the first and the last among them."""
    last = len(values) - 1
    if last < most:
        return list(values)
    return [values[round(k * last / (most - 1))] for k in range(most)]
