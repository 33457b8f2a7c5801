"""Requests of which only some layers may leave the pool get patterns of their own."""

import dataclasses

import numpy as np
import pytest

from lab.planning.exhaustive import exhaustive
from lab.planning.snapshots import make_engine, make_request, make_snapshot
from services.placement.step_time.batch import demand_of, placed_pattern, pool_need
from services.placement.step_time.patterns import Pattern, PatternSpace
from services.placement.types import PlanStatus
from services.planner.policy.batch import Batch
from services.planner.policy.problem import MAX_EXTRA_PATTERNS, library_for
from services.planner.solver.budget import NodeBudget
from services.planner.solver.kernels.longest_path import critical_path
from services.planner.solver.library import extended_library, pattern_library
from services.planner.solver.solver import warm_solver
from tests.planning import GOOD, paused, plan_of

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels


def half_mirrored(groups: tuple[int, ...], name: str = "a", **overrides: object):
    """Return a request of which only `groups` are on the host."""
    mirrored = tuple(500 if group in groups else 0 for group in range(8))
    return make_request(name, 8_000, num_host_blocks=mirrored, **overrides)


@pytest.mark.parametrize("groups", [(0, 1), (2,), (0, 1, 2), (5, 6, 7), (1, 3, 5, 7), (0, 7)])
def test_what_is_mirrored_is_offloaded_though_no_even_pattern_fits_it(groups) -> None:
    # All resident it needs 8 * 501; each offloaded layer frees 500 but the first, which stages.
    free = 8 * 501 - 500 * (len(groups) - 1) + 2 * len(groups)
    plan = plan_of(make_snapshot(half_mirrored(groups), num_free_blocks=free, max_window=8))

    assert plan.status in GOOD
    assert paused(plan) == []
    assert set(plan.placements[0].offloaded_layers) <= set(groups)
    assert len(groups) == 1 or len(plan.placements[0].offloaded_layers) == len(groups)


def test_a_half_mirrored_request_takes_the_best_of_its_own_patterns() -> None:
    # Five layers are mirrored and the pool lets two stay: any three or more may go.
    snapshot = make_snapshot(
        half_mirrored((0, 1, 2, 3, 6)), make_request("b", 3_200), num_free_blocks=4_200
    )
    plan = plan_of(snapshot, nodes=10**6)
    library = library_for(snapshot, PatternSpace.FULL)
    batch = Batch(snapshot, snapshot.requests, library)
    assert plan.quality is not None
    instance = batch.instance(
        window=plan.quality.window, read_after=plan.quality.window - 1, switching=True
    )

    assert plan.status is PlanStatus.OPTIMAL
    best_s = exhaustive(instance, library)
    assert plan.quality.objective_s - 2e-3 == pytest.approx(best_s, rel=1e-9)
    assert plan.quality.lower_bound_s <= plan.quality.objective_s


