"""The optimiser's policy: each constraint by itself, the window, pause and liveness."""

import dataclasses
from functools import cache
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.placement.batch import (
    capacity_blocks,
    demand_of,
    placed_pattern,
    pool_need,
    predicted_step_s,
)
from services.placement.capacity import blocks_while_restoring
from services.placement.patterns import PatternSpace
from services.placement.slo import late_tokens, promise_of
from services.placement.types import (
    BufferMode,
    Link,
    Placement,
    Plan,
    PlanStatus,
    RequestPhase,
    RequestState,
    Snapshot,
    VictimRule,
)
from services.planner.batch import Batch
from services.planner.budget import DeadlineBudget, NodeBudget
from services.planner.orbitflow import OrbitFlow, window_lengths
from services.planner.policies import make_plan
from services.planner.solver import warm_solver
from tests.snapshots import make_engine, make_request, make_snapshot

pytestmark = pytest.mark.timeout(600)  # the first run compiles the kernels

GOOD = (PlanStatus.OPTIMAL, PlanStatus.FEASIBLE)


@cache
def optimiser() -> OrbitFlow:
    return OrbitFlow(warm_solver)


def plan_of(snapshot: Snapshot, nodes: int = 3_000) -> Plan:
    plan = make_plan(snapshot, NodeBudget(nodes), optimiser())
    assert plan.quality is not None
    for growth in range(1, plan.quality.window + 1):
        assert blocks_needed(snapshot, plan, growth) <= capacity_blocks(snapshot)
    assert [p.request_id for p in plan.placements] == [r.request_id for r in snapshot.requests]
    return plan


def blocks_needed(snapshot: Snapshot, plan: Plan, growth: int) -> int:
    """Return the pool blocks of what runs, after `growth` more tokens, in steady state."""
    return sum(
        pool_need(
            demand_of(request, snapshot.engine, growth=growth),
            placed_pattern(placement, snapshot.engine),
        )
        for request, placement in zip(snapshot.requests, plan.placements, strict=True)
        if request.phase.holds_kv and not placement.paused
    )


def paused(plan: Plan) -> list[str]:
    return [placement.request_id for placement in plan.placements if placement.paused]


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


def tight_pair(**overrides: object) -> Snapshot:
    """Two requests that meet 40 ms together only if everything were resident."""
    requests = [
        make_request("long", 24_000, slo_tbt_s=0.04, **overrides),
        make_request("short", 8_000, slo_tbt_s=0.04, **overrides),
    ]
    return make_snapshot(*requests, num_free_blocks=9_000, alpha=0.0)


def test_an_slo_that_all_cannot_keep_pauses_the_largest() -> None:
    plan = plan_of(tight_pair())

    assert paused(plan) == ["long"]
    assert plan.status in GOOD
    assert plan.quality is not None
    assert plan.quality.serve_all is PlanStatus.INFEASIBLE
    assert plan.quality.latency_s <= 0.04


def test_without_pause_the_slo_yields_and_the_plan_says_so() -> None:
    snapshot = tight_pair()
    open_ended = dataclasses.replace(snapshot.parameters, pause=False)

    plan = plan_of(dataclasses.replace(snapshot, parameters=open_ended))

    assert (paused(plan), plan.status) == ([], PlanStatus.INFEASIBLE)


def test_a_request_without_an_slo_adds_no_bound() -> None:
    snapshot = tight_pair()
    free = tuple(dataclasses.replace(r, slo_tbt_s=None) for r in snapshot.requests)

    plan = plan_of(dataclasses.replace(snapshot, requests=free))

    assert (paused(plan), plan.status in GOOD) == ([], True)


def test_tpot_stands_in_where_tbt_is_absent() -> None:
    snapshot = tight_pair()
    tpot = tuple(dataclasses.replace(r, slo_tbt_s=None, slo_tpot_s=0.04) for r in snapshot.requests)

    assert paused(plan_of(dataclasses.replace(snapshot, requests=tpot))) == ["long"]


def test_deposited_tokens_back_a_slower_step_unless_deposit_is_off() -> None:
    # Each has 60 deposited tokens * 40 ms = 2.4 s of cover.
    backed = tight_pair(num_deposited_tokens=60)
    off = dataclasses.replace(backed.parameters, deposit=False)

    assert paused(plan_of(backed)) == []
    assert paused(plan_of(dataclasses.replace(backed, parameters=off))) == ["long"]


