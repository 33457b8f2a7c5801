"""What each baseline decides, on batches small enough to compute by hand."""

import dataclasses

from lab.planning.snapshots import make_engine, make_request, make_snapshot
from lab.policies.dynamic_heuristic import dynamic_heuristic
from lab.policies.uniform import batch_uniform, deepspeed, flexgen, flexgen_plus, slo_aware
from services.placement.types import Link, PlanStatus
from tests.plans import offloaded, used_blocks


def test_deepspeed_offloads_everything_with_the_next_layer_on_its_way() -> None:
    snapshot = make_snapshot(make_request("a"), make_request("b"))

    plan = deepspeed(snapshot)

    assert offloaded(plan) == [8, 8]
    assert [placed.num_prefetch_buffers for placed in plan.placements] == [2, 2]


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
