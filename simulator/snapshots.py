"""The engine of this moment as policies see it: the snapshot type of the stack."""

from dataclasses import dataclass

from services.placement import plan_rules
from services.placement.blocks import Residency
from services.placement.types import Link, PolicyParameters, Profile, RequestState, Snapshot
from simulator.kv import KVState
from simulator.learner import Learner
from simulator.requests import LiveRequest
from simulator.scheduler import Scheduler

MAX_MIRRORED_BLOCKS = 1024  # of resident groups that a step copies to the host: the executor's


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked, beside the state of the engine."""

    epoch: int
    policy: str
    seed: int
    parameters: PolicyParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the engine knows of itself."""

    profile: Profile
    h2d: Link
    d2h: Link
    last_completion_s: float | None


def snapshot_of(
    scheduler: Scheduler, question: Question, measured: Measured, learner: Learner, now_s: float
) -> Snapshot:
    """Return a snapshot at `now_s`, with the step that begins there scheduled."""
    completed_s = measured.last_completion_s
    idle = [r for r in scheduler.running if r.is_paused]
    return Snapshot(
        epoch=question.epoch,
        policy=question.policy,
        seed=question.seed,
        engine=scheduler.shape,
        requests=tuple(state_of(request, scheduler, learner, now_s) for request in scheduler.live),
        num_free_blocks=max(0, scheduler.pool.num_free - scheduler.guard.num_spare),
        num_free_host_blocks=scheduler.host.num_free,
        num_free_staging_blocks=sum(r.kv.num_buffers * r.kv.buffer_length for r in idle),
        last_completion_age_s=None if completed_s is None else now_s - completed_s,
        h2d=measured.h2d,
        d2h=measured.d2h,
        profile=measured.profile,
        parameters=question.parameters,
        num_write_through_blocks=MAX_MIRRORED_BLOCKS,
    )


def state_of(
    request: LiveRequest, scheduler: Scheduler, learner: Learner, now_s: float
) -> RequestState:
    """Return one request's state."""
    spec, level = request.spec, request.spec.level
    runs = request in scheduler.running  # what is brought back of a waiting one is not shown
    kv = request.kv if runs else KVState(request_id=request.request_id, geometry=scheduler.geometry)
    predicted = learner.predict_output(request.num_output_tokens, spec.num_output_tokens)
    first_s = request.generated_s[0] if request.generated_s else None
    deposited = min(request.reader.num_deposited(now_s), request.num_output_tokens)
    return RequestState(
        request_id=spec.request_id,
        phase=request.phase,
        num_prompt_tokens=spec.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_deposited_tokens=deposited,
        arrival_age_s=now_s - spec.arrival_s,
        first_token_age_s=_age(first_s, now_s),
        last_release_age_s=_age(request.reader.last_release_s(now_s), now_s),
        paused_age_s=_age(request.paused_s, now_s),
        resumed_age_s=_age(request.resumed_s, now_s),
        num_pauses=request.num_pauses,
        slo_ttft_s=level.slo_ttft_s,
        slo_tpot_s=level.slo_tpot_s,
        slo_tbt_s=level.slo_tbt_s,
        consumption_rate_tps=level.consumption_rate_tps,
        priority=spec.priority,
        predicted_min_output_tokens=predicted[0] if predicted else None,
        predicted_max_output_tokens=predicted[1] if predicted else None,
        offloaded_layers=tuple(
            layer for group in kv.offloaded for layer in scheduler.shape.layers_of(group)
        ),
        num_prefetch_buffers=kv.num_buffers or min(1, len(kv.offloaded)),
        num_blocks=blocks_by_group(kv) if kv.num_tokens else (),
        num_host_blocks=(kv.num_host_blocks,) * kv.geometry.num_groups if kv.mirrored else (),
        num_preemptions=request.num_preemptions,
        preempted_age_s=_age(request.preempted_s, now_s),
        last_scheduled_age_s=_age(request.last_scheduled_s, now_s),
        delivered_age_sum_s=request.reader.delivered_age_sum_s(now_s),
    )


def live_requests(scheduler: Scheduler) -> list[plan_rules.LiveRequest]:
    """Return what a plan that comes now is measured against, in scheduling order."""
    return [
        plan_rules.LiveRequest(
            request_id=request.request_id,
            num_tokens=request.num_tokens,
            residency=Residency(
                num_offloaded=len(request.kv.offloaded), num_staging=max(1, request.kv.num_buffers)
            ),
            holds_kv=request in scheduler.running,
            paused=request.is_paused,
        )
        for request in scheduler.live
    ]


def blocks_by_group(kv: KVState) -> tuple[int, ...]:
    """Return the pool blocks per group; staging counts with the first groups that it serves."""
    blocks = [kv.num_rows] * kv.geometry.num_groups
    for place, group in enumerate(kv.offloaded):
        if group not in kv.restoring:
            blocks[group] = len(kv.own)
        if place < kv.num_buffers:
            blocks[group] += kv.buffer_length
    return tuple(blocks)


def _age(instant_s: float | None, now_s: float) -> float | None:
    return None if instant_s is None else max(0.0, now_s - instant_s)
