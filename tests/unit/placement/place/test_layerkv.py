"""LayerKV's placement, on batches small enough to compute by hand."""

import dataclasses

import pytest

from lab.planning.snapshots import make_engine, make_request, make_snapshot
from services.placement.place.layerkv import layerkv, min_kept_layers, num_blocks_forecast
from services.placement.types import Link, Profile, RequestPhase, Snapshot
from tests.plans import offloaded


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
