"""One engine in virtual time: `handle(event)` returns the events that follow from it.

It reads no clock and draws only from its own seeded generator: the same events and seed give the
same run, to the bit.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.control.admission import run_policy_of
from services.control.kv import holders_of
from services.control.measures.rates import Rates
from services.control.measures.step_timing import CopyTime, StepTiming
from services.control.requests.request_record import Stage
from services.control.step_loop import StepLoop
from services.control.types import ScheduledStep, Trigger
from services.placement.run.resume import ResumeWay
from services.placement.types import EngineShape, RequestId
from simulator.device.copies import LaneCounts
from simulator.device.costs import StepLoad
from simulator.device.step import StepRun, StepTimes, StepWork
from simulator.engine.events import Arrived, Event, PlanCame, ReaderLeft, StepEnded, Woke
from simulator.engine.machine import Machine
from simulator.engine.offloading import host_tier
from simulator.engine.planning import LatePlanner, PlanningOptions, Policy
from simulator.engine.reader_reports import ReaderReports
from simulator.engine.records import Outcome, Totals, outcome_of
from simulator.engine.residency import ResidencyLog, duplicate_frac, sample_of
from simulator.engine.scheduler import Scheduler
from simulator.engine.turns import Turn, load_of, staged_of
from simulator.engine.vllm import VllmPool
from simulator.memory.moves import fits_alone, order_saves
from simulator.memory.requests import SimulatedRequest, live_request

WAIT_S = 0.25  # for another decision, where no request may run
CAUGHT_UP_BLOCKS = 2  # the newest blocks are always on their way
STEPS_PER_COUNT = 32  # of the blocks that live requests hold twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Brain:
    """What decides."""

    options: PlanningOptions
    policy: Policy


@dataclass(slots=True, kw_only=True)
class _StepUnderWay:
    turns: list[Turn]
    load: StepLoad
    start_s: float
    times: StepTimes


class Engine:
    """Scheduler, lanes, and the services' closed loop around them."""

    def __init__(
        self, shape: EngineShape, machine: Machine, brain: Brain, *, offloads: bool, seed: int
    ) -> None:
        """`offloads`: whether KV may leave the pool at all."""
        self.shape, self.machine = shape, machine
        self.outcomes: list[Outcome] = []
        self.totals = Totals()
        self.residency = ResidencyLog()
        self.h2d, self.d2h = machine.lane(), machine.lane()
        given = brain.options
        caches = given.prefix_caching
        vllm = None
        if not offloads:
            connector = given.vllm.offloading_connector
            tier = host_tier(shape, self.h2d, self.d2h) if connector else None
            vllm = VllmPool(shape, given.vllm, prefix_caching=caches, tier=tier)
        self.scheduler = Scheduler(shape, self.h2d, self.d2h, vllm=vllm, rates=self._measured_rates)
        self.scheduler.moves.way_back = machine.way_back
        self.scheduler.caches_prefixes &= caches
        self.scheduler.moves.trunks.is_on = given.shares_in_pool and not shape.side_windows
        options = given.controller
        self._max_pause_s = options.parameters.max_pause_s
        self._now_s = 0.0
        self._planner = LatePlanner(brain.policy, brain.options.plan_latency_s, self._now)
        policy = run_policy_of(options)
        self.loop = StepLoop(options, self.scheduler.line, self._planner, policy, self._now)
        self._reports = ReaderReports(brain.options.report_interval_s)
        self._seed, self._rng = seed, random.Random(seed)
        self._group_sizes = [len(shape.layers_of(group)) for group in range(shape.num_groups)]
        self._step: _StepUnderWay | None = None
        self._last_batch: list[tuple[object, ...]] = []  # where each request was in the newest step
        self._counted = (LaneCounts(), LaneCounts())  # of both lanes, at the newest step's end
        self._restored_s = 0.0  # compute of restores that steps have paid for
        self._duplicate_frac = 0.0  # as counted last
        self._left: list[RequestId] = []  # whose readers have left since the newest step began
        self._reduced_bytes = 0  # that all-reduces sent over the lane to the GPU

    def _now(self) -> float:
        return self._now_s

    def _measured_rates(self) -> Rates:
        return self.loop.meter.rates()

    def handle(self, event: Event) -> list[Event]:
        """Take in one event, not earlier than those before it; return what follows from it."""
        now_s = self._now_s = event.time_s
        following: list[Event] = []
        match event:
            case Arrived():
                self._arrived(event)
            case StepEnded():
                following += self._end_step(now_s)
            case PlanCame():
                self._planner.came()
            case ReaderLeft():
                self._left.append(event.request_id)
            case Woke():
                pass
        if self._step is None:
            following += self._start_step(now_s)
        return [*following, *self._planner.take_due()]

    def _arrived(self, event: Arrived) -> None:
        request = live_request(event.request, self.scheduler.geometry)
        if drafts := self.machine.drafts:
            seed = f"{self._seed}-{request.request_id}"  # the same under every policy
            request.is_right = drafts.right_ones(request.max_tokens, seed=seed)
            request.num_drafts_per_step = drafts.num_drafts
        if fits_alone(self.shape, request, offloads=self.scheduler.offloads):
            self.scheduler.add(request)
            self.loop.changed()
        else:
            self._leave(request, rejected=True)

    # -- the beginning of a step -------------------------------------------------------------

    def _start_step(self, now_s: float) -> list[Event]:
        scheduler = self.scheduler
        self._take_in_copies(now_s)
        self._abort_left()
        self._reports.take_in(scheduler.running, now_s)
        self.loop.before_schedule()
        for request in scheduler.running:
            request.note_pause(now_s)
        num_admitted, num_free = scheduler.num_admitted, scheduler.pool.num_free
        turns = scheduler.schedule(now_s)
        scheduler.in_flight = [t.request for t in turns] if self.machine.schedules_ahead else []
        self._note_progress(turns, scheduler.num_admitted - num_admitted)
        self.loop.after_schedule(self._scheduled(turns, now_s), now_s)
        if not turns:
            self.loop.after_update(None, busy=False)
            freed = scheduler.pool.num_free > num_free  # for a request that runs in the next step
            return [Woke(time_s=now_s)] if freed else self._rest(now_s)
        return [StepEnded(time_s=self._run(turns, now_s))]

    def _abort_left(self) -> None:
        """Abort the requests whose readers have left, if they have not ended."""
        for name in self._left:
            if request := self.scheduler.moves.requests.get(name):
                self._leave(request)
        self._left.clear()

    def _note_progress(self, turns: Sequence[Turn], num_admitted: int) -> None:
        """Tell the loop which requests came in, were preempted, and begin to decode."""
        note, preempted = self.loop.note, self.scheduler.preempted
        note(*[Trigger.ADMITTED] * num_admitted, *[Trigger.PREEMPTED] * len(preempted))
        preempted.clear()
        for turn in turns:
            if not turn.is_decode and not turn.request.num_left_tokens:
                note(Trigger.PREFILLED)

    def _scheduled(self, turns: Sequence[Turn], now_s: float) -> ScheduledStep:
        """Describe a step that begins."""
        load = load_of(turns)
        batch: list[tuple[object, ...]] = [
            (holder.request_id, tuple(holder.offloaded), holder.num_buffers)
            for holder in holders_of(turn.request.kv for turn in turns)
        ]
        same_batch, self._last_batch = batch == self._last_batch, batch
        return ScheduledStep(
            request_ids=tuple(turn.request.request_id for turn in turns),
            scheduled_s=now_s,
            num_tokens=load.num_tokens,
            num_context_tokens=load.num_context_tokens + sum(map(sum, load.prefixes)),
            num_prefill_tokens=load.num_prefill_tokens,
            num_prefill_pairs=load.num_prefill_pairs,
            same_batch=same_batch,
            undisturbed=self.h2d.num_queued_bytes == 0,
        )

    def _take_in_copies(self, now_s: float) -> None:
        self.h2d.advance(now_s)
        self.d2h.advance(now_s)
        if num_restored := self.scheduler.take_in_copies():
            self.totals.num_restored_groups += num_restored
            self.loop.changed()
        running = {request.request_id for request in self.scheduler.running}
        for request in self.scheduler.live:
            kv = request.record.kv
            if kv is None:
                continue
            lag = kv.num_full_blocks - kv.num_host_blocks
            decodes = request.num_output_tokens > 0 and request.request_id in running
            caught_up = request.record.stage is Stage.MIRRORED
            if not caught_up and decodes and kv.mirrored and lag <= CAUGHT_UP_BLOCKS:
                request.record.stage = Stage.MIRRORED
                self.loop.note(Trigger.MIRRORED)

    def _rest(self, now_s: float) -> list[Event]:
        """No request can run: come back when a copy has ended, or not at all."""
        if not self.scheduler.running and not self.scheduler.waiting:
            self.residency.add(sample_of(self.scheduler, now_s))
            return []
        if self.scheduler.sends_away:
            return [Woke(time_s=now_s)]  # its token has come
        since_s = (request.record.held_since_s for request in self.scheduler.running)
        paused_s = [begun_s for begun_s in since_s if begun_s is not None]
        if paused_s and len(paused_s) == len(self.scheduler.running):
            return [Woke(time_s=now_s)]  # the loop ends a pause
        ends = [end for lane in (self.d2h, self.h2d) if (end := lane.begin(now_s)) is not None]
        if ends:
            return [Woke(time_s=min(ends))]
        running = self.scheduler.running
        asleep = [one for one in running if any(kv.asleep for kv in holders_of([one.kv]))]
        if asleep:  # no request runs for want of what it holds
            self.scheduler.leave(asleep[-1], now_s)
            return [Woke(time_s=now_s)]
        if self.scheduler.put_back_last():
            return [Woke(time_s=now_s)]
        if len(list(self.scheduler.line.requests())) < len(self.scheduler.waiting):
            return [Woke(time_s=now_s + WAIT_S)]  # the policy decides anew
        if paused_s:
            return [Woke(time_s=max(now_s, min(paused_s) + self._max_pause_s))]
        # Nothing changes by itself: the first in line fits nowhere.
        stuck = (self.scheduler.waiting or self.scheduler.running)[0]
        self._leave(stuck, rejected=True)
        return [Woke(time_s=now_s)]

    # -- the step --------------------------------------------------------------------------------

    def _run(self, turns: list[Turn], now_s: float) -> float:
        """Begin a step; return when it ends."""
        load = load_of(turns)
        noise = self._noise(self.machine.compute_noise_frac)
        rate = self.machine.link_bytes_per_s * self._noise(self.machine.link_noise_frac)
        self.h2d.set_rate(rate)
        self.d2h.set_rate(rate)
        layer_s = self.machine.costs.layer_s(load) * noise
        drafting_s = self.machine.drafting_s(self.shape.num_layers * layer_s)
        work = StepWork(
            compute_s=[size * layer_s for size in self._group_sizes],
            outside_s=self.machine.costs.outside_s(load) * noise + drafting_s + self._way_back_s(),
            staged=staged_of(turns, self.shape),
            num_reduces=[2 * size for size in self._group_sizes],
            reduce_bytes=self.machine.costs.reduce_bytes(load),
        )
        run = StepRun(work, self.h2d, self.d2h, self.machine.copies)
        times = run.run(now_s)
        self._step = _StepUnderWay(turns=turns, load=load, start_s=now_s, times=times)
        return times.end_s

    def _way_back_s(self) -> float:
        """Return what the engine computes for tokens whose way back began since the last step."""
        before_s, self._restored_s = self._restored_s, self.scheduler.moves.restored_s
        return self._restored_s - before_s

    def _noise(self, frac: float) -> float:
        """Return a lognormal factor of mean 1."""
        if not frac:
            return 1.0
        return math.exp(self._rng.gauss(-frac * frac / 2.0, frac))

    def _end_step(self, now_s: float) -> list[Event]:
        """Give each request its tokens; return which readers will have had enough, and when."""
        step, self._step = self._step, None
        assert step is not None
        self._sum_up(step, now_s)
        leaving: list[Event] = []
        for turn in step.turns:
            request = turn.request
            first = not request.generated_s
            if num_new := request.step_ended(now_s, turn.num_drafts):
                if not first and turn.is_decode and not step.load.chunks:
                    request.decode_steps_s.append(now_s - step.start_s)
                if (left_s := request.left_s(num_new)) is not None:
                    leaving.append(ReaderLeft(time_s=left_s, request_id=request.request_id))
            self._save(turn, now_s)
        for request in [t.request for t in step.turns if t.request.is_finished]:
            self.scheduler.take_in_saves(request.kv)
            self._leave(request)
        self._measure(step)
        return leaving

    def _save(self, turn: Turn, now_s: float) -> None:
        """Order the copies of what the step has filled, but for what it sent itself."""
        self.d2h.advance(now_s)
        kv = turn.request.kv
        num_sent = turn.num_direct * len(kv.offloaded)
        for trunk in kv.trunks:
            order_saves(trunk, self.d2h, self.shape.block_bytes, now_s)
        order_saves(kv, self.d2h, self.shape.block_bytes, now_s, num_sent=num_sent)
        if self.scheduler.vllm:
            self.scheduler.vllm.save(turn.request)

    def _leave(self, request: SimulatedRequest, *, rejected: bool = False) -> None:
        request.kv.cancel_copies()
        if request.request_id in self.scheduler.records:
            self.scheduler.forget(request)
            if rejected:
                self.loop.ledger.ended(self._now_s, num_output_tokens=None)
            else:
                answered = request.num_output_tokens if request.is_finished else None
                self.loop.ended(num_output_tokens=answered)
        self.outcomes.append(outcome_of(request, rejected=rejected))

    # -- measuring -------------------------------------------------------------------------------

    def _measure(self, step: _StepUnderWay) -> None:
        """Tell the loop what the engine's ranks would: times, and what was copied."""
        h2d, d2h = (
            CopyTime(
                num_bytes=lane.counts.carried_bytes - before.carried_bytes,
                busy_s=lane.counts.busy_s - before.busy_s,
                num_copies=lane.counts.num_copies - before.num_copies,
            )
            for lane, before in zip((self.h2d, self.d2h), self._counted, strict=True)
        )
        self._counted = (replace(self.h2d.counts), replace(self.d2h.counts))
        timing = StepTiming(
            layer_s=step.times.compute_s / self.shape.num_layers,
            stall_s=sum(step.times.stalls_s),
            h2d=h2d,
            d2h=d2h,
            calibration=None if self.totals.num_steps > 1 else self.machine.calibration(),
        )
        self.loop.after_update(timing, busy=bool(self.scheduler.live))

    def _sum_up(self, step: _StepUnderWay, now_s: float) -> None:
        totals, scheduler = self.totals, self.scheduler
        seconds = now_s - step.start_s
        totals.num_steps += 1
        totals.busy_s += seconds
        totals.compute_s += step.times.compute_s
        totals.stall_s += sum(step.times.stalls_s)
        totals.prefill_s += seconds if step.load.chunks else 0.0
        totals.num_loads += step.times.num_loads
        totals.num_computed_tokens += step.load.num_tokens - step.load.num_drafts
        totals.num_recomputed_tokens += sum(step.load.recomputed)
        self._reduced_bytes += step.times.reduced_bytes
        now = sample_of(scheduler, now_s)
        totals.pool_used_s += seconds * now.pool_used_frac
        totals.host_used_s += seconds * now.host_used_frac
        totals.offloaded_s += seconds * now.offloaded_frac
        totals.paused_s += seconds * now.num_paused
        if totals.num_steps % STEPS_PER_COUNT == 1:
            self._duplicate_frac = duplicate_frac(scheduler)
        totals.duplicate_s += seconds * self._duplicate_frac
        self.residency.add(now)

    def close(self) -> None:
        """Complete the totals."""
        self.totals.h2d_bytes = self.h2d.counts.carried_bytes - self._reduced_bytes
        self.totals.d2h_bytes = self.d2h.counts.carried_bytes
        self.totals.num_restored_groups += self.scheduler.moves.num_found_groups
        counters = self.scheduler.counters
        self.totals.num_found_blocks = counters.num_found_blocks
        self.totals.num_loaded_blocks = counters.num_loaded_blocks
        self.totals.num_cached_tokens = counters.num_prefix_hit_tokens
        self.totals.resumes = {way.value: counters.num_resumes(way) for way in ResumeWay}
        counts = self.loop.counts
        triggers = {f"trigger_{name}": number for name, number in counts.triggers.items()}
        self.totals.plans = {**counts.plans, **triggers}

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, host slots, bytes or requests do not add up."""
        self.scheduler.check_integrity()
        self.h2d.check_integrity()
        self.d2h.check_integrity()
