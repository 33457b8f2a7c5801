"""In which order newcomers are taken."""

from collections.abc import Iterable

from services.placement.run.types import RunRequest

UNSTATED_TTFT_S = 60.0  # the TTFT SLO of one that states none, as far as its place in line goes


def in_line(queue: Iterable[RunRequest]) -> list[RunRequest]:
    """Return newcomers in the order in which they are taken: whose first token is due first.

    A request without a TTFT SLO stands where one of `UNSTATED_TTFT_S` would: so those with an SLO
    pass it, and none that came more than `UNSTATED_TTFT_S` later does.
    """
    return sorted(queue, key=_first_due_s)


def _first_due_s(request: RunRequest) -> float:
    slo_s = UNSTATED_TTFT_S if request.slo_ttft_s is None else request.slo_ttft_s
    return slo_s - request.arrival_age_s