@pytest.mark.parametrize(("num_requests", "expected"), [(3, []), (1, ["r0"])])
def test_alpha_lets_one_reader_miss_only_in_a_batch_larger_than_it(num_requests, expected) -> None:
    # r0 asks for 1 ms per token, which no placement gives; the others ask for nothing.
    requests = [make_request(f"r{i}") for i in range(num_requests)]
    requests[0] = dataclasses.replace(requests[0], slo_tbt_s=0.001)
    plan = plan_of(make_snapshot(*requests, alpha=1.0))

    assert (plan.status is PlanStatus.INFEASIBLE) == bool(expected)
    assert paused(plan) == []  # a request alone is not paused for itself


@pytest.mark.parametrize(
    ("rule", "victim"),
    [
        (VictimRule.KV_AND_DEPOSIT, "b"),
        (VictimRule.LONGEST, "b"),
        (VictimRule.SHORTEST, "a"),
        (VictimRule.SMALLEST_SET, "a"),
    ],
)
def test_the_victim_rule_says_who_is_paused(rule, victim) -> None:
    # Fully offloaded each needs one layer's blocks twice over; two of three fit, whoever they are.
    sizes = {"a": 9_600, "b": 12_800, "c": 11_200}
    requests = [make_request(name, size) for name, size in sizes.items()]
    snapshot = make_snapshot(*requests, num_free_blocks=1_650, victim_rule=rule)

    plan = plan_of(snapshot)

    assert paused(plan) == [victim]
    assert plan.quality is not None
    assert plan.quality.serve_all is PlanStatus.INFEASIBLE


def test_the_random_victim_follows_the_seed() -> None:
    requests = [make_request(name, 11_200) for name in "abcd"]
    snapshot = make_snapshot(*requests, num_free_blocks=2_300, victim_rule=VictimRule.RANDOM)
    victims = {seed: paused(plan_of(dataclasses.replace(snapshot, seed=seed))) for seed in range(8)}

    assert victims[3] == paused(plan_of(dataclasses.replace(snapshot, seed=3)))
    assert len({tuple(names) for names in victims.values()}) > 1


def test_a_request_larger_than_the_pool_is_paused_and_the_rest_runs() -> None:
    snapshot = make_snapshot(make_request("huge", 64_000), make_request("a"), num_free_blocks=1_000)

    assert paused(plan_of(snapshot)) == ["huge"]


def test_nothing_runs_where_nothing_fits() -> None:
    plan = plan_of(make_snapshot(make_request("huge", 64_000), num_free_blocks=1_000))

    assert paused(plan) == ["huge"]


def test_a_young_pause_holds_until_a_request_completes() -> None:
    held = make_request("h", phase=RequestPhase.PAUSED, paused_age_s=0.4)
    snapshot = make_snapshot(make_request("a"), held, min_pause_s=1.0)

    assert paused(plan_of(snapshot)) == ["h"]
    assert paused(plan_of(dataclasses.replace(snapshot, last_completion_age_s=0.5))) == ["h"]
    assert paused(plan_of(dataclasses.replace(snapshot, last_completion_age_s=0.3))) == []
    ripe = dataclasses.replace(held, paused_age_s=1.0)
    assert (
        paused(plan_of(dataclasses.replace(snapshot, requests=(snapshot.requests[0], ripe)))) == []
    )


def test_an_only_paused_batch_resumes_its_longest_paused_request() -> None:
    early = make_request("e", phase=RequestPhase.PAUSED, paused_age_s=0.5)
    late = make_request("l", phase=RequestPhase.PAUSED, paused_age_s=0.1)

    assert paused(plan_of(make_snapshot(late, early))) == ["l"]


def test_who_is_on_hold_is_not_resumed_even_where_nobody_else_is_left() -> None:
    held = make_request("h", phase=RequestPhase.PAUSED, paused_age_s=99.0, on_hold=True)
    early = make_request("e", phase=RequestPhase.PAUSED, paused_age_s=0.5)

    assert paused(plan_of(make_snapshot(held, early))) == ["h"]
    assert paused(plan_of(make_snapshot(held))) == ["h"]