def test_the_bound_holds_over_patterns_that_the_relaxation_does_not_know() -> None:
    random = np.random.default_rng(17)
    solver = warm_solver(8, PatternSpace.FULL)
    num_better = 0
    for _ in range(60):
        groups = tuple(np.flatnonzero(random.random(8) < 0.6).tolist()) or (7,)
        sizes = random.integers(1_000, 9_000, 2)
        half = make_request(
            "a",
            int(sizes[0]),
            num_host_blocks=tuple(int(sizes[0]) // 16 if g in groups else 0 for g in range(8)),
        )
        need = (int(sizes.sum()) // 16 + 2) * 8
        snapshot = make_snapshot(
            half,
            make_request("b", int(sizes[1])),
            num_free_blocks=int(need * random.uniform(0.55, 1.0)),
        )
        library = library_for(snapshot, PatternSpace.FULL)
        instance = Batch(snapshot, snapshot.requests, library).instance(
            window=1, read_after=0, switching=False
        )
        over = solver.over(library)
        best_s = exhaustive(instance, library)
        if not np.isfinite(best_s):
            continue
        found = over.solve(instance, NodeBudget(10**6), starts=[])
        assert over.bound(instance).lower_bound_s <= best_s * (1 + 1e-9)
        assert found.objective_s == pytest.approx(best_s, rel=1e-9)
        base_s = exhaustive(instance, library, np.arange(solver.library.num_patterns))
        num_better += best_s < base_s * (1 - 1e-6)

    assert num_better > 5  # the added patterns are of use


def test_added_columns_are_the_tables_of_their_patterns() -> None:
    extra = (Pattern((0, 1), 1), Pattern((2, 3, 7), 2))
    library = extended_library(8, PatternSpace.FULL, extra)
    base = pattern_library(8, PatternSpace.FULL)
    random = np.random.default_rng(3)
    row, mask = np.empty(library.num_patterns), np.empty(8)

    assert library.patterns == base.patterns + extra
    assert library.extra.tolist() == [base.num_patterns, base.num_patterns + 1]
    assert library.tables.units[library.extra].tolist() == [8 - 2 + 1, 8 - 3 + 2]
    for _ in range(20):  # the rows of added columns bound the step like all others
        mass, compute = random.random(library.num_patterns), random.random(8)
        length = critical_path(mass, library.tables, compute, row, mask)
        assert row @ mass + mask @ compute == pytest.approx(length)
    assert pattern_library(8, PatternSpace.FULL) is extended_library(8, PatternSpace.FULL, ())


def test_hostile_mirrors_add_no_more_patterns_than_there_may_be() -> None:
    random = np.random.default_rng(5)
    engine = make_engine(num_layers=32, num_blocks=10**9)
    requests = [
        make_request(
            f"r{i}",
            8_000,
            num_host_blocks=tuple(int(b) for b in random.choice([0, 500], 32)),
        )
        for i in range(40)
    ]
    snapshot = make_snapshot(*requests, engine=engine, num_free_blocks=400_000)

    library = library_for(snapshot, PatternSpace.FULL)

    assert len(library.extra) == MAX_EXTRA_PATTERNS


def test_blocks_on_their_way_to_the_host_are_not_yet_free() -> None:
    # 300 of 500 blocks are there, and write-through brings the others within 4 steps. Until then
    # they take their place: offloading frees 300 a layer at most, not 500.
    lagging = make_request("a", 8_000, num_host_blocks=(300,) * 8)
    snapshot = make_snapshot(
        lagging, num_free_blocks=2_000, min_window=4, max_window=4, num_write_through_blocks=400
    )
    all_there = dataclasses.replace(lagging, num_host_blocks=(500,) * 8)

    assert paused(plan_of(snapshot)) == ["a"]
    assert paused(plan_of(dataclasses.replace(snapshot, requests=(all_there,)))) == []
    roomy = plan_of(dataclasses.replace(snapshot, num_free_blocks=3_600))
    assert paused(roomy) == []
    assert roomy.placements[0].offloaded_layers != ()


def test_a_plan_in_force_is_one_of_the_candidates_whatever_its_pattern() -> None:
    odd = make_request("a", 8_000, offloaded_layers=(2, 3), num_prefetch_buffers=2)
    snapshot = make_snapshot(odd)

    library = library_for(snapshot, PatternSpace.FULL)

    assert placed_pattern(odd, snapshot.engine) in library.index
    assert Batch(snapshot, [odd], library).present_choice() == library.extra[:1]


@pytest.mark.parametrize("max_ahead_tokens", [0, 5, 40])
def test_room_for_drafts_is_counted_as_demands_count_it(max_ahead_tokens: int) -> None:
    engine = make_engine(max_ahead_tokens=max_ahead_tokens)
    lengths = (7_980, 8_000, 8_012)
    requests = [make_request(f"r{n}", n, num_host_blocks=(n // 16,) * 8) for n in lengths]
    snapshot = make_snapshot(*requests, engine=engine, num_free_blocks=12_000)
    library = library_for(snapshot, PatternSpace.FULL)
    batch = Batch(snapshot, snapshot.requests, library)
    choice = np.array([0, 3, library.num_patterns - 1])

    course, first = (
        batch.course(choice, 40),
        batch.instance(window=1, read_after=0, switching=False),
    )

    for growth, blocks in enumerate(course.blocks, start=1):
        demands = [demand_of(request, engine, growth=growth) for request in snapshot.requests]
        needs = [
            pool_need(demand, library.patterns[number])
            for demand, number in zip(demands, choice, strict=True)
        ]
        assert blocks == sum(needs)
        if growth == 1:
            assert [first.use[row, number] for row, number in enumerate(choice)] == needs
