"""Asks the planner when there is a reason to, and has what comes back judged and carried out.

Nothing here waits: a step without a trigger costs some additions, a step with one a snapshot.
"""

from itertools import islice
from typing import Any

from services.control.engine import Engine
from services.control.options import ControllerOptions
from services.control.plans.counts import ControllerCounts
from services.control.plans.plan_keeper import PlanKeeper
from services.control.plans.planner import PlanAnswer, Planner
from services.control.requests.request_ledger import RequestLedger
from services.control.requests.request_state import StateReader, trunks_in_steps
from services.control.types import Links, ScheduledStep, Trigger
from services.placement.presets import preset_of
from services.placement.types import PrefixState, Profile, Replan, RequestState, Snapshot

NOT_OF_THE_BATCH = frozenset({Trigger.WINDOW_END, Trigger.MISMATCH})
MAX_REQUESTS = 1_000  # of a snapshot, and prefixes; the planner refuses more


def asks(trigger: Trigger, replan: Replan) -> bool:
    """Return whether a policy wants to be asked for this reason."""
    if replan is Replan.NEVER:
        return False
    return replan is not Replan.BATCH_CHANGE or trigger not in NOT_OF_THE_BATCH


class Planning:
    """One engine's questions and plans. `planner` None: none is asked, the guard acts alone."""

    def __init__(
        self,
        options: ControllerOptions,
        engine: Engine[Any, Any],
        planner: Planner | None,
        ledger: RequestLedger,
        counts: ControllerCounts,
    ) -> None:
        self.lacks_plan = False  # the planner's last answer was none, or none that holds
        self._options, self._engine, self._planner = options, engine, planner
        self._ledger, self._counts = ledger, counts
        self._plans = PlanKeeper(options, engine, ledger, counts)
        self._replan = preset_of(options.policy).placing.replan
        self._triggers: list[Trigger] = []  # not yet asked about
        self._epoch = 0
        self._step = 0
        self._retry_at_s: float | None = None

    @property
    def has_reason(self) -> bool:
        """Whether there is something to ask about."""
        return bool(self._triggers)

    def note(self, *triggers: Trigger) -> None:
        """Remember that the planner must be asked; the question is put after the next schedule."""
        for trigger in triggers:
            self._counts.triggered(trigger)
            if asks(trigger, self._replan):
                self._triggers.append(trigger)

    def before_schedule(self, now_s: float) -> None:
        """Carry out what has come, and end pauses that nothing else ends."""
        self.note(*self._plans.look_after_readers(now_s))
        if self._planner is not None:
            while (answer := self._planner.take()) is not None:
                self._take(answer, now_s)
        self.note(*self._plans.fall_back(self._step, now_s))
        self.note(*self._plans.look_after_pauses(now_s))

    def _take(self, answer: PlanAnswer, now_s: float) -> None:
        if answer.failure:
            self._counts.failed(answer.failure)
            self._retry_at_s = now_s + self._options.retry_s
            self.lacks_plan = True
        if answer.shadow is not None:
            self._counts.shadowed(answer.shadow)
        if answer.plan is not None:
            self.note(*self._plans.came(answer.epoch, answer.plan, step=self._step, now_s=now_s))
            self.lacks_plan = answer.epoch > self._plans.last_applied_epoch
            self._retry_at_s = now_s + self._options.retry_s if self.lacks_plan else None

    def after_schedule(self, step: ScheduledStep, now_s: float) -> None:
        """Take in a step that begins: what it makes due is a reason to ask."""
        if step.num_tokens:
            self._step += 1
            self.note(*self._plans.due(self._step))
            if self._replan is Replan.EVERY_STEP:
                self._triggers.append(Trigger.STEP)
        if self._retry_at_s is not None and now_s >= self._retry_at_s:
            self._retry_at_s = None
            self.note(Trigger.RETRY)

    def ask(self, profile: Profile, links: Links, now_s: float, *, layers_leave: bool) -> None:
        """Put the question there is a reason for, unless all layers stay in the pool."""
        self._triggers.clear()
        if self._planner is None or not layers_leave:
            return
        self._epoch += 1
        snapshot = self._snapshot(profile, links, now_s)
        self._plans.asked(snapshot, step=self._step, now_s=now_s)
        for request in snapshot.requests:
            record = self._engine.records[request.request_id]
            record.num_deposited_tokens = request.num_deposited_tokens
        self._counts.asked(dropped=self._planner.post(snapshot))

    def _snapshot(self, profile: Profile, links: Links, now_s: float) -> Snapshot:
        engine, options = self._engine, self._options
        reader = StateReader(engine.shape, self._ledger, now_s)
        requests, prefixes = self._states(reader)
        completed_s = self._ledger.last_completion_s
        return Snapshot(
            epoch=self._epoch,
            policy=options.policy,
            seed=options.seed,
            engine=engine.shape,
            requests=requests,
            num_free_blocks=engine.num_free_blocks,
            last_completion_age_s=None if completed_s is None else now_s - completed_s,
            h2d=links.h2d,
            d2h=links.d2h,
            profile=profile,
            parameters=options.parameters,
            num_write_through_blocks=engine.num_write_through_blocks,
            prefixes=prefixes,
        )

    def _states(
        self, reader: StateReader
    ) -> tuple[tuple[RequestState, ...], tuple[PrefixState, ...]]:
        """Return the live requests and the trunks they begin with, as many as a snapshot takes."""
        engine, requests, prefixes = self._engine, list[RequestState](), dict[str, PrefixState]()
        for request in islice(engine.live, MAX_REQUESTS):
            record = engine.records[request.request_id]
            new = [t for t in trunks_in_steps(record) if t.request_id not in prefixes]
            if len(prefixes) + len(new) > MAX_REQUESTS:
                break
            prefixes |= {trunk.request_id: reader.prefix(trunk) for trunk in new}
            requests.append(reader.state(request, record))
        return tuple(requests), tuple(prefixes.values())

    def close(self) -> None:
        """End the planner client's thread."""
        if self._planner is not None:
            self._planner.close()
