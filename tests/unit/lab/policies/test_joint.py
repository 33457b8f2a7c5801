"""`joint`: its candidates, their rating, and that none is worse than plain residency."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given

from lab.policies import fcfs
from lab.policies.joint import Candidates, JointRules, Rating, best, decide
from services.placement.run.promise import Promise
from services.placement.run.types import RunPhase, RunRequest, RunSnapshot
from tests.unit.placement.run.snapshots import (
    ask,
    make_snapshot,
    parked,
    runs,
    snapshots,
)

EXACT = JointRules(least_gain_frac=0.0)


def names(batch: Sequence[RunRequest]) -> set[str]:
    return {request.request_id for request in batch}


def test_nothing_measured_is_plain_residency() -> None:
    batch = [runs(f"r{n}", 230, rate_tps=5.0, slack_s=60.0) for n in range(6)]
    queue = [ask("new", 230, rate_tps=5.0)]

    assert "new" not in decide(make_snapshot(*batch, *queue, costs=None)).run


def test_a_set_is_rated_by_what_its_readers_get_and_the_others_lack() -> None:
    # 22 ms for two: 227 tokens each. a uses 5 x (5 - 1), b all; p lacks the half second until 1 s,
    # and 159 tokens' 15.9 ms.
    a, b = runs("a", 100, rate_tps=5.0, slack_s=1.0), runs("b", 100)
    p = parked("p", 152, rate_tps=5.0, slack_s=0.5, num_host_tokens=0)
    rating = Rating(make_snapshot(a, b, p))

    assert rating.usable([a, b]) == pytest.approx((20.0 + 5.0 / 0.022 - 5.0 * 0.5159) / 5.0)
    assert rating.generated([a, b]) == pytest.approx(2 / 0.022)


def test_a_set_is_rated_by_the_tokens_that_its_steps_bring() -> None:
    # Steps of 22 ms as above bring b 2.5 tokens each; a has no use for more than 20.
    a, b = runs("a", 100, rate_tps=5.0, slack_s=1.0), runs("b", 100)
    drafted = [replace(one, tokens_per_step=2.5) for one in (a, b)]
    rating = Rating(make_snapshot(*drafted))

    assert rating.usable(drafted) == pytest.approx((20.0 + 2.5 * 5.0 / 0.022) / 5.0)
    assert rating.generated(drafted) == pytest.approx(2 * 2.5 / 0.022)


# -- laws ------------------------------------------------------------------------------------------


@given(snapshots())
def test_plain_residency_is_first_come_first_served(snapshot: RunSnapshot) -> None:
    """As the policy of that name has it; who is on the way to the pool is with those who run."""
    here = [r for r in snapshot.requests if r.phase is not RunPhase.RETURNING]
    snapshot = replace(snapshot, requests=tuple(here))
    if not here:
        return

    plain = Candidates(snapshot).plain()

    assert tuple(r.request_id for r in plain) == fcfs.recompute(snapshot).run


@given(snapshots())
def test_the_chosen_set_is_rated_no_lower_than_plain_residency(snapshot: RunSnapshot) -> None:
    plain, chosen = Candidates(snapshot).plain(), best(snapshot)
    rating = Rating(snapshot)

    assert rating.usable(chosen) >= rating.usable(plain)
    assert rating.generated(chosen) >= 0.99 * rating.generated(plain)
    assert names(chosen) == set(decide(snapshot).run)


@given(snapshots())
def test_the_bound_skips_no_better_candidate(snapshot: RunSnapshot) -> None:
    candidates, rating = Candidates(snapshot), Rating(snapshot, EXACT)
    plain = candidates.plain()
    others = [batch for batch in candidates.others(rating) if batch]
    least = (1.0 - EXACT.most_loss_frac) * rating.generated(plain)
    good = [plain, *(batch for batch in others if rating.generated(batch) >= least)]

    assert rating.usable(best(snapshot, EXACT)) == pytest.approx(max(map(rating.usable, good)))
    assert all(rating.bound(batch) >= rating.usable(batch) - 1e-9 for batch in others)


@given(snapshots())
def test_nobody_new_overtakes_somebody_new(snapshot: RunSnapshot) -> None:
    decision = decide(snapshot)
    new = [
        request.request_id in decision.run
        for request in snapshot.requests
        if request.phase is RunPhase.NEW
    ]

    assert new == sorted(new, reverse=True)


@given(snapshots(largest=300))
def test_who_is_held_back_has_his_way_back_in_hand(snapshot: RunSnapshot) -> None:
    """Unless the batch has outgrown the pool: then the newest may have to leave."""
    batch = [r for r in snapshot.requests if r.phase in (RunPhase.RUNNING, RunPhase.RETURNING)]
    num_blocks = sum(snapshot.num_blocks(request, growth=1) for request in batch)
    if num_blocks > snapshot.engine.num_blocks:
        return
    for request in snapshot.requests:
        if request.request_id in decide(snapshot).park:
            assert request.rate_tps
            assert request.spare_s > 2.0 * snapshot.load_s(request) + snapshot.h2d_queue_s


@given(snapshots(rates=(0.0,)))
def test_without_rates_nobody_is_held_back(snapshot: RunSnapshot) -> None:
    plain = names(Candidates(snapshot).plain())
    running = {r.request_id for r in snapshot.requests if r.runs}

    assert decide(snapshot).park <= running - plain


def crowd(seed: int) -> RunSnapshot:
    """Return requests of one size: six fit, of up to nine."""
    random = Random(seed)
    members = [
        runs(f"r{n}", 230, rate_tps=5.0, slack_s=random.uniform(0.0, 12.0), age_s=60.0 - n)
        for n in range(6)
    ]
    out = [
        parked(f"p{n}", 230, rate_tps=5.0, slack_s=random.uniform(-1.0, 8.0), age_s=50.0 - n)
        for n in range(random.randint(0, 2))
    ]
    new = [ask(f"n{n}", 230, rate_tps=5.0, age_s=10.0 - n) for n in range(random.randint(0, 1))]
    return make_snapshot(*members, *out, *new, h2d_bytes_per_s=1e5)


def every_set(snapshot: RunSnapshot, rules: JointRules) -> Iterator[tuple[RunRequest, ...]]:
    """Yield all sets that fit the pool, keep who may not leave, and promise nothing in vain.

    Nobody new is in one that leaves out who is due to come back.
    """
    requests = snapshot.requests
    members = [request for request in requests if request.phase is not RunPhase.NEW]
    for size in range(1, len(requests) + 1):
        for chosen in combinations(requests, size):
            left = [request for request in requests if request not in chosen]
            num_blocks = sum(snapshot.num_blocks(request, growth=1) for request in chosen)
            new = [request for request in chosen if request.phase is RunPhase.NEW]
            away_s = rules.least_s + 2.0 * snapshot.load_s(requests[0])
            due = [
                request
                for request in left
                if request.phase is RunPhase.PARKED
                and request.spare_s < snapshot.way_back_s(request) + rules.due_s
            ]
            if (
                num_blocks <= snapshot.engine.num_blocks
                and all(request.spare_s >= away_s for request in left if request.runs)
                and (not new or (not due and Promise(snapshot).holds([*members, *new])))
            ):
                yield chosen


@pytest.mark.parametrize("seed", range(12))
def test_of_requests_alike_no_set_is_better_than_the_chosen_one(seed: int) -> None:
    snapshot = crowd(seed)
    rating = Rating(snapshot, EXACT)

    least = (1.0 - EXACT.most_loss_frac) * rating.generated(Candidates(snapshot).plain())
    sets = [one for one in every_set(snapshot, EXACT) if rating.generated(one) >= least]

    assert rating.usable(best(snapshot, EXACT)) == pytest.approx(max(map(rating.usable, sets)))
