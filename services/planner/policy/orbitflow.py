"""The `orbitflow` placement: the optimiser with Pause-Resume.

A batch that cannot keep its constraints, by certificate or by the deadline, loses requests in the
order of the victim rule until the rest can.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from services.placement.judging.slo import promise_of
from services.placement.run.pause import (
    is_protected,
    longest_paused,
    must_stay_paused,
    ranked_victims,
)
from services.placement.step_time.batch import answer, holders_of, members
from services.placement.step_time.patterns import PatternSpace
from services.placement.types import (
    Plan,
    PlanStatus,
    Quality,
    RequestId,
    RequestState,
    Snapshot,
    VictimRule,
)
from services.planner.policy.placer import Finding, Placer
from services.planner.policy.problem import library_for, without_hopeless
from services.planner.policy.victims import Victims, growing_sets
from services.planner.solver.budget import Budget
from services.planner.solver.solver import Solver

Solvers: TypeAlias = Callable[[int, PatternSpace], Solver]


class OrbitFlow:
    """Plans with a solver per engine shape. Not thread-safe."""

    def __init__(self, solvers: Solvers) -> None:
        self._solvers = solvers

    def __call__(self, snapshot: Snapshot, budget: Budget) -> Plan:
        """Return a plan that fits the pool; its status speaks of the requests it lets run.

        Whether all could have run is in `quality.serve_all`.
        """
        snapshot, parameters = without_hopeless(snapshot), snapshot.parameters
        space = PatternSpace.EVEN if parameters.even_patterns_only else PatternSpace.FULL
        solver = self._solvers(snapshot.engine.num_groups, space)
        return _Planning(snapshot, solver.over(library_for(snapshot, space)), budget).plan()


class _Planning:
    """One call."""

    def __init__(self, snapshot: Snapshot, solver: Solver, budget: Budget) -> None:
        self._snapshot, self._budget = snapshot, budget
        self._patterns = solver.library.patterns
        self._parameters = snapshot.parameters
        self._placer = Placer(snapshot, solver, budget)

    def plan(self) -> Plan:
        everyone = members(self._snapshot)
        held = [r for r in everyone if must_stay_paused(r, self._snapshot)]
        batch = without(everyone, held)
        if not batch and held:
            batch = [longest_paused(held)]
            held.remove(batch[0])
        first = self._placer.place(batch, held)
        serve_all = first.status
        if not first.is_good and batch:
            batch, first = self._pause(batch, held, first)
        running = {r.request_id for r in batch}
        paused = [r.request_id for r in everyone if r.request_id not in running]
        return self._assemble(batch, paused, first, serve_all)

    # -- pausing -------------------------------------------------------------------------------

    def _pause(
        self, batch: list[RequestState], held: Sequence[RequestState], whole: Finding
    ) -> tuple[list[RequestState], Finding]:
        """Pause until the rest keeps its constraints; the SLO yields before the protected do.

        Without time one set is tried; if it does not suffice, no request is paused for an SLO.
        """
        if self._parameters.pause is not False:
            for attempt, victims in enumerate(self._victim_sets(batch, held)):
                if attempt > 0:
                    if not self._budget.allows():
                        whole = replace(whole, status=PlanStatus.UNDECIDED)
                        break
                    self._budget.spend(1)
                rest = without(batch, victims)
                if whole.choice is not None and not self._serves_a_reader(rest):
                    continue
                found = self._placer.place(rest, [*held, *victims])
                if found.is_good:
                    return rest, found
        if whole.choice is not None:
            return batch, whole
        return self._pause_for_room(batch, held)

    def _serves_a_reader(self, rest: Sequence[RequestState]) -> bool:
        """Say whether any request gains from a pause for an SLO."""
        deposit = self._parameters.deposit is not False
        return any(promise_of(request, deposit=deposit) is not None for request in rest)

    def _victim_sets(
        self, batch: Sequence[RequestState], held: Sequence[RequestState]
    ) -> Iterator[Victims]:
        """Yield the sets to try, the better ones first, never the whole batch."""

        def is_hopeless(victims: Sequence[RequestState]) -> bool:
            return self._placer.is_hopeless(without(batch, victims), [*held, *victims])

        ranked = self._ranked([r for r in batch if not is_protected(r, self._parameters)])
        yield from growing_sets(ranked, num_running=len(batch), is_hopeless=is_hopeless)

    def _ranked(self, candidates: Sequence[RequestState]) -> list[RequestState]:
        rule = self._parameters.victim_rule or VictimRule.KV_AND_DEPOSIT
        return ranked_victims(candidates, rule, seed=self._snapshot.seed)

    def _pause_for_room(
        self, batch: list[RequestState], held: Sequence[RequestState]
    ) -> tuple[list[RequestState], Finding]:
        """Let run what the pool can hold, as fast as it goes: the SLO has yielded."""
        parameters = self._parameters
        order = self._ranked([r for r in batch if not is_protected(r, parameters)])
        order += sorted(
            (r for r in batch if is_protected(r, parameters)),
            key=lambda r: (-r.priority, r.paused_age_s or 0.0),
        )
        low, high = 0, len(order)  # `low` victims leave too much, `high` leave nothing
        while high - low > 1:
            middle = (low + high) // 2
            too_much = self._placer.cannot_fit(without(batch, order[:middle]))
            low, high = (middle, high) if too_much else (low, middle)
        while True:
            running = without(batch, order[:high])
            found = self._placer.place(running, [*held, *order[:high]])
            if found.choice is not None:
                return running, found
            high += 1

    # -- the plan ------------------------------------------------------------------------------

    def _assemble(
        self,
        batch: Sequence[RequestState],
        paused: Sequence[RequestId],
        found: Finding,
        serve_all: PlanStatus,
    ) -> Plan:
        snapshot = self._snapshot
        choice = found.choice if found.choice is not None else np.zeros(0, np.int64)
        holders = holders_of(snapshot, batch)
        patterns = {
            holder.holder_id: self._patterns[column]
            for holder, column in zip(holders, choice, strict=True)
        }
        plan = answer(snapshot, found.status, patterns, paused)
        return replace(plan, quality=self._quality(found, serve_all))

    def _quality(self, found: Finding, serve_all: PlanStatus) -> Quality:
        fit, outside_s = found.fit, self._placer.outside_s
        longest = self._placer.windows[-1]
        return Quality(
            latency_s=found.step_s + outside_s,
            first_latency_s=(fit.first_step_s if fit else 0.0) + outside_s,
            mean_latency_s=(fit.mean_step_s if fit else 0.0) + outside_s,
            objective_s=found.objective_s + outside_s,
            lower_bound_s=found.lower_bound_s + outside_s,
            window=fit.window if fit else longest,
            expires_after=fit.expires_after if fit else longest,
            num_nodes=self._budget.num_nodes,
            serve_all=serve_all,
        )


def without(batch: Sequence[RequestState], others: Sequence[RequestState]) -> list[RequestState]:
    gone = {request.request_id for request in others}
    return [request for request in batch if request.request_id not in gone]
