"""The optimiser with prefixes that requests share: rows of a plan that produce nothing."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from lab.planning.snapshots import (
    make_engine,
    make_prefill,
    make_prefix,
    make_request,
    make_snapshot,
)
from services.placement.step_time.batch import (
    capacity_blocks,
    demand_of,
    holders_of,
    placed_by,
    pool_need,
    predicted_step_s,
)
from services.placement.step_time.patterns import PatternSpace, pattern_space
from services.placement.types import (
    Link,
    PlanStatus,
    PrefixPlacement,
    RequestPhase,
    RequestState,
    Snapshot,
)
from services.planner.policy.batch import Batch
from services.planner.solver.solver import warm_solver
from tests.planning import GOOD, paused, plan_of

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels

SLOW = Link(bytes_per_s=3e9, copy_overhead_s=1e-5, chunk_bytes=1 << 20)


def users(number: int, num_tokens: int = 400, **overrides: object) -> list[RequestState]:
    """Return requests that begin with prefix "t"."""
    given = {"prefix_ids": ("t",)} | overrides
    return [make_request(f"r{n}", num_tokens, **given) for n in range(number)]


def prompt(name: str, num_computed: int, **overrides: object) -> RequestState:
    return make_prefill(name, 3_000, num_computed, **overrides)


def mixed() -> Snapshot:
    """Return two levels of prefixes, and one that only a prompt without a turn begins with."""
    requests = [
        make_request("a", 1_003, slo_tbt_s=0.02, prefix_ids=("t", "u")),
        make_request("b", 517, prefix_ids=("t",)),
        prompt("p", 300, prefix_ids=("t",)),
        prompt("waits", 0, prefix_ids=("t", "v")),
        make_request("alone", 90),
    ]
    prefixes = (make_prefix("t", 1_600), make_prefix("u", 512), make_prefix("v", 800))
    engine = make_engine(max_num_batched_tokens=400)  # "p" takes all that is left
    return make_snapshot(*requests, prefixes=prefixes, engine=engine, h2d=SLOW)


def test_course_and_rows_equal_the_shared_formulas() -> None:
    snapshot = mixed()
    library = warm_solver(8, PatternSpace.FULL).library
    batch = Batch(snapshot, snapshot.requests, library)
    random = np.random.default_rng(5)
    for _ in range(20):
        choice = random.integers(0, library.num_patterns, len(batch.holders))
        patterns = [library.patterns[k] for k in choice]
        placed = list(zip(batch.holders, patterns, strict=True))
        course = batch.course(choice, 24)
        for t in range(24):
            step_s = predicted_step_s(snapshot, placed, growth=t)
            assert course.steps_s[t] + 2e-3 == pytest.approx(step_s)
            assert course.blocks[t] == sum(
                pool_need(demand_of(one, snapshot.engine, growth=t + 1), pattern)
                for one, pattern in placed
            )
    for window in (1, 5, 21):
        instance = batch.instance(window=window, read_after=window - 1, switching=False)
        for row, one in enumerate(batch.holders):
            demands = [demand_of(one, snapshot.engine, growth=t + 1) for t in range(window)]
            assert instance.use[row].tolist() == [
                max(pool_need(demand, pattern) for demand in demands)
                for pattern in library.patterns
            ]


def test_a_prefix_and_its_users_take_what_a_request_of_its_length_and_own_parts_take() -> None:
    # Without compute times a row is what it loads and holds, whoever it is of.
    profile = replace(mixed().profile, layer_s_per_context_token=0.0)
    shared = make_snapshot(
        *users(3), prefixes=(make_prefix("t", 4_800),), profile=profile, max_window=1
    )
    apart = make_snapshot(
        make_request("t", 4_800), *users(3, prefix_ids=()), profile=profile, max_window=1
    )
    library = warm_solver(8, PatternSpace.FULL).library
    batches = [Batch(one, one.requests, library) for one in (shared, apart)]
    one, other = (b.instance(window=1, read_after=0, switching=True) for b in batches)

    assert [holder.holder_id for holder in batches[0].holders] == ["t", "r0", "r1", "r2"]
    assert one.transfer_s.tolist() == other.transfer_s.tolist()
    assert one.use[1:].tolist() == other.use[1:].tolist()
    # A request of 4,800 tokens has an open block in each group, and one that is being sealed.
    more = 8 + library.tables.num_jobs
    assert one.use[0].tolist() == (other.use[0] - more).tolist()


def test_what_nobody_of_the_batch_begins_with_changes_no_plan() -> None:
    for num_free in (4_000, 1_500, 700):
        plain = make_snapshot(*users(5, 1_605, prefix_ids=()), num_free_blocks=num_free)
        waiting = make_request("w", phase=RequestPhase.WAITING, num_computed_tokens=0)
        waiting = replace(waiting, prefix_ids=("t",), num_host_blocks=())
        beside = replace(
            plain,
            requests=(*plain.requests, waiting),
            prefixes=(make_prefix("t", num_blocks=(100,) * 8),),
        )

        one, other = plan_of(plain), plan_of(beside)

        assert one.placements == other.placements[:5]
        assert one.quality == other.quality


def test_what_is_shared_leaves_once_and_all_of_its_users_run() -> None:
    # The prefix alone takes 8 * 300 blocks, each user 8 * 26: 4,064 where 2,500 are.
    prefix = make_prefix("t", 4_800, num_blocks=(100,) * 8)
    snapshot = make_snapshot(*users(8), prefixes=(prefix,), num_free_blocks=1_700)
    assert capacity_blocks(snapshot) == 2_500

    plan = plan_of(snapshot)

    (placed,) = plan.prefixes
    assert plan.status in GOOD
    assert paused(plan) == []
    assert placed.offloaded_layers != ()
    assert len(placed.offloaded_layers) >= max(len(p.offloaded_layers) for p in plan.placements)


def test_the_bound_holds_over_all_patterns_of_requests_and_prefixes() -> None:
    engine = make_engine(num_layers=4)
    for size, num_free in ((1_600, 700), (4_800, 900), (320, 400)):
        snapshot = make_snapshot(
            *users(2, 1_605, num_groups=4),
            prefixes=(make_prefix("t", size, num_groups=4),),
            engine=engine,
            num_free_blocks=num_free,
            h2d=SLOW,
            max_window=1,
            even_patterns_only=True,
        )
        holders, best_s = holders_of(snapshot, snapshot.requests), math.inf
        for patterns in product(pattern_space(4, PatternSpace.EVEN), repeat=len(holders)):
            placed = list(zip(holders, patterns, strict=True))
            needs = (pool_need(demand_of(one, engine, growth=1), p) for one, p in placed)
            if sum(needs) <= capacity_blocks(snapshot):
                best_s = min(best_s, predicted_step_s(snapshot, placed))

        plan = plan_of(snapshot)

        assert plan.quality is not None
        assert plan.status is PlanStatus.OPTIMAL
        assert plan.quality.latency_s == pytest.approx(best_s, rel=1e-5)
        assert plan.quality.lower_bound_s <= plan.quality.objective_s


def test_a_prefix_whose_users_do_not_run_stays_where_it_is() -> None:
    prefix = make_prefix("t", offloaded_layers=(3, 7), num_prefetch_buffers=1)
    other = make_prefix("u")
    held, waiting = users(2, on_hold=True)
    waiting = replace(waiting, on_hold=False, phase=RequestPhase.WAITING, prefix_ids=("u",))
    snapshot = make_snapshot(make_request("a"), held, waiting, prefixes=(prefix, other))

    assert plan_of(snapshot).prefixes == (
        PrefixPlacement(prefix_id="t", offloaded_layers=(3, 7), num_prefetch_buffers=1),
        PrefixPlacement(prefix_id="u"),
    )


def test_the_plan_in_force_of_a_prefix_is_a_candidate_whatever_its_pattern() -> None:
    # Two neighbouring layers, which no pattern of the space has, and a link that brings none back.
    prefix = make_prefix("t", 8_000, offloaded_layers=(2, 3), num_prefetch_buffers=2)
    slow = Link(bytes_per_s=5e7)
    snapshot = make_snapshot(*users(2), prefixes=(prefix,), h2d=slow, max_window=1)

    assert plan_of(snapshot).prefixes[0].offloaded_layers == (2, 3)


def test_pausing_a_user_leaves_a_prefix_to_the_others_and_the_last_one_takes_it() -> None:
    # Neither is on the host: 8 * 100 blocks of the prefix, and 8 * 101 of each own part.
    unmirrored = {"num_host_blocks": ()}
    snapshot = make_snapshot(
        *users(3, 1_600, **unmirrored),
        make_request("alone", 1_600, **unmirrored),
        prefixes=(make_prefix("t", **unmirrored),),
        num_free_blocks=1_650,
    )

    plan = plan_of(snapshot)

    # Room for a user with its prefix, or for two that need none: the sets grow until one fits.
    served = [r for r in snapshot.requests if r.request_id not in paused(plan)]
    assert len(served) == 1
    assert len(placed_by(plan, snapshot, served)) == 1 + bool(served[0].prefix_ids)
    assert plan.quality is not None
    assert plan.quality.serve_all is PlanStatus.INFEASIBLE


def test_a_bound_that_reading_a_prefix_breaks_binds_nobody() -> None:
    # 400 tokens of its own take 8 * 1.0 ms + 2 ms; 200,000 shared ones 8 * 1.4 ms more.
    reader = users(1, slo_tbt_s=0.012)
    short = make_snapshot(*reader, prefixes=(make_prefix("t", 16),), num_free_blocks=10**6)
    long = make_snapshot(*reader, prefixes=(make_prefix("t", 200_000),), num_free_blocks=10**6)

    first, second = plan_of(short), plan_of(long)

    assert first.status in GOOD
    assert second.status in GOOD  # for the bound is hopeless
    assert first.quality is not None
    assert second.quality is not None
    assert first.quality.first_latency_s < 0.012 < second.quality.first_latency_s
