"""Which executor takes a request."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from services.gateway.errors import UnknownModelError
from services.gateway.executors.routing import (
    Candidate,
    Wanted,
    choose_executor,
    expected_wait_s,
    spare_deposit_s,
)
from services.kit.errors import UnavailableError
from services.reporting.load import ExecutorLoad

M = Wanted(model="m")


def make_candidate(address: str, num_inflight: int = 0, model: str = "m") -> Candidate:
    return Candidate(
        address=address, models=frozenset({model}), num_inflight=num_inflight, max_model_len=1
    )


def make_loaded(address: str = "e", num_unreported_tokens: int = 0, **load: float) -> Candidate:
    told = ExecutorLoad(**{"prefill_tps": 100.0} | load)
    return replace(make_candidate(address), load=told, num_unreported_tokens=num_unreported_tokens)


def choose(candidates: list[Candidate], wanted: Wanted = M, seed: int = 0) -> str:
    return choose_executor(candidates, wanted, random.Random(seed)).address


def chosen(candidates: list[Candidate], wanted: Wanted = M, num_times: int = 60) -> Counter[str]:
    return Counter(choose(candidates, wanted, seed) for seed in range(num_times))


# -- which ones may ------------------------------------------------------------------------------


def test_only_executors_of_the_model_count() -> None:
    candidates = [make_candidate("idle", 0, "other"), make_candidate("busy", 9)]

    assert choose(candidates) == "busy"


def test_a_model_that_no_connected_executor_serves_is_unknown() -> None:
    with pytest.raises(UnknownModelError):
        choose([make_candidate("e", model="other")])


def test_without_any_executor_no_model_is_unknown() -> None:
    with pytest.raises(UnavailableError):
        choose([])


def test_when_all_that_serve_it_are_excluded_it_is_unavailable() -> None:
    candidates = [make_candidate("e"), make_candidate("f", model="other")]

    with pytest.raises(UnavailableError):
        choose(candidates, replace(M, excluded=["e"]))


def test_a_context_that_is_too_short_is_passed_over_and_the_longest_never_is() -> None:
    short, middle, long = (
        replace(make_candidate(f"e{length}", length // 9), max_model_len=length)
        for length in (9, 90, 900)
    )

    assert choose([short, middle, long], replace(M, fits=lambda length: length > 10)) == "e90"
    assert choose([short, middle, long], replace(M, fits=lambda length: False)) == "e900"
    with pytest.raises(UnavailableError):
        choose([short, long], replace(M, fits=lambda length: length > 10, excluded=["e900"]))


# -- how long it waits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "wait_s"),
    [
        pytest.param(make_loaded(num_newcomer_tokens=300), 3.0, id="those-before-it"),
        pytest.param(make_loaded("e", 50, num_newcomer_tokens=300), 3.5, id="and-own-ones-since"),
        pytest.param(make_loaded(prefill_tps=0, num_newcomer_tokens=300), 0.15, id="not-measured"),
        pytest.param(make_candidate("e", 4), 1.0, id="no-report-own-requests-stand-in"),
    ],
)
def test_a_newcomer_waits_for_those_before_it(candidate, wait_s) -> None:
    assert expected_wait_s(candidate) == pytest.approx(wait_s)


def test_the_least_wait_decides() -> None:
    candidates = [
        make_loaded("slow", prefill_tps=50, num_newcomer_tokens=100),  # 2 s
        make_loaded("fast", prefill_tps=400, num_newcomer_tokens=400),  # 1 s
        make_candidate("silent", 5),  # 1.25 s
    ]

    assert chosen(candidates) == {"fast": 60}


def test_of_equal_waits_what_a_prompt_takes_decides_and_then_the_pool() -> None:
    fast, slow = make_loaded("fast", prefill_tps=400), make_loaded("slow", prefill_tps=200)
    full, empty = (make_loaded(f"{share}", kv_unavailable_frac=share) for share in (0.9, 0.1))

    assert chosen([slow, fast], replace(M, num_prompt_tokens=100)) == {"fast": 60}
    assert chosen([full, empty]) == {"0.1": 60}


def test_a_rate_that_short_prompts_measured_keeps_no_long_one_away() -> None:
    idle = make_loaded("idle", prefill_tps=100)  # 100 s for what is wanted, as it seems
    busy = make_loaded("busy", prefill_tps=10_000, num_newcomer_tokens=15_000)

    assert chosen([busy, idle], replace(M, num_prompt_tokens=10_000)) == {"idle": 60}


def test_equals_come_by_turns() -> None:
    candidates = [make_candidate(f"e{k}", load) for k, load in enumerate([1, 2, 1, 1])]
    chosen = [choose(candidates, replace(M, turn=turn)) for turn in range(4)]

    assert chosen == ["e0", "e2", "e2", "e3"]


def test_four_of_many_are_looked_at_but_all_for_an_slo() -> None:
    many = [make_loaded(f"{k}", num_newcomer_tokens=1_000 * k) for k in range(20)]
    urgent = replace(M, slo_ttft_s=1.0)

    shares = chosen(many, num_times=200)
    assert 20 < shares["0"] < 80  # 4 of 20 are 40 of 200
    assert max(map(int, shares)) < 17  # the worst three are never the best of four
    assert chosen(many, urgent) == {"0": 60}


# -- paced readers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "spare_s"),
    [
        pytest.param({"deposit_s": 3.0, "reading_load_frac": 1.0}, 3.0, id="all-is-read"),
        pytest.param({"deposit_s": 3.0, "reading_load_frac": 0.5}, 13.0, id="half-is-read"),
        pytest.param({}, float("inf"), id="no-readers"),
    ],
)
def test_what_is_not_read_is_deposited(load, spare_s) -> None:
    assert spare_deposit_s(make_loaded(**load)) == spare_s


def test_a_paced_reader_goes_where_most_is_to_spare_of_those_near_to_the_least_wait() -> None:
    candidates = [
        make_loaded("poor", deposit_s=1.0, reading_load_frac=1.0),
        make_loaded("rich", deposit_s=9.0, reading_load_frac=1.0, num_newcomer_tokens=100),
        make_loaded("late", num_newcomer_tokens=101),
    ]

    assert chosen(candidates, replace(M, is_paced=True)) == {"rich": 60}
    assert chosen(candidates, replace(M, is_paced=True, slo_ttft_s=1.0)) == {"poor": 60}


# -- conversations -------------------------------------------------------------------------------


def make_caching(loads: list[int]) -> list[Candidate]:
    return [
        replace(make_candidate(f"e{k}", load), caches_prefixes=True) for k, load in enumerate(loads)
    ]


def homes(candidates: list[Candidate], num_conversations: int) -> list[str]:
    return [
        choose(candidates, replace(M, conversation=b"%d" % k), seed=k)
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


@pytest.mark.parametrize(("num_ahead", "stays"), [(4, True), (5, False)])
def test_a_turn_comes_home_for_a_second_and_no_longer(num_ahead, stays) -> None:
    (home,) = homes(make_caching([0, 0, 0]), 1)
    loads = [0, 0, 0]
    loads[int(home[1:])] = num_ahead  # a quarter of a second each

    assert (homes(make_caching(loads), 1) == [home]) is stays


@pytest.mark.parametrize(("slo_ttft_s", "stays"), [(1.5, True), (1.4, False), (60.0, True)])
def test_a_home_costs_half_of_an_slo_at_most(slo_ttft_s, stays) -> None:
    (home,) = homes(make_caching([0, 0, 0]), 1)
    loads = [0, 0, 0]
    loads[int(home[1:])] = 3  # 0.75 s
    wanted = replace(M, conversation=b"1", slo_ttft_s=slo_ttft_s)

    assert (choose(make_caching(loads), wanted) == home) is stays


def test_no_home_becomes_a_hot_spot() -> None:
    loads = [0, 0, 0, 0]
    for seed in range(400):
        chosen = choose(make_caching(loads), replace(M, conversation=b"1"), seed)
        loads[int(chosen[1:])] += 1

    assert max(loads) - min(loads) <= 5  # 1 s of a quarter each, and the newest


def test_executors_that_cache_nothing_are_chosen_by_load() -> None:
    candidates = [make_candidate("e0", 1), make_candidate("e1", 0)]

    assert set(homes(candidates, 20)) == {"e1"}
    assert set(homes([candidates[0], *make_caching([2, 2])[1:]], 20)) == {"e0"}
