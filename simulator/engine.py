"""One engine in virtual time: `handle(event)` returns the events that follow from it.

It reads no clock and draws only from its own seeded generator: the same events and seed give the
same run, to the bit.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from services.placement.layer_placement import LayerPlacement
from services.placement.plan_rules import groups_of
from services.placement.run.resume import ResumeWay
from services.placement.types import EngineShape, Placement, Plan, Snapshot
from simulator.copies import Lane
from simulator.costs import Costs, StepLoad
from simulator.events import Arrived, Event, PlanCame, StepEnded, Woke
from simulator.learner import Learner, LinkMeter, MeasuredStep
from simulator.mirroring import order_saves
from simulator.planning import Planning, PlanningOptions, Policy, Reason
from simulator.reader_reports import ReaderReports
from simulator.records import Outcome, Totals
from simulator.requests import LiveRequest, live_request
from simulator.residency import ResidencyLog, sample_of
from simulator.scheduler import Pace, Scheduler, Turn
from simulator.snapshots import Measured, Question, live_requests, snapshot_of
from simulator.step import NO_COSTS, CopyCosts, StagedRequest, StepRun, StepTimes, StepWork

CAUGHT_UP_BLOCKS = 2  # the newest blocks are always on their way


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What an engine runs on."""

    costs: Costs
    link_bytes_per_s: float  # of all GPUs together, each direction
    copy_overhead_s: float = 0.0  # per copy
    chunk_bytes: int = 4 << 20  # of one copy at most, over all GPUs
    copies: CopyCosts = NO_COSTS
    compute_noise_frac: float = 0.0  # standard deviation, per step
    link_noise_frac: float = 0.0  # standard deviation, per step

    def lane(self) -> Lane:
        return Lane(
            bytes_per_s=self.link_bytes_per_s,
            copy_overhead_s=self.copy_overhead_s,
            chunk_bytes=self.chunk_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Brain:
    """Who decides, and what it learns from."""

    options: PlanningOptions
    policy: Policy
    learner: Learner


@dataclass(slots=True, kw_only=True)
class _StepUnderWay:
    turns: list[Turn]
    load: StepLoad
    start_s: float
    times: StepTimes
    undisturbed: bool  # no copies beside those that it waited for
    plan_asked: bool = False
    ids: frozenset[str] = field(default_factory=frozenset)


class Engine:
    """Scheduler, lanes, and the loop around the policy."""

    def __init__(
        self, shape: EngineShape, machine: Machine, brain: Brain, *, offloads: bool, seed: int
    ) -> None:
        """`offloads`: whether KV may leave the pool at all."""
        self.shape, self.machine = shape, machine
        self.planning = Planning(brain.options, shape)
        self.outcomes: list[Outcome] = []
        self.totals = Totals()
        self.residency = ResidencyLog()
        self.h2d, self.d2h = machine.lane(), machine.lane()
        self.scheduler = Scheduler(shape, self.h2d, offloads=offloads, pace=self._pace)
        self._meters = [
            LinkMeter(lane, calibrated_bytes_per_s=machine.link_bytes_per_s)
            for lane in (self.h2d, self.d2h)
        ]
        self._policy, self._learner = brain.policy, brain.learner
        self._reports = ReaderReports(brain.options.report_interval_s)
        self._rng = random.Random(seed)
        self._group_sizes = [len(shape.layers_of(group)) for group in range(shape.num_groups)]
        self._inbox: PlanCame | None = None
        self._step: _StepUnderWay | None = None
        self._step_number = 0  # of the newest step that began, from 1
        self._last_ids: frozenset[str] = frozenset()
        self._last_completion_s: float | None = None
        self._reduced_bytes = 0  # that all-reduces sent over the lane to the GPU

    def handle(self, event: Event) -> list[Event]:
        """Take in one event, not earlier than those before it; return what follows from it."""
        now_s = event.time_s
        match event:
            case Arrived():
                self._arrived(event)
            case StepEnded():
                self._end_step(now_s)
            case PlanCame():
                self._inbox = event
            case Woke():
                pass
        return [] if self._step is not None else self._start_step(now_s)

    def _arrived(self, event: Arrived) -> None:
        request = live_request(event.request, self.scheduler.geometry)
        if self.scheduler.fits_alone(request):
            self.scheduler.add(request)
        else:
            self._leave(request, rejected=True)

    # -- the beginning of a step -------------------------------------------------------------

    def _start_step(self, now_s: float) -> list[Event]:
        scheduler = self.scheduler
        self._take_in_copies(now_s)
        self._reports.take_in(scheduler.running, now_s)
        self._take_plan(now_s)
        self._look_after_pauses(now_s)
        num_admitted, num_free = scheduler.num_admitted, scheduler.pool.num_free
        turns = scheduler.schedule(now_s)
        while not turns and (paused := [r for r in scheduler.running if r.is_paused]):
            self._resume(max(paused, key=lambda r: now_s - (r.paused_s or 0.0)), now_s)
            turns = scheduler.schedule(now_s)
        num_prefilled = sum(not t.is_decode and not t.request.num_left_tokens for t in turns)
        num_changes = len(scheduler.preempted) + scheduler.num_admitted - num_admitted
        for _ in range(num_changes + num_prefilled):
            self.planning.note(Reason.BATCH)
        scheduler.preempted.clear()
        if not turns:
            freed = scheduler.pool.num_free > num_free  # for somebody who runs in the next step
            return [Woke(time_s=now_s)] if freed else self._rest(now_s)
        self._step_number += 1
        asked = self._ask(now_s)
        return [StepEnded(time_s=self._run(turns, now_s)), *asked]

    def _take_in_copies(self, now_s: float) -> None:
        self.h2d.advance(now_s)
        self.d2h.advance(now_s)
        for request in self.scheduler.live:
            kv = request.kv
            saved, restored = kv.take_in_saves(), kv.take_in_restores()
            self.totals.num_restored_groups += restored
            if saved or restored:
                kv.seal()
                self.scheduler.moves.refresh(request.kv)
            lag = kv.num_full_blocks - kv.num_host_blocks
            decodes = request.num_output_tokens > 0 and request.preempted_s is None
            decodes = decodes and kv.mirrored
            if not request.caught_up and decodes and lag <= CAUGHT_UP_BLOCKS:
                request.caught_up = True
                self.planning.note(Reason.BATCH)

    def _rest(self, now_s: float) -> list[Event]:
        """Nobody can run: come back when a copy has ended, or not at all."""
        if not self.scheduler.running and not self.scheduler.waiting:
            self.residency.add(sample_of(self.scheduler, now_s))
            return []
        ends = [end for lane in (self.d2h, self.h2d) if (end := lane.begin(now_s)) is not None]
        if ends:
            return [Woke(time_s=min(ends))]
        asleep = [request for request in self.scheduler.running if request.kv.asleep]
        if asleep:  # nobody runs for want of what it holds
            self.scheduler.preempt(asleep[-1], now_s)
            return [Woke(time_s=now_s)]
        if self.scheduler.put_back_last():
            return [Woke(time_s=now_s)]
        # Nothing changes by itself: the first in line fits nowhere.
        stuck = (self.scheduler.waiting or self.scheduler.running)[0]
        if stuck in self.scheduler.waiting:
            self.scheduler.waiting.remove(stuck)
        else:
            self.scheduler.running.remove(stuck)
        self._leave(stuck, rejected=True)
        return [Woke(time_s=now_s)]

    # -- plans and pauses ----------------------------------------------------------------------

    def _take_plan(self, now_s: float) -> None:
        came, self._inbox = self._inbox, None
        if came is None:
            return
        live = live_requests(self.scheduler)
        if self.planning.judge(came.plan, live, step=self._step_number, now_s=now_s):
            self._carry_out(came.plan, now_s)

    def _carry_out(self, plan: Plan, now_s: float) -> None:
        live = {request.request_id: request for request in self.scheduler.live}
        for placement in plan.placements:
            request = live.get(placement.request_id)
            if request is None:
                continue  # it has ended
            if self.scheduler.offloads:
                self._place(placement)
            runs = request in self.scheduler.running
            if placement.paused and runs and not request.is_paused:
                request.pause(now_s)
            elif not placement.paused and request.is_paused:
                self._resume(request, now_s)

    def _place(self, placement: Placement) -> None:
        """Say where a request's groups belong, from the next step on."""
        groups = frozenset(groups_of(placement.offloaded_layers, self.shape))
        if groups:
            buffers = max(1, placement.num_prefetch_buffers)
            self.scheduler.guard.give(
                placement.request_id, LayerPlacement(offloaded=groups, num_staging=buffers)
            )
        else:
            self.scheduler.guard.forget(placement.request_id)

    def _resume(self, request: LiveRequest, now_s: float) -> None:
        request.resume(now_s)
        self.planning.note(Reason.BATCH)

    def _look_after_pauses(self, now_s: float) -> None:
        parameters = self.planning.options.parameters
        for request in self.scheduler.running:
            if request.paused_s is None:
                continue
            age_s = now_s - request.paused_s
            if age_s >= parameters.max_pause_s:
                self._resume(request, now_s)
            elif age_s >= parameters.min_pause_s and not request.pause_endable_noted:
                request.pause_endable_noted = True
                self.planning.note(Reason.BATCH)

    def _ask(self, now_s: float) -> list[Event]:
        if not self.planning.wants_to_ask(self._step_number, now_s):
            return []
        snapshot = self.snapshot(now_s)
        if snapshot is None:
            return []
        self.planning.asked(snapshot, step=self._step_number, now_s=now_s)
        told = {state.request_id: state.num_deposited_tokens for state in snapshot.requests}
        for request in self.scheduler.running:
            request.num_deposited_told = told[request.request_id]
        plan = self._policy(snapshot)
        ready_s = now_s + self.planning.options.plan_latency_s
        return [PlanCame(time_s=ready_s, plan=plan)]

    def snapshot(self, now_s: float) -> Snapshot | None:
        """Return the engine as the policy sees it; None while too little has been measured."""
        profile = self._learner.profile()
        if profile is None:
            return None
        options = self.planning.options
        h2d, d2h = self._meters
        returning = sum(
            job.num_left_bytes for r in self.scheduler.live for job in r.kv.restoring.values()
        )
        return snapshot_of(
            self.scheduler,
            Question(
                epoch=self.planning.epoch + 1,
                policy=options.policy,
                seed=options.seed,
                parameters=options.parameters,
            ),
            Measured(
                profile=profile,
                h2d=h2d.link(num_queued_bytes=returning),
                d2h=d2h.link(num_queued_bytes=self.d2h.num_queued_bytes),
                last_completion_s=self._last_completion_s,
            ),
            self._learner,
            now_s,
        )

    def _pace(self) -> Pace:
        step_s, prefill_tokens_per_s = self._learner.pace()
        return Pace(
            h2d_bytes_per_s=self._meters[0].link(num_queued_bytes=0).bytes_per_s,
            prefill_tokens_per_s=prefill_tokens_per_s,
            step_s=step_s,
        )

    # -- the step --------------------------------------------------------------------------------

    def _run(self, turns: list[Turn], now_s: float) -> float:
        """Begin a step; return when it ends."""
        load = load_of(turns)
        noise = self._noise(self.machine.compute_noise_frac)
        rate = self.machine.link_bytes_per_s * self._noise(self.machine.link_noise_frac)
        self.h2d.set_rate(rate)
        self.d2h.set_rate(rate)
        layer_s = self.machine.costs.layer_s(load) * noise
        work = StepWork(
            compute_s=[size * layer_s for size in self._group_sizes],
            outside_s=self.machine.costs.outside_s(load) * noise,
            staged=staged_of(turns, self.shape),
            num_reduces=[2 * size for size in self._group_sizes],
            reduce_bytes=self.machine.costs.reduce_bytes(load),
        )
        quiet = self.h2d.num_queued_bytes == 0
        run = StepRun(work, self.h2d, self.d2h, self.machine.copies)
        times = run.run(now_s)
        self._step = _StepUnderWay(
            turns=turns,
            load=load,
            start_s=now_s,
            times=times,
            undisturbed=quiet,
            ids=frozenset(turn.request.request_id for turn in turns),
        )
        return times.end_s

    def _noise(self, frac: float) -> float:
        """Return a lognormal factor of mean 1."""
        if not frac:
            return 1.0
        return math.exp(self._rng.gauss(-frac * frac / 2.0, frac))

    def _end_step(self, now_s: float) -> None:
        step, self._step = self._step, None
        assert step is not None
        self._sum_up(step, now_s)
        num_outputs = 0
        for turn in step.turns:
            request = turn.request
            first = not request.generated_s
            if request.step_ended(now_s):
                num_outputs += 1
                if not first and turn.is_decode and not step.load.chunks:
                    request.decode_steps_s.append(now_s - step.start_s)
            self._save(turn, now_s)
        self._measure(step, now_s, num_outputs)
        for request in [t.request for t in step.turns if t.request.is_finished]:
            self.scheduler.running.remove(request)
            self._last_completion_s = now_s
            self._learner.answer_ended(request.num_output_tokens)
            self._leave(request)
            self.planning.note(Reason.BATCH)

    def _save(self, turn: Turn, now_s: float) -> None:
        """Order the copies of what the step has filled, but for what it sent itself."""
        self.d2h.advance(now_s)
        kv = turn.request.kv
        num_sent = turn.num_direct * len(kv.offloaded)
        order_saves(kv, self.d2h, self.shape.block_bytes, now_s, num_sent=num_sent)

    def _leave(self, request: LiveRequest, *, rejected: bool = False) -> None:
        request.kv.cancel_copies()
        self.scheduler.release(request)
        self.scheduler.guard.forget(request.request_id)
        self.scheduler.moves.forget(request.request_id)
        self.outcomes.append(
            Outcome(
                request_id=request.request_id,
                arrival_s=request.spec.arrival_s,
                num_prompt_tokens=request.spec.num_prompt_tokens,
                num_output_tokens=request.spec.num_output_tokens,
                level=request.spec.level,
                generated_s=tuple(request.generated_s),
                decode_steps_s=tuple(request.decode_steps_s),
                pauses_s=tuple(request.pauses_s),
                num_preemptions=request.num_preemptions,
                rejected=rejected,
            )
        )

    # -- measuring -------------------------------------------------------------------------------

    def _measure(self, step: _StepUnderWay, now_s: float, num_outputs: int) -> None:
        for meter in self._meters:
            meter.sample()
        step_s = now_s - step.start_s
        self._learner.add(
            MeasuredStep(
                step_s=step_s,
                layer_s=step.times.compute_s / self.shape.num_layers,
                stall_s=sum(step.times.stalls_s),
                num_tokens=step.load.num_tokens,
                num_context_tokens=step.load.num_context_tokens
                + sum(chunk + before for chunk, before in step.load.chunks),
                num_prefill_tokens=step.load.num_prefill_tokens,
                num_output_tokens=num_outputs,
            )
        )
        if step.ids != self._last_ids:
            self._last_ids = step.ids
            self.planning.batch_changed()
        elif step.undisturbed and not step.load.chunks:
            self.planning.measured(step_s, step=self._step_number)

    def _sum_up(self, step: _StepUnderWay, now_s: float) -> None:
        totals, scheduler = self.totals, self.scheduler
        seconds = now_s - step.start_s
        totals.num_steps += 1
        totals.num_decode_steps += not step.load.chunks
        totals.busy_s += seconds
        totals.compute_s += step.times.compute_s
        totals.stall_s += sum(step.times.stalls_s)
        totals.num_loads += step.times.num_loads
        self._reduced_bytes += step.times.reduced_bytes
        now = sample_of(scheduler, now_s)
        totals.pool_used_s += seconds * now.pool_used_frac
        totals.host_used_s += seconds * now.host_used_frac
        totals.offloaded_s += seconds * now.offloaded_frac
        totals.paused_s += seconds * now.num_paused
        self.residency.add(now)

    def close(self) -> None:
        """Complete the totals."""
        self.totals.h2d_bytes = self.h2d.counts.carried_bytes - self._reduced_bytes
        self.totals.d2h_bytes = self.d2h.counts.carried_bytes
        self.totals.num_offloaded_groups = self.scheduler.moves.num_offloads
        counters = self.scheduler.counters
        self.totals.resumes = {way.value: counters.num_resumes(way) for way in ResumeWay}
        counts = asdict(self.planning.counts)
        refused = counts.pop("refused")
        reasons = {f"reason_{name}": n for name, n in counts.pop("reasons").items()}
        self.totals.plans = counts | refused | reasons

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, host slots, bytes or requests do not add up."""
        self.scheduler.check_integrity()
        self.h2d.check_integrity()
        self.d2h.check_integrity()


def load_of(turns: Sequence[Turn]) -> StepLoad:
    """Return what a step computes."""
    decodes = [turn for turn in turns if turn.is_decode]
    return StepLoad(
        num_decodes=len(decodes),
        num_context_tokens=sum(turn.num_before + 1 for turn in decodes),
        chunks=tuple((t.num_tokens, t.num_before) for t in turns if not t.is_decode),
    )


def staged_of(turns: Sequence[Turn], shape: EngineShape) -> list[StagedRequest]:
    """Return what a step copies in: of offloaded groups all that is on the host."""
    return [
        StagedRequest(
            offloaded=turn.request.kv.offloaded,
            num_buffers=turn.request.kv.num_buffers,
            group_bytes=turn.num_staged * shape.block_bytes,
            filled_bytes=turn.num_direct * shape.block_bytes,
        )
        for turn in turns
        if turn.request.kv.offloaded
    ]
