"""What each baseline decides, on batches small enough to compute by hand."""

import dataclasses

import pytest

from lab.planning.snapshots import make_engine, make_request, make_snapshot
from services.placement.place.dynamic_heuristic import dynamic_heuristic
from services.placement.place.layerkv import layerkv, min_kept_layers, num_blocks_forecast
from services.placement.place.uniform import (
    batch_uniform,
    deepspeed,
    flexgen,
    flexgen_plus,
    slo_aware,
)
from services.placement.policies import NEEDED_FIELDS, POLICIES, all_resident
from services.placement.presets import PRESETS, PlacementPolicy, RunPolicy, resolved
from services.placement.step_time.batch import capacity_blocks, demand_of, placed_pattern, pool_need
from services.placement.types import (
    Link,
    Placement,
    Plan,
    PlanStatus,
    Profile,
    RequestPhase,
    Snapshot,
    VictimRule,
)

BASELINES = [policy for name, policy in POLICIES.items() if name.value != "all-resident"]


def offloaded(plan: Plan) -> list[int]:
    """Return the number of offloaded layers of each request."""
    return [len(placement.offloaded_layers) for placement in plan.placements]


def used_blocks(snapshot: Snapshot, plan: Plan) -> int:
    return sum(
        pool_need(
            demand_of(request, snapshot.engine, growth=1), placed_pattern(placed, snapshot.engine)
        )
        for request, placed in zip(snapshot.requests, plan.placements, strict=True)
        if not placed.paused
    )


def test_vllm_keeps_everything_resident_and_pauses_nobody_even_beyond_the_pool() -> None:
    held = make_request("held", phase=RequestPhase.PAUSED, paused_age_s=1.0)
    plan = all_resident(make_snapshot(make_request("long", 9_000), held, num_free_blocks=0))

    assert plan.status is PlanStatus.OPTIMAL
    assert plan.placements == (
        Placement(request_id=plan.placements[0].request_id),
        Placement(request_id=held.request_id),
    )


def test_deepspeed_offloads_everything_with_the_next_layer_on_its_way() -> None:
    snapshot = make_snapshot(make_request("a"), make_request("b"))
    serial = dataclasses.replace(snapshot.parameters, no_overlap=True)

    plan = deepspeed(snapshot)

    assert offloaded(plan) == [8, 8]
    assert [placed.num_prefetch_buffers for placed in plan.placements] == [2, 2]
    without_overlap = deepspeed(dataclasses.replace(snapshot, parameters=serial))
    assert [placed.num_prefetch_buffers for placed in without_overlap.placements] == [1, 1]


def test_flexgen_does_not_look_at_the_batch() -> None:
    engine = make_engine(max_num_seqs=2, max_model_len=8_000, num_blocks=6_000)
    # The worst batch: 2 * 500 blocks a layer. 6 resident layers and one buffer each need 7000;
    # 4 resident need 5000 (distance 2); distance 3 (2 layers offloaded) 7000; so 4 are offloaded.
    for requests in ([make_request("a", 160)], [make_request("a", 160), make_request("b", 8_000)]):
        plan = flexgen(make_snapshot(*requests, engine=engine, num_free_blocks=6_000))
        assert offloaded(plan) == [4] * len(requests)


def test_flexgen_counts_on_the_peak_rate_of_the_link_not_on_the_present_one() -> None:
    engine = make_engine(max_num_seqs=1, max_model_len=8_000, num_blocks=2_600)
    request = make_request("a", 160)
    busy = Link(bytes_per_s=1e6, peak_bytes_per_s=12e9)
    idle = Link(bytes_per_s=12e9)
    plans = [flexgen(make_snapshot(request, engine=engine, h2d=link)) for link in (busy, idle)]

    assert plans[0].placements == plans[1].placements
    assert busy.at_peak().bytes_per_s == idle.at_peak().bytes_per_s == 12e9


def test_flexgen_plus_takes_the_fastest_distance_that_fits() -> None:
    request = make_request("a", 8_000)  # 500 blocks a layer: 4000 resident, and 8 open ones
    assert offloaded(flexgen_plus(make_snapshot(request, num_free_blocks=4_008))) == [0]
    # One layer less and one buffer is no gain; distance 4 offloads 2 layers: 6 + 1 buffers.
    assert offloaded(flexgen_plus(make_snapshot(request, num_free_blocks=4_007))) == [2]


