"""Readers at reading speed, and what load 1 is."""

from itertools import repeat
from statistics import fmean

import pytest

from bench.who_runs.__main__ import run, table
from bench.who_runs.capacity import Capacity, first_tokens
from bench.who_runs.cases import Case, deployed
from bench.who_runs.reading import Place, figures_by_kind, places, regimes, with_agents
from services.pacing.types import NO_SERVICE_LEVEL
from services.placement.types import EngineShape, RequestId
from simulator.device.costs import LinearCosts
from simulator.engine.records import Outcome
from simulator.workload import ArrivingRequest

# A step takes 1 s, and 0.5 s per token of it; two requests of 2 + 2 tokens fill the pool.
SLOW = Capacity(
    shape=EngineShape(
        num_layers=1,
        layers_per_group=1,
        block_size=1,
        num_blocks=6,
        block_bytes=1,
        max_num_seqs=8,
        max_num_batched_tokens=2,
    ),
    costs=LinearCosts(layer_base_s=1.0, per_token_s=0.5),
    num_prompt_tokens=2,
    num_output_tokens=2,
)
SMALL = Place(
    deployment=deployed("llama-3-8b", "a5000", pool_tokens=6_000),
    num_prompt_tokens=500,
    num_output_tokens=100,
)


def asked(number: int) -> ArrivingRequest:
    return ArrivingRequest(
        request_id=RequestId(f"r{number}"),
        arrival_s=0.0,
        num_prompt_tokens=2,
        num_output_tokens=2,
    )


def test_load_1_is_a_prompt_alone_and_each_token_in_a_full_batch() -> None:
    # 6 tokens hold two of 2 + 2 / 2; their step takes 1 + 2 x 0.5 s, 1 s of it for each.
    assert (SLOW.num_held, SLOW.token_s) == (2.0, 1.0)
    # A prompt of 5 tokens: steps of 2, 2 and 1 token.
    assert SLOW.prompt_s(5) == 2.0 + 2.0 + 1.5
    assert 1.0 / SLOW.requests_per_s == 2.0 + 2 * 1.0


def test_readers_of_a_fluid_slow_the_next_prompts_down_until_they_have_read() -> None:
    # The first prompt takes 2 s. Then its reader takes 0.5 tokens/s, half of the engine, for 4 s:
    # in that time the second prompt, of 2 s, is computed. Then the second's reader takes half.
    found = first_tokens(SLOW, [asked(0), asked(1), asked(2)], rate_tps=0.5)

    assert found["ttft_s"] == fmean([2.0, 6.0, 10.0])
    assert (found["ttft_p50_s"], found["ttft_p99_s"]) == (6.0, 10.0)


def test_a_fluid_whose_readers_take_everything_begins_no_prompt() -> None:
    # The first reader takes 1 token/s, all of the engine, from 2 s to 4 s.
    found = first_tokens(SLOW, [asked(0), asked(1)], rate_tps=1.0)

    assert found["ttft_p99_s"] == 6.0


@pytest.mark.parametrize(("load", "is_endless"), [(0.9, False), (1.2, True)])
def test_the_queue_under_vllm_grows_above_load_1_and_not_below(
    load: float, is_endless: bool
) -> None:
    gap_s = 1.0 / (load * SMALL.capacity().requests_per_s)
    requests = SMALL.drawn(repeat(gap_s), 1, 90, NO_SERVICE_LEVEL)
    on = SMALL.deployment
    record, _ = run(Case(shape=on.shape(), machine=on.machine(), requests=requests), "vllm")

    waited = {one.request_id: one.generated_s[0] - one.arrival_s for one in record.outcomes}
    thirds = [[waited[one.request_id] for one in requests[at : at + 30]] for at in (0, 30, 60)]
    early_s, late_s = fmean(thirds[1]), fmean(thirds[2])

    assert (late_s - early_s > gap_s) == is_endless


def test_every_regime_has_the_requests_it_names() -> None:
    made = {name: regime(1) for name, regime in regimes().items()}

    assert len(made) == 4 * (4 * 6 + 2 * 6 * 2 + 2) + 2 * 3
    for name, case in made.items():
        rates = {one.level.consumption_rate_tps for one in case.requests}
        if "people" in name:
            assert rates == {6.0, None}
            continue
        assert rates == {float(name.rsplit(", ", 1)[1].removesuffix("/s"))}
        leaving = [one for one in case.requests if one.leaves_after]
        assert bool(leaving) == ("half leaving" in name)
        is_burst = "burst" in name
        assert bool(case.fluid) == is_burst
        assert (case.requests[-1].arrival_s < 1.0) == is_burst


@pytest.mark.parametrize("name", places())
def test_a_small_host_has_a_quarter_of_what_a_burst_takes(name: str) -> None:
    found = regimes()
    burst = found[f"reading: {name}, burst x4, 5/s"](1)
    small = found[f"reading: {name}, small host, burst x4, 5/s"](1)

    assert small.requests == burst.requests
    assert small.shape.num_host_blocks == burst.shape.num_blocks


def test_people_and_agents_are_counted_each_for_themselves() -> None:
    mixed = with_agents(SMALL.at_load(1.0, NO_SERVICE_LEVEL))(1)
    stated = {bool(one.level.slo_ttft_s): one.level for one in mixed.requests}
    outcomes = [
        Outcome(
            request_id=RequestId(f"r{number}"),
            arrival_s=1.0,
            num_prompt_tokens=1,
            num_output_tokens=2,
            level=stated[is_person],
            generated_s=(1.0 + ttft_s, 1.0 + ttft_s + 4.0),
        )
        for number, (is_person, ttft_s) in enumerate([(True, 1.0), (True, 3.0), (False, 8.0)])
    ]

    found = figures_by_kind(outcomes)

    assert (found["people_ttft_s"], found["people_within_slo"]) == (2.0, 0.5)
    assert (found["agents_ttft_s"], found["agents_e2e_s"]) == (8.0, 12.0)
    assert figures_by_kind(outcomes[:2]) == {}


def test_a_column_that_some_rows_have_is_a_dash_in_the_others() -> None:
    plain = dict.fromkeys(
        ("lambda", "tokens_per_s", "effective_tokens_per_s", "qos", "cached", "parks", "rejected"),
        0.5,
    ) | {f"ttft{part}_s": 1.0 for part in ("", "_p50", "_p95", "_p99")}
    fluid = {f"fluid_ttft{part}_s": 2.0 for part in ("", "_p50", "_p95", "_p99")}
    plain |= {"regime": "a", "policy": "p"}

    header, first, second = table([plain, plain | fluid])

    at = header.index("fluid TTFT mean / P50 / P95 / P99")
    assert (first[at], second[at]) == ("-", "2.00 / 2.00 / 2.0 / 2.0")
