"""The optimiser's policy: each constraint by itself, the window, pause and liveness."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.planning.snapshots import (
    make_engine,
    make_prefill,
    make_prefix,
    make_request,
    make_snapshot,
)
from services.placement.judging.slo import late_tokens, promise_of
from services.placement.step_time.batch import (
    demand_of,
    placed_pattern,
    pool_need,
    predicted_step_s,
)
from services.placement.step_time.patterns import PatternSpace
from services.placement.types import (
    Link,
    Placement,
    PlanStatus,
    PrefixState,
    RequestPhase,
    RequestState,
    Snapshot,
)
from services.planner.policy.batch import Batch
from services.planner.policy.placer import window_lengths
from services.planner.policy.policies import make_plan
from services.planner.solver.budget import DeadlineBudget
from services.planner.solver.solver import warm_solver
from tests.fuzz import examples
from tests.planning import GOOD, blocks_needed, optimiser, paused, plan_of
from tests.unit.placement.closed_forms import blocks_while_restoring

pytestmark = pytest.mark.timeout(3_600)  # the first run compiles the kernels


def test_everything_stays_resident_while_it_fits() -> None:
    plan = plan_of(make_snapshot(make_request("a"), make_request("b")))

    assert plan.status is PlanStatus.OPTIMAL
    assert all(placement.offloaded_layers == () for placement in plan.placements)


def test_capacity_alone_forces_offloading_and_nothing_is_paused() -> None:
    # 2 requests * 8 layers * 100 blocks = 1600, and as many open ones at the end; 1200 are there.
    snapshot = make_snapshot(make_request("a"), make_request("b"), num_free_blocks=1_200)

    plan = plan_of(snapshot)

    assert plan.status in GOOD
    assert paused(plan) == []
    assert any(placement.offloaded_layers for placement in plan.placements)


def test_the_prediction_is_the_latency_model_at_the_end_of_the_window() -> None:
    snapshot = make_snapshot(
        make_request("a", 8_000), make_request("b", 3_001), num_free_blocks=4_000
    )
    plan = plan_of(snapshot)
    assert plan.quality is not None
    placed = [
        (request, placed_pattern(placement, snapshot.engine))
        for request, placement in zip(snapshot.requests, plan.placements, strict=True)
    ]
    last = predicted_step_s(snapshot, placed, growth=plan.quality.window - 1)
    steps = [predicted_step_s(snapshot, placed, growth=t) for t in range(plan.quality.window)]

    assert plan.quality.latency_s == pytest.approx(last)
    assert plan.quality.mean_latency_s == pytest.approx(float(np.mean(steps)))
    assert plan.quality.lower_bound_s <= plan.quality.objective_s


def test_what_is_not_mirrored_stays_resident() -> None:
    unmirrored = make_request("a", 8_000, num_host_blocks=())
    half = make_request("b", 8_000, num_host_blocks=(0, 500) * 4)
    snapshot = make_snapshot(unmirrored, half, num_free_blocks=7_000)

    plan = plan_of(snapshot)

    assert plan.status in GOOD
    assert plan.placements[0].offloaded_layers == ()
    assert set(plan.placements[1].offloaded_layers) <= {1, 3, 5, 7}
    assert plan.placements[1].offloaded_layers != ()


def test_layers_of_a_group_go_together() -> None:
    engine = make_engine(num_layers=8, layers_per_group=3)  # groups of 3, 3 and 2 layers
    request = make_request("a", 8_000, num_groups=3)
    snapshot = make_snapshot(request, engine=engine, num_free_blocks=1_200)

    plan = plan_of(snapshot)

    groups = {0: {0, 1, 2}, 1: {3, 4, 5}, 2: {6, 7}}
    offloaded = set(plan.placements[0].offloaded_layers)
    assert offloaded
    assert all(group <= offloaded or not group & offloaded for group in groups.values())


def test_waiting_and_preempted_requests_are_left_as_they_are() -> None:
    waiting = make_request(
        "w", phase=RequestPhase.WAITING, num_computed_tokens=0, num_host_blocks=()
    )
    plan = plan_of(make_snapshot(make_request("a"), waiting))

    assert plan.placements[1] == Placement(request_id=waiting.request_id)


def test_the_plan_expires_at_the_first_breach() -> None:
    # 1600 tokens are 100 full blocks in 8 layers, all resident: 800. A token more needs 808, and
    # they last for 16 tokens; then 816.
    snapshot = make_snapshot(
        make_request("a", num_host_blocks=()), num_free_blocks=808, min_window=4, max_window=64
    )
    quality = plan_of(snapshot).quality

    assert quality is not None
    assert (quality.window, quality.expires_after) == (16, 16)


def test_a_calm_batch_is_planned_for_the_longest_window() -> None:
    quality = plan_of(make_snapshot(make_request("a"), max_window=32)).quality

    assert quality is not None
    assert quality.window == 32


@pytest.mark.parametrize(
    ("shortest", "longest", "expected"),
    [(1, 8, [1, 2, 4, 8]), (3, 20, [3, 6, 12, 20]), (5, 5, [5]), (1, 1, [1])],
)
def test_windows_double_from_the_least_to_the_most(shortest, longest, expected) -> None:
    assert window_lengths(shortest, longest) == expected


def test_switching_is_not_worth_a_gain_smaller_than_its_cost() -> None:
    # The present plan offloads all layers of one request though there is room for most of them.
    # Bringing layers back over a slow link costs more than a one-step window can win.
    everything = make_request("a", 8_000, offloaded_layers=tuple(range(8)), num_prefetch_buffers=2)
    slow = Link(bytes_per_s=5e7)
    snapshot = make_snapshot(everything, h2d=slow, min_window=1, max_window=1)
    # One group back: 500 blocks * 64 KiB / 50 MB/s = 0.66 s once, and 0.66 s less in each step.
    kept = plan_of(snapshot)
    patient = plan_of(make_snapshot(everything, h2d=slow, min_window=64, max_window=64))

    assert len(kept.placements[0].offloaded_layers) == 8
    assert patient.placements[0].offloaded_layers == ()


def test_the_plan_in_force_is_never_left_for_a_worse_one() -> None:
    snapshot = make_snapshot(
        make_request("a", 8_000, offloaded_layers=(3, 7), num_prefetch_buffers=2),
        make_request("b", 4_000, offloaded_layers=(7,), num_prefetch_buffers=1),
        num_free_blocks=6_500,  # the plan in force takes 4000 + 2000, growth a little more
    )
    library = warm_solver(8, PatternSpace.FULL).library
    batch = Batch(snapshot, snapshot.requests, library)
    plan = plan_of(snapshot, nodes=0)
    assert plan.quality is not None
    window = plan.quality.window
    present, steps = batch.present_choice(), window
    keeping = batch.course(present, steps).steps_s.mean()
    choice = np.array([library.index[placed_pattern(p, snapshot.engine)] for p in plan.placements])
    changing = batch.course(choice, steps).steps_s.mean() + batch.switch_s(choice) / window

    assert changing <= keeping * (1 + 2e-3)


def test_a_plan_in_force_that_no_library_pattern_matches_is_kept_while_it_is_the_best() -> None:
    # Two neighbouring layers are no even or balanced pattern. Every pattern of the library brings
    # one of them back over a link that needs 0.66 s for it, or offloads more.
    odd = make_request("a", 8_000, offloaded_layers=(2, 3), num_prefetch_buffers=2)
    slow = Link(bytes_per_s=5e7)
    library = warm_solver(8, PatternSpace.FULL).library
    snapshot = make_snapshot(odd, h2d=slow, min_window=1, max_window=1)
    assert placed_pattern(odd, snapshot.engine) not in library.index

    kept = plan_of(snapshot)
    patient = plan_of(make_snapshot(odd, h2d=slow, min_window=64, max_window=64))

    assert kept.placements[0].offloaded_layers == (2, 3)
    assert kept.status is PlanStatus.OPTIMAL
    assert kept.quality is not None
    assert kept.quality.lower_bound_s <= kept.quality.objective_s
    assert patient.placements[0].offloaded_layers == ()


def test_a_plan_in_force_is_kept_where_no_library_pattern_fits_the_pool() -> None:
    # Layers 0 and 1 are on the host, nothing else is: no library pattern may be installed but
    # "all resident", which takes 8 * 501 blocks.
    mirrored = (500, 500, 0, 0, 0, 0, 0, 0)
    odd = make_request(
        "a",
        8_000,
        offloaded_layers=(0, 1),
        num_prefetch_buffers=1,
        num_host_blocks=mirrored,
    )
    # 6 * 501 resident, 500 of staging, two open blocks, and room to grow.
    snapshot = make_snapshot(odd, num_free_blocks=3_600)

    plan = plan_of(snapshot)

    assert plan.placements[0].offloaded_layers == (0, 1)
    assert not plan.placements[0].paused


@pytest.mark.parametrize("tokens_per_step", [1.0, 2.7])
def test_course_and_load_equal_the_shared_formulas(tokens_per_step: float) -> None:
    snapshot = make_snapshot(
        make_request(
            "a", 1_003, slo_tbt_s=0.02, num_deposited_tokens=3, tokens_per_step=tokens_per_step
        ),
        make_request("b", 517, slo_tbt_s=0.011, last_release_age_s=0.004),
        make_request(
            "p",
            700,
            phase=RequestPhase.PREFILL,
            num_computed_tokens=300,
            num_output_tokens=0,
            num_prompt_tokens=700,
            num_host_blocks=(18,) * 8,
            tokens_per_step=tokens_per_step,
        ),
        h2d=Link(bytes_per_s=3e9, copy_overhead_s=1e-5, chunk_bytes=1 << 20),
    )
    library = warm_solver(8, PatternSpace.FULL).library
    batch = Batch(snapshot, snapshot.requests, library)
    random = np.random.default_rng(3)
    for _ in range(20):
        choice = random.integers(0, library.num_patterns, 3)
        patterns = [library.patterns[k] for k in choice]
        course = batch.course(choice, 40)
        placed = list(zip(snapshot.requests, patterns, strict=True))
        for t in range(40):
            step_s = predicted_step_s(snapshot, placed, growth=t)
            assert course.steps_s[t] + 2e-3 == pytest.approx(step_s)
            blocks = sum(
                pool_need(demand_of(request, snapshot.engine, growth=t + 1), pattern)
                for request, pattern in placed
            )
            assert course.blocks[t] == blocks
        promises = [promise_of(r, deposit=True) for r in snapshot.requests if r.slo_s]
        expected = late_tokens(promises, list(course.steps_s + 2e-3))
        assert course.late.tolist() == expected
    for window in (1, 2, 5, 9, 16, 21, 40):  # 1003 + 5 and + 21, 517 + 11, 700 + 4 end a block
        instance = batch.instance(window=window, read_after=window - 1, switching=False)
        for r, request in enumerate(snapshot.requests):
            demands = [demand_of(request, snapshot.engine, growth=t + 1) for t in range(window)]
            assert instance.use[r].tolist() == [
                max(pool_need(demand, pattern) for demand in demands)
                for pattern in library.patterns
            ]


def prompt(num_computed: int, **overrides: object) -> RequestState:
    return make_prefill("prompt", 16_000, num_computed, **overrides)


def test_a_prompt_under_way_is_planned_with_its_chunk_and_its_rereads() -> None:
    # 2047 of 16000 tokens a step at 0.2 ms: 0.41 s of compute, and 8000 tokens to read again.
    snapshot = make_snapshot(make_request("a"), prompt(8_000), num_free_blocks=5_000)
    plan = plan_of(snapshot)
    assert plan.quality is not None
    placed = [
        (request, placed_pattern(placement, snapshot.engine))
        for request, placement in zip(snapshot.requests, plan.placements, strict=True)
    ]

    assert plan.quality.first_latency_s == pytest.approx(predicted_step_s(snapshot, placed))
    assert plan.quality.first_latency_s > 0.4
    assert plan.quality.window == 4  # the prompt is complete after 4 steps
    last_s = predicted_step_s(snapshot, placed, growth=plan.quality.window - 1)
    assert plan.quality.latency_s == pytest.approx(last_s)


def test_a_first_chunk_may_be_offloaded_for_nothing_where_a_later_one_may_not() -> None:
    # The link needs 0.16 s per layer of 8000 tokens; a chunk computes for 51 ms per layer.
    slow = Link(bytes_per_s=65_536 * 500 / 0.16)
    steps_s = {}
    for num_computed in (0, 8_000):
        snapshot = make_snapshot(
            prompt(num_computed), num_free_blocks=5_000, h2d=slow, max_window=1
        )
        quality = plan_of(snapshot).quality
        assert quality is not None
        steps_s[num_computed] = quality.first_latency_s

    assert steps_s[0] == pytest.approx(2e-3 + 8 * (1e-3 + 2_048 * 2e-4 / 8))
    assert steps_s[8_000] > steps_s[0] + 0.1


def test_a_step_that_a_prompt_makes_long_is_not_the_fault_of_a_placement() -> None:
    # 20 ms cannot be kept while chunks of 0.4 s run; when the prompt is complete it can.
    reader = make_request("a", slo_tbt_s=0.02)
    during = plan_of(make_snapshot(reader, prompt(8_000), num_free_blocks=50_000, alpha=0.0))
    after = plan_of(make_snapshot(reader, make_request("done", 16_000), num_free_blocks=50_000))

    assert (during.status, after.status in GOOD) == (PlanStatus.INFEASIBLE, True)
    assert not any(placement.paused for placement in during.placements)


def test_the_problem_counts_staging_until_layers_are_back() -> None:
    request = make_request("a", 1_003, offloaded_layers=(3, 7), num_prefetch_buffers=2)
    snapshot = make_snapshot(request)
    library = warm_solver(8, PatternSpace.FULL).library
    instance = Batch(snapshot, [request], library).instance(window=1, read_after=0, switching=True)
    demand = demand_of(request, snapshot.engine, growth=1)
    present = placed_pattern(request, snapshot.engine)

    assert instance.use[0].tolist() == [
        blocks_while_restoring(demand, present=present, target=pattern)
        for pattern in library.patterns
    ]


def test_a_deadline_already_past_still_gives_a_plan() -> None:
    requests = [make_request(f"r{i}", 2_000 + 700 * i) for i in range(8)]
    snapshot = make_snapshot(*requests, num_free_blocks=6_000)
    budget = DeadlineBudget(lambda: 1.0, 0.0)

    plan = make_plan(snapshot, budget, optimiser())

    assert plan.status in GOOD
    assert blocks_needed(snapshot, plan, 1) <= 6_000


SIZES = st.integers(20, 9_000)


@st.composite
def trunks(draw: st.DrawFn) -> list[PrefixState]:
    """Return up to three prefixes, of any sizes and any plan in force."""
    library = warm_solver(8, PatternSpace.FULL).library
    columns = draw(st.lists(st.integers(0, library.num_patterns - 1), max_size=3))
    return [
        make_prefix(
            f"t{i}",
            16 * draw(st.integers(1, 600)),
            offloaded_layers=library.patterns[column].offloaded,
            num_prefetch_buffers=library.patterns[column].num_buffers,
            num_blocks=draw(st.sampled_from([(), (9,) * 8])),
        )
        for i, column in enumerate(columns)
    ]


@st.composite
def crowded(draw: st.DrawFn) -> Snapshot:
    """Return a snapshot of any sizes, prefixes, pool, plan in force, mirror and window."""
    library = warm_solver(8, PatternSpace.FULL).library
    prefixes = draw(trunks())
    requests = []
    for i, size in enumerate(draw(st.lists(SIZES, min_size=1, max_size=5))):
        pattern = library.patterns[draw(st.integers(0, library.num_patterns - 1))]
        full = size // 16
        lags = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 40, 10**6]), min_size=8, max_size=8))
        mirrored = draw(st.sampled_from([(full,) * 8, tuple(max(0, full - lag) for lag in lags)]))
        phase = draw(st.sampled_from([RequestPhase.DECODING] * 3 + [RequestPhase.PREFILL]))
        prefill = phase is RequestPhase.PREFILL
        requests.append(
            make_request(
                f"r{i}",
                size,
                phase=phase,
                num_prompt_tokens=size + (draw(st.integers(1, 9_000)) if prefill else -1),
                num_output_tokens=0 if prefill else 1,
                on_hold=draw(st.sampled_from([False] * 9 + [True])),
                slo_tbt_s=draw(st.none() | st.sampled_from([0.01, 0.02, 0.1])),
                offloaded_layers=pattern.offloaded,
                num_prefetch_buffers=pattern.num_buffers,
                num_host_blocks=draw(st.sampled_from([mirrored, mirrored, mirrored, ()])),
                prefix_ids=tuple(p.prefix_id for p in prefixes if draw(st.booleans())),
            )
        )
    everything = sum(one.num_tokens // 16 + 1 for one in (*requests, *prefixes)) * 8
    shortest = draw(st.integers(1, 40))
    return make_snapshot(
        *requests,
        prefixes=tuple(prefixes),
        num_free_blocks=int(everything * draw(st.floats(0.05, 1.2))),
        num_write_through_blocks=draw(st.sampled_from([0, 0, 1, 50, 10**6])),
        min_window=shortest,
        max_window=draw(st.integers(shortest, 64)),
        alpha=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
    )


@given(snapshot=crowded())
@settings(max_examples=examples(30))
def test_no_plan_exceeds_the_pool_at_any_step_of_its_window(snapshot: Snapshot) -> None:
    plan = plan_of(snapshot, nodes=200)  # counts the blocks of every step
    quality = plan.quality
    assert quality is not None
    running = [placement for placement in plan.placements if not placement.paused]
    if not running:
        return
    assert snapshot.parameters.min_window <= quality.window <= snapshot.parameters.max_window
    assert quality.expires_after >= quality.window or plan.status not in GOOD
