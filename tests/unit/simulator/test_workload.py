"""What arrives."""

import json
import random
import statistics
from itertools import islice

import pytest

from services.pacing.types import ServiceLevel
from services.placement.types import RequestId
from simulator.workload import (
    ArrivingRequest,
    Lengths,
    burst_gaps,
    constant_length,
    drawn_requests,
    gamma_gaps,
    published_lengths,
    read_jsonl,
    read_orbitflow,
    write_jsonl,
)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_their_mean_and_their_coefficient_of_variation(cv) -> None:
    gaps = list(islice(gamma_gaps(random.Random(0), rate_per_s=2.0, cv=cv), 40_000))

    assert statistics.fmean(gaps) == pytest.approx(0.5, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_bursts_come_at_once_and_keep_the_rate() -> None:
    assert list(islice(burst_gaps(rate_per_s=2.0, size=3), 6)) == [0, 0, 1.5, 0, 0, 1.5]


def test_lengths_have_their_mean_and_median() -> None:
    lengths, rng = Lengths(mean=1_852, median=821), random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(40_000)]

    assert statistics.fmean(drawn) == pytest.approx(1_852, rel=0.1)
    assert statistics.median(drawn) == pytest.approx(821, rel=0.05)


def test_lengths_stay_within_their_ends() -> None:
    prompts, outputs = published_lengths("orbitflow-b")
    rng = random.Random(0)

    assert max(prompts.draw(rng) for _ in range(5_000)) == 8_662
    assert min(outputs.draw(rng) for _ in range(5_000)) >= 1
    assert constant_length(77).draw(rng) == 77


def test_lengths_do_not_depend_on_how_requests_arrive() -> None:
    lengths = published_lengths("sharegpt")
    slow = drawn_requests(burst_gaps(rate_per_s=1, size=1), lengths, num_requests=9, seed=5)
    burst = drawn_requests(burst_gaps(rate_per_s=9, size=3), lengths, num_requests=9, seed=5)

    assert [r.num_prompt_tokens for r in slow] == [r.num_prompt_tokens for r in burst]
    assert [r.arrival_s for r in slow] != [r.arrival_s for r in burst]


def test_our_own_format_goes_out_and_in(tmp_path) -> None:
    requests = [
        ArrivingRequest(
            request_id=RequestId("x"),
            arrival_s=1.5,
            num_prompt_tokens=10,
            num_output_tokens=4,
            level=ServiceLevel(slo_tbt_s=0.1, pace_tail=True),
            priority=2,
        ),
        ArrivingRequest(
            request_id=RequestId("y"), arrival_s=2.0, num_prompt_tokens=1, num_output_tokens=1
        ),
    ]
    write_jsonl(requests, tmp_path / "trace.jsonl")

    assert read_jsonl(tmp_path / "trace.jsonl") == requests


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        '{"arrival_s": 0, "num_prompt_tokens": 3}',
        '{"arrival_s": 0, "num_prompt_tokens": 0, "num_output_tokens": 1}',
        '{"arrival_s": 0, "num_prompt_tokens": 3, "num_output_tokens": 1, "colour": "red"}',
    ],
)
def test_a_bad_line_is_named(tmp_path, line) -> None:
    good = '{"arrival_s": 0, "num_prompt_tokens": 3, "num_output_tokens": 1}\n'
    (tmp_path / "trace.jsonl").write_text(good + line)

    with pytest.raises(ValueError, match=r"trace\.jsonl:2"):
        read_jsonl(tmp_path / "trace.jsonl")


def test_orbitflows_arrivals_count_steps(tmp_path) -> None:
    rows = {
        "request_0": {"input_length": 20, "output_length": 5, "arrival_time": 61},
        "request_1": {"input_length": 30, "output_length": 6, "arrival_time": 0},
    }
    (tmp_path / "t.json").write_text(json.dumps({"requests": rows}))

    first, second = read_orbitflow(tmp_path / "t.json", step_s=0.5)

    assert (first.request_id, first.arrival_s, first.num_output_tokens) == ("request_1", 0.0, 6)
    assert (second.request_id, second.arrival_s) == ("request_0", 30.5)
