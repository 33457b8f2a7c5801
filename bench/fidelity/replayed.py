"""A finished run of `bench.e2e`, again, in the simulator."""

from collections.abc import Sequence
from dataclasses import replace

from bench.e2e.records import RequestRecord, RunRecord, Sample
from bench.e2e.systems import SYSTEMS, Device, is_resident
from bench.e2e.trace import NUM_WARM_UP_REQUESTS, warm_up
from bench.fidelity.machine import Calibration, machine_of, shape_of
from services.gateway.executors.outbox import DELIVERED_INTERVAL_S
from services.pacing.types import ServiceLevel
from services.placement.types import PolicyParameters, RequestId
from simulator.compose import make_engine
from simulator.engine.planning import PlanningOptions
from simulator.engine.records import RunRecord as SimulatedRecord
from simulator.engine.residency import ResidencySample
from simulator.engine.simulation import simulate
from simulator.engine.vllm import VllmOptions
from simulator.workload import ArrivingRequest

RESIDENT_SYSTEM = "vllm"
WARM_UP_S = 60.0  # before the run's clock starts: enough for the warm-up to end


def replayed(
    run: RunRecord, device: Device, calibration: Calibration, *, seed: int = 0
) -> RunRecord:
    """Return the same requests under the same policy, simulated; instants are the stream's.

    Answers have the lengths that they had; requests that failed in the run are left out. `sums` are
    of the simulation, its warm-up included.
    """
    record = simulated(run, device, calibration, seed=seed)
    found = {
        str(outcome.request_id): tuple(t - WARM_UP_S for t in outcome.generated_s)
        for outcome in record.outcomes
    }
    requests = tuple(replace(r, generated_s=found[r.request_id]) for r in complete(run).requests)
    sums = {"num_pauses": float(sum(outcome.num_pauses for outcome in record.outcomes))}
    return replace(run, requests=requests, samples=_samples(record.samples), sums=sums)


def simulated(
    run: RunRecord, device: Device, calibration: Calibration, *, seed: int = 0
) -> SimulatedRecord:
    """Return the simulation of a run, its warm-up before it."""
    shape = shape_of(device, offloads=not is_resident(run.key.system))
    engine = make_engine(
        shape, machine_of(device, calibration), options_of(run.key.system), seed=seed
    )
    level = ServiceLevel(slo_tbt_s=run.slo_s, slo_tpot_s=run.slo_s)
    arriving = [*warm_up_of(level), *(arriving_of(r, level) for r in complete(run).requests)]
    return simulate(engine, arriving)


def complete(run: RunRecord) -> RunRecord:
    """Return the run without the requests that failed."""
    done = tuple(r for r in run.requests if r.generated_s and not r.failure)
    return replace(run, requests=done)


def options_of(system: str) -> PlanningOptions:
    """Return the planning of one of `bench.e2e`'s systems. Raises KeyError for an unknown one."""
    settings = SYSTEMS[system]
    if is_resident(system):
        watermark = float(system.partition("@")[2] or 0.0)
        return PlanningOptions(policy=RESIDENT_SYSTEM, vllm=VllmOptions(watermark=watermark))
    alpha = settings.get("PLAN_ALPHA", PolicyParameters().alpha)
    assert isinstance(alpha, float | int)
    return PlanningOptions(
        policy=str(settings["POLICY"]),
        parameters=PolicyParameters(alpha=float(alpha)),
        report_interval_s=DELIVERED_INTERVAL_S,
    )


def warm_up_of(level: ServiceLevel) -> list[ArrivingRequest]:
    """Return the requests before the counted ones, from which the engine has learnt already."""
    return [
        ArrivingRequest(
            request_id=RequestId(one.request_id),
            arrival_s=0.0,
            num_prompt_tokens=one.num_prompt_tokens,
            num_output_tokens=one.num_output_tokens,
            level=level,
        )
        for one in warm_up(NUM_WARM_UP_REQUESTS)
    ]


def arriving_of(request: RequestRecord, level: ServiceLevel) -> ArrivingRequest:
    return ArrivingRequest(
        request_id=RequestId(request.request_id),
        arrival_s=WARM_UP_S + request.submitted_s,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens or len(request.generated_s),
        leaves_after=request.leaves_after,
        level=level,
    )


def _samples(samples: Sequence[ResidencySample]) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            time_s=sample.time_s - WARM_UP_S,
            pool_used_frac=sample.pool_used_frac,
            offloaded_frac=sample.offloaded_frac,
            num_requests=sample.num_running + sample.num_waiting,
            num_held=sample.num_paused,
        )
        for sample in samples
        if sample.time_s >= WARM_UP_S
    )
