"""Which executor takes a request."""

from dataclasses import replace

import pytest

from services.gateway.errors import UnknownModelError
from services.gateway.executors.routing import Candidate, choose_executor
from services.kit.errors import UnavailableError


def make_candidate(address: str, num_inflight: int = 0, model: str = "m") -> Candidate:
    return Candidate(
        address=address, models=frozenset({model}), num_inflight=num_inflight, max_model_len=1
    )


@pytest.mark.parametrize(
    ("loads", "excluded", "chosen"),
    [
        pytest.param([2, 1, 3], [], "e1", id="the-least-loaded"),
        pytest.param([1, 0, 2], ["e1"], "e0", id="not-an-excluded-one"),
    ],
)
def test_load_decides(loads, excluded, chosen) -> None:
    candidates = [make_candidate(f"e{k}", load) for k, load in enumerate(loads)]

    assert choose_executor(candidates, "m", excluded=excluded).address == chosen


def test_equals_come_by_turns() -> None:
    candidates = [make_candidate(f"e{k}", load) for k, load in enumerate([1, 2, 1, 1])]
    chosen = [choose_executor(candidates, "m", turn=turn).address for turn in range(4)]

    assert chosen == ["e0", "e2", "e3", "e0"]


def test_only_executors_of_the_model_count() -> None:
    candidates = [make_candidate("idle", 0, "other"), make_candidate("busy", 9)]

    assert choose_executor(candidates, "m").address == "busy"


def test_a_model_that_no_connected_executor_serves_is_unknown() -> None:
    with pytest.raises(UnknownModelError):
        choose_executor([make_candidate("e", model="other")], "m")


def test_without_any_executor_no_model_is_unknown() -> None:
    with pytest.raises(UnavailableError):
        choose_executor([], "m")


def test_when_all_that_serve_it_are_excluded_it_is_unavailable() -> None:
    candidates = [make_candidate("e"), make_candidate("f", model="other")]

    with pytest.raises(UnavailableError):
        choose_executor(candidates, "m", excluded=["e"])


# -- conversations ---------------------------------------------------------------------------------


def make_caching(loads: list[int]) -> list[Candidate]:
    return [
        replace(make_candidate(f"e{k}", load), caches_prefixes=True) for k, load in enumerate(loads)
    ]


def homes(candidates: list[Candidate], num_conversations: int) -> list[str]:
    return [
        choose_executor(candidates, "m", turn=k, conversation=b"%d" % k).address
        for k in range(1, num_conversations + 1)
    ]


def test_a_conversation_has_one_home_for_all_gateways() -> None:
    candidates = make_caching([2, 1, 2])

    assert homes(candidates, 50) == homes(candidates[::-1], 50)
    assert set(homes(candidates, 50)) == {"e0", "e1", "e2"}


def test_only_the_conversations_of_an_executor_that_goes_move() -> None:
    before, after = homes(make_caching([0, 0, 0]), 60), homes(make_caching([0, 0]), 60)

    assert all(now == then for then, now in zip(before, after, strict=True) if then != "e2")
    assert {now for then, now in zip(before, after, strict=True) if then == "e2"} == {"e0", "e1"}


@pytest.mark.parametrize("num_conversations", [1, 7, 400], ids=["one", "few", "many"])
def test_no_home_becomes_a_hot_spot(num_conversations) -> None:
    loads = [0, 0, 0, 0]
    for number in range(400):
        conversation = b"%d" % (1 + number % num_conversations)
        chosen = choose_executor(make_caching(loads), "m", conversation=conversation)
        loads[int(chosen.address[1:])] += 1

        # ceil(1.25 x mean) of what is there, the newest included
        assert max(loads) <= -(-5 * sum(loads) // 16)


def test_a_turn_passes_over_a_full_home_and_the_next_comes_back() -> None:
    (home,) = homes(make_caching([0, 0, 0]), 1)
    loads = [0, 0, 0]
    loads[int(home[1:])] = 3

    # ceil(1.25 x 4 / 3) = 2 < 3 passes it over, ceil(1.25 x 8 / 3) = 4 > 3 does not.
    assert homes(make_caching(loads), 1) != [home]
    assert homes(make_caching([load or 2 for load in loads]), 1) == [home]


def test_executors_that_cache_nothing_are_chosen_by_load() -> None:
    candidates = [make_candidate("e0", 1), make_candidate("e1", 0)]

    assert set(homes(candidates, 20)) == {"e1"}
    assert set(homes([candidates[0], *make_caching([2, 2])[1:]], 20)) == {"e0"}


def test_requests_that_begin_nothing_are_spread_by_load() -> None:
    assert choose_executor(make_caching([1, 0]), "m").address == "e1"
