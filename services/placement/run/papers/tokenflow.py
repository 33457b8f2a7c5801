"""`tokenflow`: TokenFlow's buffer-aware scheduler (arXiv 2510.02758, section 4), as corrected.

Every interval, and only under stress (a newcomer waits, or a member's buffer runs dry before the
next look), the pool goes to those that gain most from it; without stress all that fit run. A
buffer is what a reader has in hand, in seconds.

Where the printed rules cannot be meant, they are read so (`test_tokenflow.py` holds what each
printed form does):

    utility       printed, an empty buffer has the lowest: read as what running for the interval
                  adds to it, phi(x) = exp(-x) in seconds
    admission     printed, a newcomer's own buffer must outlast its loading, and it has none: read
                  as a bound on what may be parked for it
    working set   printed over the GPU's memory, and then none is ever parked: read over the
                  host's, where Eq. 6 (sum of rates <= Gamma) is the limit that counts
    Gamma         at the present lengths it is 2 to 3 times too high when a burst begins: read at
                  the lengths to come
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from services.placement.run.papers.room import Room
from services.placement.run.step_estimate import most_tokens_in
from services.placement.run.types import (
    IDLE,
    RunDecision,
    RunPhase,
    RunRequest,
    RunSnapshot,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenflowRules:
    """The paper's parameters; where it gives no value, ours."""

    interval_s: float = 0.5  # Delta t
    mu: float = 2.0  # how often a buffer must outlast a way back
    gamma: float = 50.0  # weight of the buffers, Eq. 3
    critical_s: float = 1.0  # T_critical
    full_s: float = 4.0  # in hand, from which a token is worth less (tau of Eq. 1)
    decay_per_s: float = 0.25  # alpha of Eq. 1
    margin_s: float = 0.5  # more in hand that a victim has than the one it makes room for
    ahead_frac: float = 0.5  # of what is left of the answers' limits: the lengths to come
    kept_frac: float = 0.02  # of the pool


DEFAULT_RULES = TokenflowRules()
UNKNOWN_STEP_S = 0.03
NUM_SWAPS = 8  # of neighbours on either side of the edge; elsewhere they change nothing
LEAST_WAIT_S = 0.05  # until the next look, without stress


def decide(snapshot: RunSnapshot, rules: TokenflowRules = DEFAULT_RULES) -> RunDecision:
    """Return which requests run and which are parked for the next interval."""
    if not snapshot.requests:
        return IDLE
    decision = _Balance(snapshot, rules).decision()
    if decision.run:
        return decision
    oldest = max(snapshot.requests, key=lambda request: request.arrival_age_s)
    return replace(decision, run=(oldest.request_id,), park=decision.park - {oldest.request_id})