@pytest.mark.parametrize(("age_s", "expected"), [(9.9, ["long"]), (10.0, ["short"])])
def test_after_max_pause_another_is_the_victim(age_s, expected) -> None:
    # Each alone keeps 40 ms or is protected; both together do not.
    snapshot = tight_pair()
    long = dataclasses.replace(
        snapshot.requests[0],
        phase=RequestPhase.PAUSED,
        paused_age_s=age_s,
        slo_tbt_s=0.5,
        num_pauses=1,
    )
    requests = (long, snapshot.requests[1])

    plan = plan_of(dataclasses.replace(snapshot, requests=requests))

    assert paused(plan) == expected


def test_who_was_just_resumed_is_not_paused_again_for_an_slo() -> None:
    snapshot = tight_pair()
    for age_s, expected in ((0.9, ["short"]), (1.0, ["long"])):
        resumed = dataclasses.replace(snapshot.requests[0], resumed_age_s=age_s, slo_tbt_s=0.5)
        plan = plan_of(dataclasses.replace(snapshot, requests=(resumed, snapshot.requests[1])))
        assert paused(plan) == expected


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
    library = warm_solver(8, PatternSpace.FULL, BufferMode.PRIVATE).library
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
    library = warm_solver(8, PatternSpace.FULL, BufferMode.PRIVATE).library
    snapshot = make_snapshot(odd, h2d=slow, min_window=1, max_window=1)
    assert placed_pattern(odd, snapshot.engine) not in library.index

    kept = plan_of(snapshot)
    patient = plan_of(make_snapshot(odd, h2d=slow, min_window=64, max_window=64))

    assert kept.placements[0].offloaded_layers == (2, 3)
    assert kept.status is PlanStatus.FEASIBLE
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


def test_course_and_load_equal_the_shared_formulas() -> None:
    snapshot = make_snapshot(
        make_request("a", 1_003, slo_tbt_s=0.02, num_deposited_tokens=3),
        make_request("b", 517, slo_tbt_s=0.011, last_release_age_s=0.004),
        make_request(
            "p",
            700,
            phase=RequestPhase.PREFILL,
            num_computed_tokens=300,
            num_output_tokens=0,
            num_prompt_tokens=700,
            num_host_blocks=(18,) * 8,
        ),
        h2d=Link(bytes_per_s=3e9, copy_overhead_s=1e-5, chunk_bytes=1 << 20),
    )
    library = warm_solver(8, PatternSpace.FULL, BufferMode.PRIVATE).library
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


