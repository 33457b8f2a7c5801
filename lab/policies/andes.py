"""`andes`: the batch that adds most to what readers experience (Andes, arXiv 2404.16283).

A reader expects the first token within a target, and then tokens at the rate of reading. What
it experiences is the area under the curve of delivered tokens, as a share of the area that it
expected. Every interval, and only while a request waits, pool and seats go to those that gain most
of it per token of KV: a greedy knapsack. A request is preempted once on average, and computed anew.
"""

import math
from dataclasses import dataclass

from services.placement.run.papers.fcfs import RECOMPUTE
from services.placement.run.papers.room import Room
from services.placement.run.types import IDLE, RunDecision, RunRequest, RunSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class AndesRules:
    """The parameters of Andes, section 5."""

    interval_s: float = 0.5
    ttft_s: float = 1.0  # in which a first token is expected
    parks_per_request: float = 1.0  # at most, on average over live requests


DEFAULT_RULES = AndesRules()
UNPACED_TPS = 20.0  # of a reader that states no rate


def decide(snapshot: RunSnapshot, rules: AndesRules = DEFAULT_RULES) -> RunDecision:
    """Return which requests run and which are parked for the next interval."""
    requests = snapshot.requests
    if not requests:
        return IDLE
    running = [request for request in requests if request.runs]
    waiting = [request for request in requests if not request.runs]
    room = Room(snapshot, growth=1)
    by_gain = sorted(requests, key=lambda r: -_gain(snapshot, rules, r) / max(1, r.num_tokens))
    chosen = room.filled(by_gain)
    allowed = int(rules.parks_per_request * len(requests)) - sum(r.num_parks for r in requests)
    leave = [request for request in running if request.has_begun and request not in chosen]
    leave = sorted(leave, key=lambda r: -r.spare_s)[: max(0, allowed)]
    stay = [request for request in running if request not in leave]
    come = room.filled((r for r in by_gain if r in waiting), beside=stay)
    if not come:
        stay, leave = running, []
    run = [*stay, *come] or [max(requests, key=lambda r: r.arrival_age_s)]
    return RunDecision(
        run=tuple(r.request_id for r in run),
        park=frozenset(r.request_id for r in leave),
        ways=RECOMPUTE,
        valid_for_s=rules.interval_s if waiting else math.inf,
    )


def _gain(snapshot: RunSnapshot, rules: AndesRules, request: RunRequest) -> float:
    """Return what running for the interval adds to the area, as a share of what is expected."""
    interval_s, rate_tps = rules.interval_s, request.rate_tps or UNPACED_TPS
    begin_s = _overhead_s(snapshot, request)
    if request.has_begun and request.rate_tps:
        begin_s = max(begin_s, request.slack_s)  # until then its reader has what to read
    area = rate_tps * max(0.0, interval_s - begin_s) ** 2 / 2.0
    reading_s = max(interval_s, request.arrival_age_s + interval_s - rules.ttft_s)
    return area / (rate_tps * reading_s**2 / 2.0)


def _overhead_s(snapshot: RunSnapshot, request: RunRequest) -> float:
    """Return how long a request computes before it generates."""
    if request.runs or snapshot.costs is None:
        return 0.0
    return request.num_tokens * snapshot.costs.chunk_token_s
