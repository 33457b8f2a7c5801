"""Readers at reading speed on the emulated device: what is asked, and how runs are counted."""

from dataclasses import replace
from statistics import fmean

import pytest

from bench.e2e.reading.figures import (
    Run,
    RunKey,
    load,
    num_others,
    rows_of,
    save,
    table,
    verdicts,
)
from bench.e2e.reading.rows import (
    MEAN_ANSWER_TOKENS,
    MEAN_PROMPT_TOKENS,
    NUM_REQUESTS,
    Place,
    Row,
)
from bench.e2e.records import RequestRecord
from bench.e2e.systems import SYSTEMS, is_resident
from bench.fidelity.machine import Calibration, machine_of, shape_of
from bench.fidelity.replayed import options_of
from bench.who_runs.__main__ import run as simulated
from bench.who_runs.cases import Case
from services.pacing.types import NO_SERVICE_LEVEL, ServiceLevel
from services.placement.types import RequestId
from simulator.report.figures import figures
from simulator.workload import ArrivingRequest

PLACE = Place(outside_s=5e-3)
READS = ServiceLevel(consumption_rate_tps=1.0)


def make_request(name: str, *generated_s: float, **overrides: object) -> RequestRecord:
    given: dict[str, object] = {
        "submitted_s": 0.0,
        "num_prompt_tokens": 7,
        "num_output_tokens": len(generated_s),
        "token_ids": tuple(range(len(generated_s))),
        "level": READS,
    }
    return RequestRecord(request_id=name, generated_s=generated_s, **given | overrides)  # type: ignore[arg-type]


def make_run(
    *requests: RequestRecord, system: str = "vllm", link_frac: float = 0.0, **key: object
) -> Run:
    given = {"row": Row.BURST, "seed": 1} | key
    return Run(
        key=RunKey(system=system, link_frac=link_frac, **given),  # type: ignore[arg-type]
        requests=requests,
        sums={"kv_num_parks": 3.0},
    )


def test_a_full_pool_is_ten_requests_whose_readers_need_a_fifth_of_its_steps() -> None:
    assert int(PLACE.capacity.num_held) == 10
    assert PLACE.rate_tps * PLACE.step_s == pytest.approx(0.2)
    # 10 requests of 675 tokens: 8 layers of 2.5 + 10 x 0.01 + 6,752 x 0.0002 ms, and 5 ms.
    assert PLACE.step_s == pytest.approx(8 * (2.5e-3 + 1e-4 + 1.35e-3) + 5e-3, rel=0.01)


@pytest.mark.parametrize("link_frac", [0.03, 0.16])
def test_a_link_moves_its_share_of_the_pool_in_a_step(link_frac: float) -> None:
    device = PLACE.device(link_frac)

    assert device.link_bytes_per_s * PLACE.step_s / device.pool_bytes == pytest.approx(link_frac)
    assert replace(device, link_bytes_per_s=PLACE.room.link_bytes_per_s) == PLACE.room


def test_requests_of_a_seed_have_the_same_lengths_however_they_arrive() -> None:
    def lengths(row: Row, seed: int) -> list[tuple[int, int]]:
        trace = PLACE.trace(row, seed)
        return [(one.num_prompt_tokens, one.num_output_tokens) for one in trace]

    steady, burst, mixed = (lengths(row, 1) for row in Row)

    assert steady == mixed
    assert steady[: len(burst)] == burst
    assert steady != lengths(Row.STEADY, 2)
    assert PLACE.trace(Row.STEADY, 1) == PLACE.trace(Row.STEADY, 1)
    many = [one for seed in range(20) for one in lengths(Row.STEADY, seed)]
    assert fmean(prompt for prompt, _ in many) == pytest.approx(MEAN_PROMPT_TOKENS, rel=0.05)
    assert fmean(answer for _, answer in many) == pytest.approx(MEAN_ANSWER_TOKENS, rel=0.05)


def test_a_burst_fills_three_pools_at_once() -> None:
    trace = PLACE.trace(Row.BURST, 1)

    assert len(trace) == 30
    assert trace[-1].arrival_s < PLACE.step_s
    assert {one.level.consumption_rate_tps for one in trace} == {PLACE.rate_tps}


@pytest.mark.parametrize(("row", "load"), [(Row.STEADY, 1.0), (Row.MIXED, 0.9)])
def test_arrivals_come_at_their_load(row: Row, load: float) -> None:
    ends_s = [PLACE.trace(row, seed)[-1].arrival_s for seed in range(100)]

    rate = (NUM_REQUESTS - 1) / fmean(ends_s)
    assert rate / PLACE.capacity.requests_per_s == pytest.approx(load, rel=0.05)


def test_people_state_a_rate_and_a_ttft_slo_and_agents_nothing() -> None:
    levels = [one.level for seed in range(10) for one in PLACE.trace(Row.MIXED, seed)]
    people = ServiceLevel(
        consumption_rate_tps=PLACE.rate_tps, slo_ttft_s=pytest.approx(12 / PLACE.rate_tps)
    )

    assert all(level in (people, NO_SERVICE_LEVEL) for level in levels)
    assert levels.count(NO_SERVICE_LEVEL) == pytest.approx(len(levels) / 2, rel=0.1)