class _Balance:
    """One look at all requests."""

    def __init__(self, snapshot: RunSnapshot, rules: TokenflowRules) -> None:
        self._snapshot, self._rules = snapshot, rules
        requests = snapshot.requests
        self._running = [r for r in requests if r.runs]
        self._parked = [r for r in requests if r.phase in (RunPhase.PARKED, RunPhase.RETURNING)]
        self._new = [r for r in requests if r.phase is RunPhase.NEW]
        self._members = [*self._running, *self._parked]
        self._step_s = self._resident_step_s(self._running)
        # Until the next look.
        growth = most_tokens_in(rules.interval_s, requests, step_s=self._step_s) + 1
        self._room = Room(snapshot, growth=growth, kept_frac=rules.kept_frac)

    def _resident_step_s(self, batch: Sequence[RunRequest]) -> float:
        costs = self._snapshot.costs
        if costs is None:
            return UNKNOWN_STEP_S
        return costs.decode_s(max(1, len(batch)), sum(r.num_tokens for r in batch))

    def decision(self) -> RunDecision:
        """Return what has come out."""
        if not self._is_stressed() or (not self._new and self._room.fits(self._members)):
            return self._everybody_who_fits()
        admissible = self._admissible()
        if not admissible and self._demand(self._members) > self._capacity():
            return self._oldest_first()
        return self._by_utility(admissible)

    # -- the three cases -----------------------------------------------------------------------

    def _is_stressed(self) -> bool:
        soon_s = self._rules.critical_s + self._rules.interval_s
        return bool(self._new) or any(r.has_begun and _buffer_s(r) < soon_s for r in self._members)

    def _everybody_who_fits(self) -> RunDecision:
        waiting = sorted(self._parked, key=_buffer_s)
        run = [*self._running, *self._room.filled(waiting, beside=self._running)]
        buffers_s = [_buffer_s(r) for r in self._members if r.has_begun]
        dry_s = min(buffers_s, default=math.inf) - self._rules.critical_s
        wait_s = max(LEAST_WAIT_S, min(self._rules.interval_s, dry_s))
        return RunDecision(run=tuple(r.request_id for r in run), valid_for_s=wait_s)

    def _oldest_first(self) -> RunDecision:
        """Eq. 6 is broken: in order of arrival as many as fit, and none new."""
        members = sorted(self._members, key=lambda r: -r.arrival_age_s)
        run = self._room.filled(members)
        return self._decided(run, [r for r in self._running if r not in run])

    def _by_utility(self, admissible: Sequence[RunRequest]) -> RunDecision:
        must = [r for r in self._running if not self._may_leave(r)]
        urgent = sorted(filter(self._is_urgent, self._parked), key=_buffer_s)
        must = self._beside_urgent(must, urgent)
        others = [r for r in (*self._running, *self._parked) if r not in must and r not in urgent]
        by_gain = sorted([*others, *admissible], key=lambda r: -self._gain(r))
        chosen = self._best_filled([*urgent, *by_gain], len(urgent), must)
        run = [*must, *chosen]
        leave = [r for r in self._running if r not in run]
        if all(r.runs for r in chosen):  # none needs their room
            run, leave = [*run, *leave], []
        in_order = sorted(run, key=lambda r: (not r.runs, not r.has_begun, -r.arrival_age_s))
        return self._decided(in_order, leave)

    def _decided(self, run: Iterable[RunRequest], leave: Iterable[RunRequest]) -> RunDecision:
        return RunDecision(
            run=tuple(r.request_id for r in run),
            park=frozenset(r.request_id for r in leave),
            valid_for_s=self._rules.interval_s,
        )

    # -- what holds of a request -----------------------------------------------------------------

    def _may_leave(self, request: RunRequest) -> bool:
        """b >= mu r tau of section 4.2, of the victim: tau is its way back and the interval."""
        back_s = self._snapshot.way_back_s(request) + self._rules.interval_s
        return request.has_begun and _buffer_s(request) >= self._rules.mu * back_s

    def _overhead_s(self, request: RunRequest) -> float:
        """Return how long a request computes or loads before it generates: the shorter of both."""
        if request.runs:
            return 0.0
        costs = self._snapshot.costs
        prompt_s = request.num_tokens * costs.chunk_token_s if costs is not None else 0.0
        if request.phase is RunPhase.NEW:
            return prompt_s
        return min(self._snapshot.way_back_s(request), prompt_s or math.inf)

    def _is_urgent(self, request: RunRequest) -> bool:
        soon_s = self._rules.critical_s + self._rules.interval_s + self._overhead_s(request)
        return _buffer_s(request) < soon_s

    def _gain(self, request: RunRequest) -> float:
        """Return what it adds to Eq. 3's utility that a request runs for the interval."""
        rules, buffer_s = self._rules, _buffer_s(request)
        token_s = self._step_s / request.tokens_per_step
        num_tokens = max(0.0, rules.interval_s - self._overhead_s(request)) / token_s
        beyond_s = max(0.0, buffer_s - rules.full_s)
        value = max(0.0, 1.0 - rules.decay_per_s * beyond_s)
        left_s = max(0.0, buffer_s - (rules.interval_s if request.has_begun else 0.0))
        rate = request.rate_tps or 1.0 / token_s
        more_s = num_tokens / rate
        return value * num_tokens + rules.gamma * (math.exp(-left_s) - math.exp(-left_s - more_s))

    # -- what holds of many ----------------------------------------------------------------------

    def _admissible(self) -> list[RunRequest]:
        """Return newcomers in the order of their arrival while Eq. 6 holds with them."""
        capacity, demand = self._capacity(), self._demand(self._members)
        admissible: list[RunRequest] = []
        for request in self._new:
            if demand and demand + request.steps_per_s > capacity:
                break
            demand += request.steps_per_s
            admissible.append(request)
        return admissible

    def _demand(self, requests: Iterable[RunRequest]) -> float:
        """Return the decode steps of one request that readers need per second."""
        return sum(request.steps_per_s for request in requests)

    def _capacity(self) -> float:
        """Gamma: those of a full resident batch of such requests, at the lengths to come."""
        batch, engine = self._members or self._new, self._snapshot.engine
        lengths = [r.num_tokens + self._rules.ahead_frac * r.num_answer_left for r in batch]
        mean = sum(lengths) / len(lengths)
        rows = engine.num_groups * self._snapshot.num_rows(int(mean) + 1)
        num_fit = max(1, min(engine.max_num_seqs, engine.num_blocks // rows))
        costs = self._snapshot.costs
        step_s = costs.decode_s(num_fit, num_fit * mean) if costs is not None else UNKNOWN_STEP_S
        return num_fit / step_s

    def _beside_urgent(
        self, must: Sequence[RunRequest], urgent: Sequence[RunRequest]
    ) -> list[RunRequest]:
        """Return what must run when those about to run dry do: any with margin give way."""
        stay = list(must)
        for request in sorted(must, key=_buffer_s, reverse=True):
            has_margin = urgent and _buffer_s(request) > _buffer_s(urgent[0]) + self._rules.margin_s
            if self._room.fits([*stay, *urgent]) or not request.has_begun or not has_margin:
                break
            stay.remove(request)
        return stay

    def _best_filled(
        self, order: list[RunRequest], num_urgent: int, must: Sequence[RunRequest]
    ) -> list[RunRequest]:
        """Fill greedily, then swap neighbours near the edge for as long as that gains."""
        chosen = self._room.filled(order, beside=must)
        best, edge = sum(map(self._gain, chosen)), len(chosen)
        first, last = max(num_urgent, edge - NUM_SWAPS), min(len(order) - 1, edge + NUM_SWAPS)
        for place in range(first, last):
            swapped = order[:]
            swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]
            other = self._room.filled(swapped, beside=must)
            if (gain := sum(map(self._gain, other))) > best + 1e-9:
                order, chosen, best = swapped, other, gain
        return chosen


def _buffer_s(request: RunRequest) -> float:
    """Return b / r: how long what a reader has in hand lasts. With no rate stated for ever."""
    if not request.rate_tps:
        return math.inf
    return max(0.0, request.slack_s) if request.has_begun else 0.0