def test_slo_aware_offloads_as_much_as_the_slo_allows() -> None:
    # A layer takes 1 ms and 8000 * 7 ns = 1.056 ms; its copy 500 * 64 KiB / 12 GB/s = 2.73 ms.
    # All resident: 2 + 8 * 1.056 = 10.4 ms. All offloaded, no overlap: 10.4 + 8 * 2.73 = 32.3 ms.
    # Every second layer: 4 * (2.73 - 1.056) more = 17.1 ms. Every fourth: all hidden, 10.4 ms.
    def layers(slo_s: float | None) -> int:
        snapshot = make_snapshot(make_request("a", 8_000, slo_tbt_s=slo_s))
        return offloaded(slo_aware(snapshot))[0]

    assert layers(None) == 8
    assert layers(0.0324) == 8
    assert layers(0.0322) == 4
    assert layers(0.0172) == 4
    assert layers(0.0170) == 2
    assert layers(0.0105) == 2
    assert layers(0.0010) == 0  # nothing meets it: the fastest


def test_batch_uniform_says_whether_its_best_keeps_the_slo() -> None:
    kept = make_snapshot(make_request("a", 8_000, slo_tbt_s=0.0105))
    broken = make_snapshot(make_request("a", 8_000, slo_tbt_s=0.0103))

    assert batch_uniform(kept).status is PlanStatus.OPTIMAL
    assert batch_uniform(broken).status is PlanStatus.INFEASIBLE


def test_the_heuristic_offloads_the_fewest_layers_of_the_largest_request() -> None:
    # 500 and 100 blocks a layer, 8 layers, one open block a layer each: 4000 + 800 + 16.
    snapshot = make_snapshot(make_request("a", 8_000), make_request("b", 1_600))

    def counts(num_free_blocks: int) -> list[int]:
        return offloaded(
            dynamic_heuristic(dataclasses.replace(snapshot, num_free_blocks=num_free_blocks))
        )

    assert counts(4_816) == [0, 0]
    # Offloading one layer frees nothing, its buffer is as large; the second frees 500 less the
    # blocks that two offloaded layers may be sealing.
    assert counts(4_815) == [2, 0]


def test_the_heuristic_needs_neither_profile_nor_link() -> None:
    snapshot = make_snapshot(
        make_request("a", 8_000), num_free_blocks=2_000, profile=None, h2d=None, d2h=None
    )

    plan = dynamic_heuristic(snapshot)

    assert plan.status is PlanStatus.FEASIBLE
    assert used_blocks(snapshot, plan) <= 2_000


@pytest.mark.parametrize("policy", BASELINES, ids=lambda policy: policy.__name__)
@pytest.mark.parametrize("num_free_blocks", [10_000, 3_000, 1_300, 400, 0])
def test_no_baseline_exceeds_the_pool(policy, num_free_blocks) -> None:
    requests = [make_request(name, size) for name, size in (("a", 6_400), ("b", 3_201), ("c", 90))]
    snapshot = make_snapshot(*requests, num_free_blocks=num_free_blocks)

    plan = policy(snapshot)

    assert used_blocks(snapshot, plan) <= capacity_blocks(snapshot)
    paused = [placed.request_id for placed in plan.placements if placed.paused]
    assert paused == ["a", "b", "c"][len("abc") - len(paused) :]  # the newest first
    assert (plan.status is PlanStatus.INFEASIBLE) == bool(paused)


@pytest.mark.parametrize("policy", BASELINES, ids=lambda policy: policy.__name__)
def test_what_is_not_on_the_host_stays_resident(policy) -> None:
    snapshot = make_snapshot(
        make_request("a", num_host_blocks=()), make_request("b"), num_free_blocks=1_500
    )

    assert offloaded(policy(snapshot))[0] == 0


# -- layerkv -------------------------------------------------------------------------------------


def prefill(num_tokens: int, **overrides):
    return make_request(
        "p",
        phase=RequestPhase.PREFILL,
        num_prompt_tokens=num_tokens,
        num_output_tokens=0,
        num_computed_tokens=0,
        num_host_blocks=(0,) * 8,
        **overrides,
    )


def layerkv_snapshot(request, *, prefill_s_per_token: float, chunk: int = 100_000) -> Snapshot:
    return make_snapshot(
        request,
        engine=make_engine(max_num_batched_tokens=chunk, num_blocks=10**6),
        num_free_blocks=10**6,
        profile=Profile(layer_base_s=1e-3, prefill_s_per_token=prefill_s_per_token),
        h2d=Link(bytes_per_s=BLOCKS_PER_S),
        d2h=Link(bytes_per_s=BLOCKS_PER_S),
    )


BLOCKS_PER_S = 65_536 * 1_000.0  # a thousand blocks per second


