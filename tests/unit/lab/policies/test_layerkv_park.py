"""LayerKV with its layers away for prompts only."""

from lab.policies.layerkv_park import decide
from services.placement.run.types import WHOLE
from tests.unit.placement.run.snapshots import ask, make_snapshot, parked, runs


def test_a_prompt_is_let_in_though_the_pool_is_full_and_layers_leave_for_it() -> None:
    decision = decide(make_snapshot(runs("a", 1_200), ask("b", 500), ask("c", 10)))

    assert decision.run == ("a", "b")  # one prompt at a time
    assert decision.offloads
    assert decision.allowed_ways == WHOLE


def test_the_newest_decode_makes_way_for_the_buffers_of_a_prompt() -> None:
    batch = [runs("a", 700, age_s=30.0), runs("b", 700, age_s=20.0)]

    decision = decide(make_snapshot(*batch, ask("p", 900)))

    assert decision.run == ("a", "p")
    assert decision.park == {"b"}


def test_it_waits_on_the_host_with_its_first_token_until_all_of_it_has_room() -> None:
    older, newer = runs("a", 1_500, age_s=20.0), runs("b", 500, age_s=5.0)

    decision = decide(make_snapshot(older, newer))

    assert decision.run == ("a",)
    assert decision.park == {"b"}
    assert not decision.offloads


def test_nobody_is_parked_before_his_copy_is_complete() -> None:
    decision = decide(make_snapshot(runs("a", 1_500), runs("b", 500, age_s=5.0, num_host_tokens=0)))

    assert not decision.park
    assert decision.offloads


def test_decodes_come_back_in_the_order_of_arrival_beside_a_prompt_under_way() -> None:
    waiting = [parked("b", 600, age_s=9.0), parked("c", 600, age_s=8.0)]
    prompt = runs("p", 400, num_output_tokens=0, age_s=1.0)

    decision = decide(make_snapshot(runs("a", 600), prompt, *waiting, ask("n", 10)))

    assert decision.run == ("a", "b", "p")


def test_a_first_answer_larger_than_the_pool_streams() -> None:
    decision = decide(make_snapshot(parked("large", 3_000)))

    assert decision.run == ("large",)
    assert decision.offloads
