"""The way back of least delay, on numbers that can be followed by hand."""

import pytest

from services.placement.run.resume import (
    LinkAndStep,
    ParkedRequest,
    PromptCost,
    ResumeWay,
    cheapest_resume,
    resume_costs,
)
from services.placement.run.types import WHOLE


def make_engine(**overrides: object) -> LinkAndStep:
    values: dict[str, object] = {
        "h2d_bytes_per_s": 1_000.0,
        "prompt": PromptCost(token_s=0.01),
        "step_s": 0.1,
        "step_bytes": 0,
        "queue_bytes": 0,
        "num_running": 3,
        **overrides,
    }
    return LinkAndStep(**values)  # type: ignore[arg-type]


def make_parked(**overrides: object) -> ParkedRequest:
    values: dict[str, object] = {
        "num_tokens": 110,
        "num_host_tokens": 100,
        "load_bytes": 800,
        "num_left": 10,
        **overrides,
    }
    return ParkedRequest(**values)  # type: ignore[arg-type]


def test_costs_by_hand() -> None:
    # tail: 10 tokens at 100/s = 0.1 s, for 4 requests 0.4
    # load: 800 bytes at 1000/s = 8 steps of 0.1 s, for itself only
    # recompute: 110 tokens at 100/s = 1.1 s, for 4 requests 4.4
    # host-resident: the first of 8 steps waits 0.8 s, the others for an eighth less each: 3.6 s,
    # for 4 requests 14.4
    assert resume_costs(make_parked(), make_engine()) == pytest.approx(
        {ResumeWay.LOAD: 1.2, ResumeWay.RECOMPUTE: 4.4, ResumeWay.HOST_RESIDENT: 14.8}
    )
    # 200 bytes that must come first take 2 steps more, for itself, whichever of the two it is
    assert resume_costs(make_parked(first_bytes=200), make_engine()) == pytest.approx(
        {ResumeWay.LOAD: 1.4, ResumeWay.RECOMPUTE: 4.4, ResumeWay.HOST_RESIDENT: 0.2 + 14.8}
    )
    # ... of which its last 2 tokens see the first two: 0.8 + 0.7 s, for 4 requests 6
    short = resume_costs(make_parked(num_left=2), make_engine())
    assert short[ResumeWay.HOST_RESIDENT] == pytest.approx(6.4)


def test_a_load_is_waited_for_until_its_step_ends() -> None:
    # 410 bytes take 0.41 s, which is noticed after 5 steps.
    assert resume_costs(make_parked(load_bytes=410), make_engine())[
        ResumeWay.LOAD
    ] == pytest.approx(0.9)


def test_what_free_blocks_still_hold_is_not_copied() -> None:
    # load: 300 of the 800 bytes at 1000/s = 0.3 s; of all 800 none, whatever is before them
    assert resume_costs(make_parked(found_bytes=500), make_engine())[
        ResumeWay.LOAD
    ] == pytest.approx(0.7)
    whole = make_parked(found_bytes=800)
    assert resume_costs(whole, make_engine(queue_bytes=9_000))[ResumeWay.LOAD] == pytest.approx(0.4)


def test_where_nothing_is_to_be_copied_no_layer_stays_on_the_host_whatever_the_ways_order() -> None:
    parked = make_parked(load_bytes=0, num_shared_tokens=100)

    for ways in ([*ResumeWay], [*reversed(ResumeWay)]):
        assert cheapest_resume(parked, make_engine(), ways=ways) is ResumeWay.LOAD


def test_a_fast_link_is_loaded_from() -> None:
    assert cheapest_resume(make_parked(), make_engine()) is ResumeWay.LOAD


def test_a_slow_link_loses_to_a_fast_prefill() -> None:
    engine = make_engine(h2d_bytes_per_s=10.0, prompt=PromptCost(token_s=0.001))
    assert cheapest_resume(make_parked(), engine) is ResumeWay.RECOMPUTE


def test_copies_that_are_short_beside_a_step_are_waited_for_in_it() -> None:
    # 10 bytes make the next step 0.01 s longer for four requests; a load waits for a step of 0.1 s.
    parked = make_parked(load_bytes=10)
    assert cheapest_resume(parked, make_engine()) is ResumeWay.HOST_RESIDENT
    # Of 30 bytes the former is 0.12 s.
    assert cheapest_resume(make_parked(load_bytes=30), make_engine()) is ResumeWay.LOAD


