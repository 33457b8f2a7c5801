"""Fairness ids with shares over a whole run: what each holds of the pool, and how long it waits."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.who_runs.fairness import Meter, WindowOver
from services.pacing.types import ServiceLevel
from services.placement.types import EngineShape, RequestId
from simulator.compose import make_engine
from simulator.device.costs import LinearCosts
from simulator.engine.engine import Engine, Machine
from simulator.engine.planning import PlanningOptions
from simulator.engine.simulation import simulate
from simulator.workload import ArrivingRequest

HALF_LIFE_S = 10.0
SHAPE = EngineShape(
    num_layers=4,
    layers_per_group=4,
    block_size=16,
    num_blocks=24,  # 384 tokens
    block_bytes=1_000,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    num_host_blocks=2_000,
)
MACHINE = Machine(costs=LinearCosts(layer_base_s=0.1 / 4, per_token_s=2.5e-4), link_bytes_per_s=1e9)


def begun(
    requests: list[ArrivingRequest], *, until_s: float = 1e9, fair: bool = True
) -> tuple[Engine, Counter[str]]:
    """Return an engine at an instant, and the token-seconds of KV that ids have held by then."""
    options = PlanningOptions(policy="evenflow", fairness_half_life_s=HALF_LIFE_S if fair else 0.0)
    engine = make_engine(SHAPE, MACHINE, options)
    meter = Meter(engine, until_s=until_s)
    with suppress(WindowOver):
        simulate(engine, requests, after_event=meter.after_event)
    return engine, meter.token_s


def sent(
    whose: str, *, gap_s: float, until_s: float, since_s: float = 0.0, prompt: int = 70
) -> list[ArrivingRequest]:
    """Return an id's requests, one each `gap_s`, of about `prompt` + 25 tokens."""
    return [
        ArrivingRequest(
            request_id=RequestId(f"{whose}{number}"),
            arrival_s=since_s + gap_s * number,
            num_prompt_tokens=prompt + 7 * (number % 5),
            num_output_tokens=20 + number % 7,
            fairness_id=whose,
        )
        for number in range(round((until_s - since_s) / gap_s))
    ]


def firsts_s(engine: Engine, whose: str) -> list[float]:
    """Return when requests of an id got their first tokens."""
    live = [(one.request_id, one.generated_s) for one in engine.scheduler.live]
    times = [*live, *((one.request_id, one.generated_s) for one in engine.outcomes)]
    return sorted(got[0] for name, got in times if name.startswith(whose) and got)


@pytest.mark.parametrize("prompt", [70, 140])
def test_of_two_ids_the_one_that_sends_ten_times_as_much_holds_no_more(prompt: int) -> None:
    """The other sends more than half of what the pool holds: both always wait."""
    requests = sent("less", gap_s=1.4, until_s=40.0, prompt=prompt)
    requests += sent("more", gap_s=0.14, until_s=40.0, prompt=prompt)
    fair = begun(requests, until_s=40.0)[1]

    assert fair["more"] == pytest.approx(fair.total() / 2, rel=0.1)


def test_without_shares_it_holds_more() -> None:
    requests = sent("less", gap_s=1.4, until_s=20.0) + sent("more", gap_s=0.14, until_s=20.0)
    unfair = begun(requests, until_s=20.0, fair=False)[1]

    assert unfair["more"] > 0.8 * unfair.total()


def test_what_an_id_leaves_others_have() -> None:
    requests = sent("less", gap_s=5.0, until_s=25.0) + sent("more", gap_s=0.2, until_s=25.0)
    engine, fair = begun(requests, until_s=25.0)
    waits_s = [at - 5.0 * n for n, at in enumerate(firsts_s(engine, "less"))]

    assert fair["more"] > 0.7 * fair.total()
    assert len(waits_s) == 5
    assert max(waits_s) < 5.0


@pytest.mark.parametrize("seed", range(2))
def test_a_lone_id_is_served_as_if_there_were_no_shares(seed: int) -> None:
    requests = sent("lone", gap_s=0.3, until_s=6.0)
    levels = (ServiceLevel(), ServiceLevel(slo_ttft_s=3.0, consumption_rate_tps=4.0))
    mixed = [replace(r, level=levels[(n + seed) % 2]) for n, r in enumerate(requests)]
    fair, unfair = (begun(mixed, fair=on)[0] for on in (True, False))

    assert fair.outcomes == unfair.outcomes
    assert len(fair.outcomes) == len(requests)


def test_no_id_waits_for_ever_for_those_that_are_always_new() -> None:
    """Each further request is of an id of its own, which has attained nothing, and more come than
    the pool holds.
    """
    old = sent("old", gap_s=0.1, until_s=0.8)
    new = sent("new", gap_s=0.7, since_s=0.8, until_s=45.0)
    requests = old + [replace(one, fairness_id=one.request_id) for one in new]
    engine, _ = begun(requests, until_s=45.0)
    in_turn_s = firsts_s(engine, "old")

    assert engine.scheduler.waiting
    assert in_turn_s[-1] > 20.0
    assert all(b - a < HALF_LIFE_S + 10.0 for a, b in pairwise([*in_turn_s, 45.0]))


@pytest.mark.parametrize("away_s", [15.0, 30.0])
def test_an_id_that_comes_back_has_half_however_long_it_was_away(away_s: float) -> None:
    """It catches up on what the other attained of late, not on all that it left."""
    end_s = away_s + 30.0
    requests = sent("stays", gap_s=0.7, until_s=end_s)
    requests += sent("back", gap_s=0.4, since_s=away_s, until_s=end_s)
    before, all_in_all = (begun(requests, until_s=at_s)[1] for at_s in (away_s, end_s))
    since = all_in_all - before

    assert before["back"] == 0.0
    assert 0.3 < since["stays"] / since.total() < 0.5
