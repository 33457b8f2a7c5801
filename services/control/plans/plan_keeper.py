"""Knows what was asked, judges what comes back, and carries it out."""

import math
from collections import deque
from typing import Any

from services.control.engine import Engine
from services.control.kv import trunks_of
from services.control.options import ControllerOptions
from services.control.plans.counts import ControllerCounts
from services.control.plans.plan_in_force import Pause, PlanInForce, pauses_to_end
from services.control.requests.life import Hold, State
from services.control.requests.request_ledger import RequestLedger
from services.control.requests.request_record import RequestRecord
from services.control.requests.request_state import SchedulerRequest, trunks_in_steps
from services.control.types import Trigger
from services.placement.blocks import RESIDENT, Residency
from services.placement.judging.plan_rules import (
    LivePlace,
    LivePrefix,
    Moment,
    Question,
    Verdict,
    groups_of,
    judge,
)
from services.placement.layer_placement import LayerPlacement
from services.placement.types import (
    Placement,
    Plan,
    PrefixId,
    PrefixPlacement,
    RequestId,
    Snapshot,
)

NUM_REMEMBERED_QUESTIONS = 64


class PlanKeeper:
    """The plan in force and the pauses that follow from it."""

    def __init__(
        self,
        options: ControllerOptions,
        engine: Engine[Any, Any],
        ledger: RequestLedger,
        counts: ControllerCounts,
    ) -> None:
        self._options, self._engine = options, engine
        self._ledger, self._counts = ledger, counts
        self._questions: deque[Question] = deque(maxlen=NUM_REMEMBERED_QUESTIONS)
        self._in_force: PlanInForce | None = None
        self._stopped: set[str] = set()  # requests that are held for their readers
        self._looked_s = -math.inf  # after pauses, last
        self.last_applied_epoch = 0

    def asked(self, snapshot: Snapshot, *, step: int, now_s: float) -> None:
        """Remember what a plan will answer."""
        self._questions.append(Question.of(snapshot, step=step, posted_s=now_s))

    def came(self, epoch: int, plan: Plan, *, step: int, now_s: float) -> list[Trigger]:
        """Carry a plan out if the rules allow it. `epoch`: of the snapshot that was sent."""
        question = next((q for q in self._questions if q.epoch == epoch), None)
        trunks = trunks_of(record.kv for record in self._ledger.records.values())
        now = Moment(
            step=step,
            last_applied_epoch=self.last_applied_epoch,
            live=self._live_places(),
            engine=self._engine.shape,
            prefixes=[_prefix_of(trunk) for trunk in trunks.values()],
        )
        verdict = judge(plan, question, now)
        self._counts.judged(
            verdict,
            waited_s=now_s - question.posted_s if question else 0.0,
            waited_steps=step - question.step if question else 0,
        )
        if verdict is not Verdict.APPLIED or question is None:
            return []
        self.last_applied_epoch = plan.epoch
        self._in_force = PlanInForce(plan=plan, asked_step=question.step)
        for prefix in plan.prefixes:
            if prefix.prefix_id in trunks:  # else it has ended
                trunks[prefix.prefix_id].floor = self._floor(prefix)
        return [
            trigger
            for placement in plan.placements
            for trigger in self._carry_out(placement, now_s)
        ]

    def _carry_out(self, placement: Placement, now_s: float) -> list[Trigger]:
        record = self._ledger.records.get(placement.request_id)
        if record is None:
            return []  # it has ended
        record.floor = self._floor(placement)
        if not placement.paused:
            return self._resume(record, now_s)
        if record.state in (State.RUNNING, State.PAUSED) and not record.holds:
            record.hold(Hold.PLAN, now_s)
        return []

    def _floor(self, placement: Placement | PrefixPlacement) -> LayerPlacement | None:
        groups = groups_of(placement.offloaded_layers, self._engine.shape)
        if not groups:
            return None
        return LayerPlacement(
            offloaded=frozenset(groups), num_staging=max(1, placement.num_prefetch_buffers)
        )

    def _resume(self, record: RequestRecord[Any], now_s: float) -> list[Trigger]:
        """End a plan's pause."""
        if Hold.PLAN not in record.holds:
            return []
        record.release(Hold.PLAN, now_s)
        return [Trigger.RESUMED]

    def due(self, step: int) -> list[Trigger]:
        """Return what the plan in force asks for at `step`, each once."""
        return [] if self._in_force is None else self._in_force.triggers_at(step)

    def fall_back(self, step: int, now_s: float) -> list[Trigger]:
        """Drop a plan that has long been void: the heuristic goes on alone."""
        overdue_steps = self._options.overdue_steps
        if self._in_force is None or not self._in_force.is_overdue(
            step, overdue_steps=overdue_steps
        ):
            return []
        self._in_force = None
        self._counts.plans["dropped_overdue"] += 1
        due: list[Trigger] = []
        for record in self._ledger.records.values():
            record.forget_floor()
            due.extend(self._resume(record, now_s))
        return due

    def look_after_readers(self, now_s: float) -> list[Trigger]:
        """Return what there is to ask because readers have stopped or have enough, or wait again.

        A request whose reader is back runs, whatever the plan in force said before it.
        """
        records = self._ledger.records
        stopped = {name for name, record in records.items() if record.waits_for_reader}
        before, self._stopped = self._stopped, stopped
        back = [records[name] for name in before - stopped if name in records]
        for record in back:
            record.release(Hold.PLAN, now_s)
        return [Trigger.HELD] * len(stopped - before) + [Trigger.RESUMED] * len(back)

    def look_after_pauses(self, now_s: float) -> list[Trigger]:
        """End pauses that have lasted too long; say which ones may end."""
        parameters, records = self._options.parameters, self._ledger.records
        looked_s, self._looked_s = self._looked_s, now_s
        paused = [one for one in records.values() if one.holds.keys() == {Hold.PLAN}]
        if not paused:
            return []
        due = [
            Trigger.PAUSE_ENDABLE
            for since_s in (one.holds[Hold.PLAN] for one in paused)
            if now_s - since_s >= parameters.min_pause_s > looked_s - since_s
        ]
        ended = pauses_to_end(
            [_pause_of(record, now_s) for record in paused],
            num_running=self._num_runnable(),
            max_pause_s=parameters.max_pause_s,
        )
        for request_id in ended:
            due.extend(self._resume(records[request_id], now_s))
        return due

    def _num_runnable(self) -> int:
        """Return how many requests the next step may serve: not paused, running or waiting."""
        records = (self._engine.records[one.request_id] for one in self._engine.live)
        places = [not record.state.is_queued for record in records if not record.is_held]
        num_running = sum(places)
        return num_running if num_running or not self._ledger.last_scheduled else len(places)

    def _live_places(self) -> list[LivePlace]:
        records, size = self._engine.records, self._engine.shape.block_size
        return [_place_of(one, records[one.request_id], size) for one in self._engine.live]


def _place_of(request: SchedulerRequest, record: RequestRecord[Any], block_size: int) -> LivePlace:
    kv = record.kv
    return LivePlace(
        request_id=RequestId(request.request_id),
        num_tokens=request.num_tokens - (0 if kv is None else kv.num_shared * block_size),
        residency=RESIDENT if kv is None else _residency_of(kv),
        holds_kv=not record.state.is_queued,
        paused=record.is_held,
        prefix_ids=tuple(PrefixId(trunk.request_id) for trunk in trunks_in_steps(record)),
    )


def _prefix_of(trunk: Any) -> LivePrefix:
    return LivePrefix(
        prefix_id=PrefixId(trunk.request_id),
        num_tokens=trunk.num_own_tokens,
        residency=_residency_of(trunk),
    )


def _residency_of(kv: Any) -> Residency:
    return Residency(num_offloaded=len(kv.offloaded), num_staging=max(1, kv.num_buffers))


def _pause_of(record: RequestRecord[Any], now_s: float) -> Pause:
    return Pause(
        request_id=record.request_id,
        age_s=now_s - record.holds[Hold.PLAN],
        priority=record.priority,
    )
