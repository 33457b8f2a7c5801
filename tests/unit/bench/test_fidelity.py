"""Real runs beside simulated ones: what is read off a run, and how errors are counted."""

import random
from dataclasses import replace

import pytest

from bench.e2e.records import RequestRecord, RunKey, RunRecord
from bench.e2e.systems import Device
from bench.fidelity.__main__ import calibrate, compare, table
from bench.fidelity.comparison import errors, missed
from bench.fidelity.copying import with_copies
from bench.fidelity.machine import Calibration, calibrated
from bench.fidelity.replayed import options_of, replayed
from bench.fidelity.steps import decode_steps
from simulator.device.step import CopyCosts


def make_request(name: str, *generated_s: float, at: float = 0.0, **overrides) -> RequestRecord:
    given = {"num_prompt_tokens": 100, "generated_s": generated_s}
    return RequestRecord(request_id=name, submitted_s=at, **(given | overrides))


def make_run(*requests: RequestRecord, system: str = "vllm", slo_s: float = 1.0) -> RunRecord:
    key = RunKey(system=system, seed=1, slo_scale=1.5)
    return RunRecord(key=key, slo_s=slo_s, requests=requests, samples=())


def resident_run(num_requests: int, *, num_tokens: int = 40) -> RunRecord:
    """Return what is asked of an engine; the instants are placeholders of the right number.

    A request has `num_tokens` at most, half as many at least.
    """
    rng, at = random.Random(3), 0.0
    requests = []
    for number in range(num_requests):
        at += rng.uniform(0.5, 2.0)
        placeholders = tuple(at + 1.0 + k for k in range(rng.randint(num_tokens // 2, num_tokens)))
        prompt = rng.randint(100, 1_200)
        requests.append(make_request(f"r{number}", *placeholders, at=at, num_prompt_tokens=prompt))
    return make_run(*requests, slo_s=0.04)


def test_a_step_is_what_lies_between_two_frames_of_the_same_requests() -> None:
    # Frames at 1 (a), 2 (a, b's first), 3 (a, b), 5 (a, b), 6 (a): b came at 1.5.
    run = make_run(
        make_request("a", 1.0, 2.0, 3.0, 5.0, 6.0),
        make_request("b", 2.0005, 3.0005, 5.0005, at=1.5, num_prompt_tokens=10),
    )
    found = list(decode_steps(run))

    assert [round(step.seconds, 3) for step in found] == [1.0, 2.0]
    # At 3: a has read 100 + 2, b 10 + 1.
    assert [(step.num_requests, step.num_context_tokens) for step in found] == [(2, 113), (2, 115)]


def test_steps_in_which_a_prompt_was_computed_do_not_count() -> None:
    run = make_run(make_request("a", 1.0, 2.0, 3.0, 4.0), make_request("b", 3.5, 9.0, at=1.2))

    assert list(decode_steps(run)) == []


def test_calibration_finds_what_a_machine_takes_beside_its_layers() -> None:
    device, asked = Device(), resident_run(12)
    true = Calibration(outside_s=0.007, noise_frac=0.02, num_steps=0, prompt_token_s=2e-5)
    run = replayed(asked, device, true)
    found = calibrated(device, [run])

    assert found.outside_s == pytest.approx(true.outside_s, rel=0.05)
    assert found.prompt_token_s == pytest.approx(true.prompt_token_s, rel=0.3)
    assert found.noise_frac == pytest.approx(true.noise_frac, rel=0.5)


def test_calibration_finds_what_copies_cost_though_a_run_was_disturbed() -> None:
    device = Device()
    true = Calibration(
        outside_s=0.007, noise_frac=0.0, num_steps=0, copies=CopyCosts(submit_s=0.3e-3)
    )
    asked = [
        make_run(*resident_run(2, num_tokens=8).requests, system=system, slo_s=0.04)
        for system in ("deepspeed", "flexgen", "slo-aware")
    ]
    runs = [replayed(run, device, true) for run in asked]
    runs[-1] = slower(runs[-1], 1.2)
    found = with_copies(replace(true, copies=CopyCosts()), device, runs).copies

    assert found.submit_s == pytest.approx(true.copies.submit_s, rel=0.1)


def slower(run: RunRecord, factor: float) -> RunRecord:
    """Return the run with all gaps between tokens so much longer."""
    requests = []
    for request in run.requests:
        first_s = request.generated_s[0]
        generated_s = tuple(first_s + factor * (one_s - first_s) for one_s in request.generated_s)
        requests.append(replace(request, generated_s=generated_s))
    return replace(run, requests=tuple(requests))


def test_a_run_of_the_simulator_itself_has_no_errors() -> None:
    device = Device()
    true = Calibration(outside_s=0.007, noise_frac=0.0, num_steps=0)
    asked = resident_run(6, num_tokens=12)
    asked = make_run(*asked.requests, system="dynamic-heuristic", slo_s=0.04)
    row = compare(replayed(asked, device, true), device, true)
    held_out = row | {"held_out": True, "seed": 2}

    assert not row["held_out"]
    assert not row["misses"]
    assert max(abs(error) for error in row["errors"].values()) < 1e-9
    *_, last = table([row, held_out])
    assert last[0].startswith("median of 1 held out")
    assert last[-1] == "1 within all bars"


def test_errors_are_relative_for_times_and_differences_for_shares() -> None:
    # Gaps 1, 1 and then 1.1, 1.1; first tokens after 2 and 2.5; S = 1.05 is met
    # before only.
    real = make_run(make_request("a", 2.0, 3.0, 4.0), slo_s=1.05)
    own = make_run(make_request("a", 2.5, 3.6, 4.7), slo_s=1.05)
    found = errors(real, [own])

    assert found["step"] == pytest.approx(0.1)
    assert found["mean_step"] == pytest.approx(0.1)
    assert found["request_tpot"] == pytest.approx(0.1)
    assert found["ttft"] == pytest.approx(0.25)
    assert found["tpot"] == -1.0
    assert missed(found) == ["step", "ttft", "tbt", "tbt_deposit", "tpot"]


def test_several_simulations_of_a_run_count_together() -> None:
    real = make_run(make_request("a", 2.0, 3.0, 4.0), slo_s=1.05)
    slow = make_run(make_request("a", 2.5, 3.6, 4.7), slo_s=1.05)
    found = errors(real, [slow, real])

    assert found["mean_step"] == pytest.approx(0.05)
    assert found["request_tpot"] == pytest.approx(0.05)
    assert found["ttft"] == pytest.approx(0.125)
    assert found["tpot"] == -0.5


def test_without_a_resident_run_nothing_is_calibrated() -> None:
    run = make_run(make_request("a", 1.0, 2.0), system="orbitflow")

    with pytest.raises(ValueError, match="no decode steps"):
        calibrate([run], Device())


def test_a_systems_own_settings_reach_the_policy() -> None:
    assert options_of("orbitflow-strict").parameters.alpha == 0.0
    assert options_of("orbitflow-strict").policy == "orbitflow"
    assert options_of("vllm").policy == "vllm"