def test_the_problem_counts_staging_until_layers_are_back() -> None:
    request = make_request("a", 1_003, offloaded_layers=(3, 7), num_prefetch_buffers=2)
    snapshot = make_snapshot(request)
    library = warm_solver(8, PatternSpace.FULL, BufferMode.PRIVATE).library
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
def crowded(draw: st.DrawFn) -> Snapshot:
    """Return a snapshot of any sizes, any pool, any plan in force, any mirror, any window."""
    library = warm_solver(8, PatternSpace.FULL, BufferMode.PRIVATE).library
    requests = []
    for i, size in enumerate(draw(st.lists(SIZES, min_size=1, max_size=5))):
        pattern = library.patterns[draw(st.integers(0, library.num_patterns - 1))]
        mirrored = draw(st.sampled_from([size // 16, size // 16, max(0, size // 16 - 3)]))
        requests.append(
            make_request(
                f"r{i}",
                size,
                slo_tbt_s=draw(st.none() | st.sampled_from([0.01, 0.02, 0.1])),
                offloaded_layers=pattern.offloaded,
                num_prefetch_buffers=pattern.num_buffers,
                num_host_blocks=(mirrored,) * 8,
            )
        )
    everything = sum(request.num_tokens // 16 + 1 for request in requests) * 8
    shortest = draw(st.integers(1, 40))
    return make_snapshot(
        *requests,
        num_free_blocks=int(everything * draw(st.floats(0.05, 1.2))),
        min_window=shortest,
        max_window=draw(st.integers(shortest, 64)),
        alpha=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
    )


@given(snapshot=crowded())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_exceeds_the_pool_at_any_step_of_its_window(snapshot: Snapshot) -> None:
    plan = plan_of(snapshot, nodes=200)  # counts the blocks of every step
    quality = plan.quality
    assert quality is not None
    running = [placement for placement in plan.placements if not placement.paused]
    if not running:
        return
    assert snapshot.parameters.min_window <= quality.window <= snapshot.parameters.max_window
    assert quality.expires_after >= quality.window or plan.status not in GOOD
    for request, placement in zip(snapshot.requests, plan.placements, strict=True):
        if placement.paused or request.num_host_blocks[0] >= request.num_tokens // 16 - 2:
            continue
        assert set(placement.offloaded_layers) <= set(request.offloaded_layers)


# -- sequences of snapshots --------------------------------------------------------------------

TICK_S = 0.25


@dataclasses.dataclass
class Clockwork:
    """An engine that obeys each plan and asks again every quarter of a second."""

    requests: dict[str, RequestState]
    num_blocks: int
    now_s: float = 0.0
    last_completion_s: float | None = None
    pauses: dict[str, list[tuple[float, float | None]]] = dataclasses.field(default_factory=dict)

    def snapshot(self, epoch: int) -> Snapshot:
        ago = None if self.last_completion_s is None else self.now_s - self.last_completion_s
        return make_snapshot(
            *self.requests.values(),
            epoch=epoch,
            num_free_blocks=self.num_blocks,
            last_completion_age_s=ago,
            alpha=0.0,
            min_pause_s=1.0,
            max_pause_s=3.0,
            max_window=16,
        )

    def obey(self, plan: Plan) -> None:
        for placement in plan.placements:
            name = str(placement.request_id)
            request = self.requests[name]
            was = request.phase is RequestPhase.PAUSED
            spans = self.pauses.setdefault(name, [])
            if placement.paused and not was:
                spans.append((self.now_s, None))
            if was and not placement.paused:
                spans[-1] = (spans[-1][0], self.now_s)
        self.now_s += TICK_S
        for placement in plan.placements:
            self._advance(str(placement.request_id), placement)

    def _advance(self, name: str, placement: Placement) -> None:
        request, spans = self.requests[name], self.pauses[name]
        growth = 0 if placement.paused else 8
        resumed = [end for _, end in spans if end is not None]
        tokens = request.num_computed_tokens + growth
        self.requests[name] = dataclasses.replace(
            request,
            phase=RequestPhase.PAUSED if placement.paused else RequestPhase.DECODING,
            paused_age_s=self.now_s - spans[-1][0] if placement.paused else None,
            resumed_age_s=self.now_s - resumed[-1] if resumed else None,
            num_output_tokens=request.num_output_tokens + growth,
            num_computed_tokens=tokens,
            offloaded_layers=placement.offloaded_layers,
            num_prefetch_buffers=placement.num_prefetch_buffers,
            num_host_blocks=(tokens // 16,) * 8,
        )

    def complete(self, name: str) -> None:
        del self.requests[name]
        self.last_completion_s = self.now_s


@st.composite
def clockworks(draw: st.DrawFn) -> Clockwork:
    sizes = draw(st.lists(st.integers(2, 20), min_size=2, max_size=4))
    slos = st.none() | st.sampled_from([0.012, 0.02, 0.04, 0.1])
    requests = {
        f"r{i}": make_request(f"r{i}", size * 1_000, slo_tbt_s=draw(slos))
        for i, size in enumerate(sizes)
    }
    # Everything offloaded needs two layers' blocks of each; growth and open blocks on top.
    least = sum(r.num_tokens // 16 * 2 for r in requests.values()) + 400
    return Clockwork(requests, least + draw(st.integers(0, 6)) * 500)


@given(engine=clockworks(), completions=st.lists(st.integers(4, 30), max_size=1))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nobody_starves_and_nobody_flaps(engine: Clockwork, completions: list[int]) -> None:
    for tick in range(32):
        if tick in completions and len(engine.requests) > 1:
            running = [n for n, r in engine.requests.items() if r.phase is not RequestPhase.PAUSED]
            engine.complete(running[0])
        snapshot = engine.snapshot(tick + 1)
        plan = plan_of(snapshot, nodes=300)
        assert any(not placement.paused for placement in plan.placements)
        engine.obey(plan)
    for spans in engine.pauses.values():
        for (start, end), following in zip_longest(spans, spans[1:]):
            lasted = (engine.now_s if end is None else end) - start
            assert lasted <= 3.0 + TICK_S  # max_pause_s, and the tick until it is noticed
            completed = engine.last_completion_s is not None and start <= engine.last_completion_s
            assert end is None or lasted >= 1.0 or completed or len(engine.requests) == 1
            if following is not None and end is not None:
                assert following[0] - end >= 1.0 - 1e-9