def test_where_nobody_runs_a_load_waits_for_its_bytes_alone() -> None:
    parked, engine = make_parked(load_bytes=410), make_engine(num_running=0)
    assert resume_costs(parked, engine)[ResumeWay.LOAD] == pytest.approx(0.41 + 0.1)
    assert cheapest_resume(make_parked(load_bytes=10), engine) is ResumeWay.LOAD


def test_a_short_answer_does_not_wait_for_a_long_queue() -> None:
    # host-resident: 0.8 s in each of two steps; a load, 9.8 s
    engine = make_engine(num_running=0, queue_bytes=9_000, prompt=PromptCost(token_s=0.1))
    assert cheapest_resume(make_parked(num_left=2), engine) is ResumeWay.HOST_RESIDENT
    assert cheapest_resume(make_parked(num_left=20), engine) is ResumeWay.LOAD


def test_a_whole_request_comes_back_where_no_step_may_wait_for_its_layers() -> None:
    assert cheapest_resume(make_parked(load_bytes=10), make_engine(), ways=WHOLE) is ResumeWay.LOAD


@pytest.mark.parametrize("queue_bytes", [0, 3_050, 3_201])
def test_a_long_queue_tips_the_balance_to_the_recompute(queue_bytes: int) -> None:
    # load: (queue + 800) / 1000, in whole steps of 0.1 s, + 0.4 against 4.4
    expected = ResumeWay.LOAD if queue_bytes <= 3_200 else ResumeWay.RECOMPUTE
    assert cheapest_resume(make_parked(), make_engine(queue_bytes=queue_bytes)) is expected


def test_a_batch_that_fills_the_link_slows_the_load_down() -> None:
    free = resume_costs(make_parked(), make_engine())[ResumeWay.LOAD]
    # 60 bytes of 100 that a step moves: 40 % of the link is left, 0.8 s become 2 s
    busy = resume_costs(make_parked(), make_engine(step_bytes=60))[ResumeWay.LOAD]
    assert busy - free == pytest.approx(1.2)


def test_without_a_host_copy_there_is_only_the_recompute() -> None:
    assert cheapest_resume(make_parked(num_host_tokens=0), make_engine()) is ResumeWay.RECOMPUTE


@pytest.mark.parametrize("rate", ["h2d_bytes_per_s", "prompt"])
def test_before_anything_is_measured_what_is_on_the_host_is_loaded(rate: str) -> None:
    assert cheapest_resume(make_parked(), make_engine(**{rate: None})) is ResumeWay.LOAD


def test_layers_without_room_in_the_pool_are_the_same_to_every_way() -> None:
    # 400 of 800 bytes have room: a load takes 0.4 s. Left on the host they make the first of four
    # steps 0.4 s longer, the others a quarter less each: 1 s, for 4 requests 4.
    assert resume_costs(make_parked(load_bytes=400), make_engine()) == pytest.approx(
        {ResumeWay.LOAD: 0.8, ResumeWay.RECOMPUTE: 4.4, ResumeWay.HOST_RESIDENT: 4.4}
    )


def test_what_has_no_room_at_all_is_not_computed_again_for_steps_that_wait_either_way() -> None:
    parked = make_parked(load_bytes=0, num_left=1_000)

    costs = resume_costs(parked, make_engine())
    assert costs[ResumeWay.HOST_RESIDENT] == pytest.approx(0.4)
    assert costs[ResumeWay.RECOMPUTE] == pytest.approx(4.4)


def test_a_long_prompt_is_dearer_to_compute_than_its_length_says() -> None:
    # 10 ms each and 0.1 ms for each token behind it: 110 tokens take 1.1 + 0.605 s, the last 10 of
    # them 0.1 + 0.105 s.
    engine = make_engine(prompt=PromptCost(token_s=0.01, pair_s=1e-4))
    costs = resume_costs(make_parked(), engine)

    assert costs[ResumeWay.RECOMPUTE] == pytest.approx(4 * 1.705)
    assert costs[ResumeWay.LOAD] == pytest.approx(0.8 + 4 * 0.205)