def test_readers_take_turns_on_the_device() -> None:
    """Its pool is no small one: `evenflow` parks, and first tokens come much sooner."""
    device = PLACE.device(0.16)
    case = Case(
        shape=shape_of(device, offloads=True),
        machine=machine_of(device, Calibration(outside_s=5e-3, noise_frac=0.0, num_steps=0)),
        requests=[
            ArrivingRequest(
                request_id=RequestId(one.request_id),
                arrival_s=one.arrival_s,
                num_prompt_tokens=one.num_prompt_tokens,
                num_output_tokens=one.num_output_tokens,
                level=one.level,
            )
            for one in PLACE.trace(Row.BURST, 1)
        ],
    )

    (ours, engine), (theirs, _) = (simulated(case, policy) for policy in ("evenflow", "vllm"))

    assert engine.scheduler.counters.num_parks > 0
    assert figures(ours)["ttft_s"] < 0.5 * figures(theirs)["ttft_s"]


def test_vllm_stands_beside_every_link_and_the_others_beside_their_own() -> None:
    runs = [
        make_run(make_request("a", 2.0, 3.0)),
        make_run(make_request("a", 4.0, 5.0), seed=2),
        make_run(make_request("a", 1.0, 3.0), system="evenflow", link_frac=0.03),
        make_run(make_request("a", 0.5, 3.0), system="evenflow", link_frac=0.16),
        make_run(make_request("a", 9.0, 9.5), row=Row.STEADY),
    ]

    rows = {(row["regime"], row["lambda"], row["policy"]): row for row in rows_of(runs)}

    assert {key: (row["ttft_s"], row["parks"]) for key, row in rows.items()} == {
        ("burst", 0.03, "vllm"): (3.0, 0.0),
        ("burst", 0.03, "evenflow"): (1.0, 3.0),
        ("burst", 0.16, "vllm"): (3.0, 0.0),
        ("burst", 0.16, "evenflow"): (0.5, 3.0),
    }
    # Two tokens in 3 and 5 s are a mean of 0.53 per second, two in 3 s 0.67.
    first, second = verdicts(list(rows.values()))
    assert first.startswith("lambda 3%, burst: 1.250 x the tokens/s of vllm, 0.333 x its TTFT")
    assert second.startswith("lambda 16%, burst: 1.250 x the tokens/s of vllm, 0.167 x its TTFT")


def test_tokens_unlike_stock_vllms_and_failures_are_counted() -> None:
    failed = make_request("c", 9.0, failure="1 tokens short")
    stock = make_run(make_request("a", 1.0, 2.0), make_request("b", 1.0, 2.0), failed)
    ours = make_run(
        make_request("a", 1.0, 2.0),
        make_request("b", 1.0, 2.0, token_ids=(0, 9)),
        make_request("c", 1.0),  # vLLM's own failed: there is nothing to compare with
        failed,
        system="evenflow",
        link_frac=0.03,
    )
    of_other_seed = replace(stock, key=replace(stock.key, seed=2))

    assert num_others(ours, [stock, ours]) == 1
    assert num_others(ours, [of_other_seed, ours]) == 0
    rows = rows_of([stock, ours])
    assert [(row["policy"], row["other_tokens"], row["failed"]) for row in rows] == [
        ("vllm", 0, 1),
        ("evenflow", 1, 1),
    ]
    assert rows[0]["requests"] == 2
    header, *lines = table(rows)
    assert header[-2:] == ["other tokens", "failed"]
    assert [line[-2:] for line in lines] == [["0", "1"], ["1", "1"]]


def test_people_and_agents_are_counted_apart() -> None:
    people = make_request("p", 1.0, 2.0, level=replace(READS, slo_ttft_s=1.5))
    agent = make_request("a", 3.0, 7.0, level=NO_SERVICE_LEVEL)
    run = make_run(people, agent, row=Row.MIXED, system="evenflow", link_frac=0.03)

    (row,) = rows_of([run])

    assert (row["people_ttft_s"], row["people_within_slo"]) == (1.0, 1.0)
    assert (row["agents_ttft_s"], row["agents_e2e_s"]) == (3.0, 7.0)


def test_a_run_survives_its_file(tmp_path) -> None:
    run = make_run(make_request("a", 0.0, 1.0), system="evenflow", link_frac=0.03)
    save(run, tmp_path / f"{run.key.name}.json")

    assert run.key.name == "burst-evenflow-3%-s1"
    assert load(tmp_path / "burst-evenflow-3%-s1.json") == run


def test_vllm_at_a_watermark_is_vllm_otherwise() -> None:
    assert SYSTEMS["vllm@0.05"] == {
        **SYSTEMS["vllm"],
        "ENGINE_ARGS": '["--watermark", "0.05"]',
    }
    assert options_of("vllm@0.05").vllm.watermark == 0.05
    assert options_of("vllm").vllm.watermark == 0.0
    resident = [system for system in SYSTEMS if is_resident(system)]
    assert resident == ["vllm", "vllm@0.02", "vllm@0.05"]
