"""What the failover benchmarks make of what they read."""

import pytest

from bench.failover import deaths
from bench.failover.asked import Got
from bench.failover.caches import LookedUp, between, read

EXPOSITION = """\
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 900.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 640.0
# TYPE vllm:external_prefix_cache_queries counter
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 260.0
# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 100.0
# TYPE evenflow_executor_returned_tokens counter
evenflow_executor_returned_tokens_total{result="found"} 30.0
evenflow_executor_returned_tokens_total{result="computed"} 20.0
"""


def test_what_is_found_is_in_the_pool_or_elsewhere() -> None:
    assert read(EXPOSITION) == LookedUp(num_tokens=950, num_found=770)


def test_what_was_looked_up_before_a_fault_does_not_count() -> None:
    before = {1: LookedUp(500, 20), 2: LookedUp(300, 10)}
    # The first has taken the second's requests, which has been started again as the third.
    after = {1: LookedUp(900, 100), 3: LookedUp(40, 0)}

    assert between(before, after) == LookedUp(num_tokens=440, num_found=80)


@pytest.mark.parametrize(
    ("at_s", "gap_s"),
    [(0.0, 5.0), (5.5, 5.0), (6.0, 2.0), (6.1, 2.0), (8.0, 0.5), (9.0, 0.0)],
)
def test_a_gap_is_felt_of_a_fault_if_it_ended_after_it(at_s: float, gap_s: float) -> None:
    got = Got(arrived_s=[1.0, 6.0, 8.0, 8.5])

    assert got.longest_gap_since_s(at_s) == gap_s


@pytest.mark.parametrize(("num_found", "told"), [(740, "740 of 900"), (0, "0 of 900")])
def test_the_table_says_how_much_of_moved_requests_was_in_a_cache(num_found, told) -> None:
    row = {
        "executors": 1, "case": "link cut", "identical": 22, "asked": 22, "errors": [],
        "moved": 24, "noticed_s": 0.0, "gaps_s": [0.5], "felt_nothing": 22,
        "hidden_by_formula": 24, "moved_tokens": 900, "moved_found_tokens": num_found,
    }  # fmt: skip
    titles, line = deaths.table([row])

    assert dict(zip(titles, line, strict=True))["of moved tokens found in a cache"] == told