@pytest.mark.parametrize(
    ("prefill_s_per_token", "chunk", "expected"),
    [
        # 1600 tokens are 100 blocks: 0.1 s a layer on the link.
        (0.8 / 1_600, 100_000, 0),  # 0.8 s hide all eight layers
        (0.79 / 1_600, 100_000, 1),
        (0.25 / 1_600, 100_000, 6),
        (0.0, 100_000, 8),
        # Chunks of 400 re-read 25 + 50 + 75 = 150 blocks a layer: 0.15 s the other way.
        (0.8 / 1_600, 400, 3),
    ],
)
def test_a_prefill_keeps_what_its_copies_cannot_hide(prefill_s_per_token, chunk, expected) -> None:
    snapshot = layerkv_snapshot(
        prefill(1_600), prefill_s_per_token=prefill_s_per_token, chunk=chunk
    )

    assert min_kept_layers(snapshot.requests[0], snapshot) == expected
    assert offloaded(layerkv(snapshot)) == [8 - expected]


def test_kept_layers_leave_when_the_link_is_idle() -> None:
    request = make_request("a", offloaded_layers=(3, 7), num_prefetch_buffers=1)
    idle = make_snapshot(request)
    busy = dataclasses.replace(idle, d2h=Link(bytes_per_s=1e9, num_queued_bytes=1))

    assert offloaded(layerkv(idle)) == [8]
    assert offloaded(layerkv(busy)) == [2]


def test_under_shortage_the_newest_gives_up_half_and_then_all() -> None:
    older = make_request("old", 1_600, num_blocks=(100,) * 8)
    newer = make_request("new", 1_600, num_blocks=(100,) * 8)
    busy = Link(bytes_per_s=1e9, num_queued_bytes=1)
    # Each of two requests takes a block in each of 8 layers: 16 free ones are enough.
    for free, expected in ((16, [0, 0]), (15, [0, 4])):
        snapshot = make_snapshot(older, newer, num_free_blocks=free, d2h=busy)
        assert offloaded(layerkv(snapshot)) == expected


def test_the_forecast_counts_who_is_about_to_end() -> None:
    # Eq. 5: 100 free, + 800 released by who reaches the median 65 of [60, 70], - 8 allocated.
    ending = make_request(
        "e",
        num_blocks=(100,) * 8,
        predicted_min_output_tokens=60,
        predicted_max_output_tokens=70,
    )
    going_on = make_request("g", num_blocks=(100,) * 8)

    assert num_blocks_forecast(make_snapshot(ending, going_on, num_free_blocks=100)) == 892
    later = dataclasses.replace(ending, predicted_max_output_tokens=71)
    assert num_blocks_forecast(make_snapshot(later, going_on, num_free_blocks=100)) == 84


# -- presets -------------------------------------------------------------------------------------


def test_the_ablations_add_one_component_each() -> None:
    names = ("batch-uniform", "request-wise", "request-wise-pause", "orbitflow")
    chosen = [PRESETS[name] for name in names]

    assert [preset.placement for preset in chosen] == [
        PlacementPolicy.BATCH_UNIFORM,
        *[PlacementPolicy.OPTIMISER] * 3,
    ]
    assert [preset.pause for preset in chosen] == [False, False, True, True]
    assert [preset.deposit for preset in chosen] == [False, False, False, True]


def test_every_axis_of_a_preset_can_be_replaced() -> None:
    snapshot = make_snapshot(
        policy="orbitflow",
        placement_policy="flexgen",
        admission_policy="slo-aware",
        deposit=False,
        pause=False,
        victim_rule=VictimRule.SHORTEST,
    )

    preset, complete = resolved(snapshot)

    assert preset.placement is PlacementPolicy.FLEXGEN
    assert preset.admission.value == "slo-aware"
    assert (complete.parameters.deposit, complete.parameters.pause) == (False, False)
    assert complete.parameters.victim_rule is VictimRule.SHORTEST


def test_an_open_parameter_takes_the_presets_value() -> None:
    _, orbitflow = resolved(make_snapshot(policy="orbitflow"))
    _, joint = resolved(make_snapshot(policy="joint"))
    preset, plain = resolved(make_snapshot(policy="layerkv", admission_policy="fcfs"))

    assert orbitflow.parameters.victim_rule is VictimRule.KV_AND_DEPOSIT
    assert (orbitflow.parameters.deposit, orbitflow.parameters.pause) == (True, True)
    assert (joint.parameters.deposit, joint.parameters.pause) == (True, False)
    assert (plain.parameters.deposit, preset.admission.value) == (False, "fcfs")


def test_where_a_run_policy_decides_no_plan_pauses_for_an_slo() -> None:
    assert all(not p.pause for p in PRESETS.values() if p.run is not RunPolicy.FCFS)
    for run, pauses in (("", True), ("fcfs", True), ("srtf", True), ("evenflow", False)):
        _, complete = resolved(make_snapshot(policy="orbitflow", run_policy=run))
        assert complete.parameters.pause is pauses


def test_every_placement_policy_is_either_pure_or_the_optimiser() -> None:
    assert set(POLICIES) | {PlacementPolicy.OPTIMISER} == set(PlacementPolicy)
    assert set(NEEDED_FIELDS) <= set(PlacementPolicy)
