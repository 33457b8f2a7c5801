"""The `orbitflow` placement: the optimiser with its decode window and Pause-Resume.

For a batch of running requests: the window Delta minimises mean step + switching cost / Delta
among those that fit the pool and keep the SLO. A batch that cannot, by certificate or by the
deadline, loses requests one by one, in the order of the victim rule, until the rest can.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from services.placement.batch import answer, members
from services.placement.patterns import PatternSpace
from services.placement.pause import (
    is_protected,
    longest_paused,
    must_stay_paused,
    ranked_victims,
)
from services.placement.slo import (
    constant_step_rate,
    misses,
    promise_of,
    violations_allowed,
)
from services.placement.types import (
    BufferMode,
    Plan,
    PlanStatus,
    Quality,
    RequestId,
    RequestState,
    Snapshot,
    VictimRule,
)
from services.planner.batch import Batch
from services.planner.budget import Budget, NodeBudget, Share
from services.planner.instance import Instance
from services.planner.library import Ints, PatternLibrary, library_of
from services.planner.solver import Solution, Solver, score
from services.planner.window import Fit, fit_window

Solvers: TypeAlias = Callable[[int, PatternSpace, BufferMode], Solver]

MAX_SINGLE_VICTIMS = 16  # tried one by one where the smallest set is wanted
FASTEST_NODES = 4_000  # spent at most on one batch to see whether it can keep the SLO
TIE_BREAK_SLACK = 1e-6  # relative; a bound of the objective holds its tie-break as well
GOOD = (PlanStatus.OPTIMAL, PlanStatus.FEASIBLE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What was found for one batch."""

    status: PlanStatus
    choice: Ints | None  # None: not even the pool can hold the batch
    fit: Fit | None
    step_s: float = 0.0  # at the end of the window
    objective_s: float = 0.0
    lower_bound_s: float = 0.0
    library: PatternLibrary | None = None  # of `choice`, if it is not the solver's

    @property
    def cost(self) -> tuple[bool, float]:
        """Return what to compare answers of one batch by: the SLO, then seconds per step."""
        if self.choice is None or self.fit is None:
            return True, float("inf")
        return not self.fit.keeps_slo, self.fit.cost_s


class OrbitFlow:
    """Plans with a solver per engine shape. Not thread-safe."""

    def __init__(self, solvers: Solvers) -> None:
        self._solvers = solvers

    def __call__(self, snapshot: Snapshot, budget: Budget) -> Plan:
        """Return a plan that fits the pool; its status speaks of the requests it lets run.

        Whether all could have run is in `quality.serve_all`.
        """
        return _Planning(snapshot, self._solver_for(snapshot), budget).plan()

    def _solver_for(self, snapshot: Snapshot) -> Solver:
        parameters = snapshot.parameters
        space = PatternSpace.EVEN if parameters.even_patterns_only else PatternSpace.FULL
        return self._solvers(snapshot.engine.num_groups, space, parameters.buffer_mode)


class _Planning:
    """One call."""

    def __init__(self, snapshot: Snapshot, solver: Solver, budget: Budget) -> None:
        self._snapshot, self._solver, self._budget = snapshot, solver, budget
        self._parameters = snapshot.parameters
        self._windows = window_lengths(self._parameters.min_window, self._parameters.max_window)

    def plan(self) -> Plan:
        everyone = members(self._snapshot)
        held = [r for r in everyone if must_stay_paused(r, self._snapshot)]
        batch = without(everyone, held)
        if not batch and held:
            batch = [longest_paused(held)]
            held.remove(batch[0])
        first = self._solve(batch, held)
        serve_all = first.status
        if first.status not in GOOD and batch:
            batch, first = self._pause(batch, held, first)
        running = {r.request_id for r in batch}
        paused = [r.request_id for r in everyone if r.request_id not in running]
        return self._assemble(batch, paused, first, serve_all)

    # -- pausing -------------------------------------------------------------------------------

    def _pause(
        self, batch: list[RequestState], held: Sequence[RequestState], whole: Answer
    ) -> tuple[list[RequestState], Answer]:
        """Pause until the rest keeps its constraints; the SLO yields before the protected do."""
        if self._parameters.pause is not False:
            candidates = [r for r in batch if not is_protected(r, self._parameters)]
            for victims in self._victim_sets(candidates, batch, held):
                rest = without(batch, victims)
                found = self._solve(rest, [*held, *victims])
                if found.status in GOOD:
                    return rest, found
        if whole.choice is not None:
            return batch, whole
        return self._pause_for_room(batch, held)

    @property
    def _victim_rule(self) -> VictimRule:
        return self._parameters.victim_rule or VictimRule.KV_AND_DEPOSIT

    def _ranked(self, candidates: Sequence[RequestState]) -> list[RequestState]:
        return ranked_victims(candidates, self._victim_rule, seed=self._snapshot.seed)

    def _victim_sets(
        self,
        candidates: Sequence[RequestState],
        batch: Sequence[RequestState],
        held: Sequence[RequestState],
    ) -> Iterator[list[RequestState]]:
        """Yield the sets to try, smallest first, never the whole batch.

        Sets whose rest certainly fails are left out; they are found by halving, as a rest with
        more victims is never harder. From the first hopeful one on the sets grow ever faster.
        """
        ranked = self._ranked(candidates)
        most = min(len(ranked), len(batch) - 1)
        if self._victim_rule is VictimRule.SMALLEST_SET:
            yield from ([victim] for victim in ranked[: MAX_SINGLE_VICTIMS if most else 0])
            ranked.reverse()
        low, high = 0, most + 1  # `low` victims are not enough
        while high - low > 1:
            middle = (low + high) // 2
            victims = ranked[:middle]
            hopeless = self._hopeless(without(batch, victims), [*held, *victims])
            low, high = (middle, high) if hopeless else (low, middle)
        growth = 1
        while high < most:
            yield ranked[:high]
            high, growth = high + growth, growth * 2
        if most > 0:
            yield ranked[:most]

    def _hopeless(self, requests: Sequence[RequestState], paused: Sequence[RequestState]) -> bool:
        """Say whether one relaxation certifies that a batch cannot keep its constraints."""
        batch = Batch(self._snapshot, requests, self._solver.library)
        instance = batch.instance(window=self._windows[0], read_after=0, switching=False)
        if self._solver.cannot_fit(instance):
            return True
        bound_s = self._solver.bound(instance).lower_bound_s
        return self._certain_miss(batch, bound_s, self._late_allowed(batch, paused))

    def _certain_miss(self, batch: Batch, bound_s: float, allowed: float) -> bool:
        """Say whether no window keeps the SLO if no step is shorter than `bound_s`."""
        least_s = (bound_s - TIE_BREAK_SLACK * abs(bound_s)) + self._outside_s
        return all(
            constant_step_rate(batch.promises, least_s, window) > allowed + 1e-9
            for window in self._windows
        )

    def _pause_for_room(
        self, batch: list[RequestState], held: Sequence[RequestState]
    ) -> tuple[list[RequestState], Answer]:
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
            rest = Batch(self._snapshot, without(batch, order[:middle]), self._solver.library)
            instance = rest.instance(window=self._windows[0], read_after=0, switching=True)
            too_much = self._solver.cannot_fit(instance)
            low, high = (middle, high) if too_much else (low, middle)
        while True:
            running = without(batch, order[:high])
            found = self._solve(running, [*held, *order[:high]])
            if found.choice is not None:
                return running, found
            high += 1

    # -- one batch -----------------------------------------------------------------------------

    def _solve(self, requests: Sequence[RequestState], paused: Sequence[RequestState]) -> Answer:
        """Return the best placement and window of a batch: the plan in force, or a better one."""
        if not requests:
            return Answer(status=PlanStatus.OPTIMAL, choice=np.zeros(0, np.int64), fit=None)
        batch = Batch(self._snapshot, requests, self._solver.library)
        found = self._solve_anew(batch, paused)
        kept = self._kept(batch, paused, found.status)
        return kept if kept is not None and kept.cost < found.cost else found

    def _kept(
        self, batch: Batch, paused: Sequence[RequestState], status: PlanStatus
    ) -> Answer | None:
        """Return the plan in force where it has patterns that the library lacks, if it fits.

        `status` is what was found without it; it stands if the SLO is not kept here either.
        """
        patterns = tuple(dict.fromkeys(batch.present))
        if all(pattern in self._solver.library.index for pattern in patterns):
            return None  # one of the candidates already
        library = library_of(patterns, self._solver.library.num_groups)
        present = Batch(self._snapshot, batch.requests, library)
        choice = present.present_choice()
        fit = self._fit(present, choice, self._late_allowed(batch, paused))
        if not fit.window:
            return None
        objective_s, step_s = score(self._instance(present, fit.window), choice, library)
        anew = self._instance(batch, fit.window)
        bound_s = 0.0 if self._solver.cannot_fit(anew) else self._solver.bound(anew).lower_bound_s
        return Answer(
            status=PlanStatus.FEASIBLE if fit.keeps_slo else status,
            choice=choice,
            fit=fit,
            step_s=step_s,
            objective_s=objective_s,
            lower_bound_s=min(bound_s, objective_s),
            library=library,
        )

    def _solve_anew(self, batch: Batch, paused: Sequence[RequestState]) -> Answer:
        """Return the best placement and window among the library's patterns."""
        present = batch.present_choice()
        first = self._search(batch, self._windows[0], [present], NodeBudget(0))
        if first.choice is None:
            return Answer(status=first.status, choice=None, fit=None)
        allowed = self._late_allowed(batch, paused)
        start, fit = first.choice, self._fit(batch, first.choice, allowed)
        if not fit.keeps_slo:
            start, status = self._fastest(batch, start, allowed)
            fit = self._fit(batch, start, allowed)
            if not fit.keeps_slo:
                return replace(self._rated(batch, start, fit, None), status=status)
        best = self._search(batch, fit.window, [start, present], self._budget)
        candidates = [start] if best.choice is None else [start, best.choice]
        if self._solver.fits(self._instance(batch, self._windows[0]), present):
            candidates.append(present)
        fits = [self._fit(batch, choice, allowed) for choice in candidates]
        order = sorted(range(len(fits)), key=lambda i: (not fits[i].keeps_slo, fits[i].cost_s))
        chosen = fits[order[0]]
        certificate = best if chosen.window == fit.window else None
        return self._rated(batch, candidates[order[0]], chosen, certificate)

    def _instance(self, batch: Batch, window: int) -> Instance:
        return batch.instance(window=window, read_after=window - 1, switching=True)

    def _search(self, batch: Batch, window: int, starts: list[Ints], budget: Budget) -> Solution:
        instance = self._instance(batch, window)
        return self._solver.solve(instance, budget, starts=starts, seed=self._snapshot.seed)

    def _fit(self, batch: Batch, choice: Ints, allowed: float) -> Fit:
        return fit_window(
            batch.course(choice, self._windows[-1]),
            self._windows,
            capacity=batch.capacity,
            late_per_step=allowed,
            switch_s=batch.switch_s(choice),
        )

    def _rated(self, batch: Batch, choice: Ints, fit: Fit, solution: Solution | None) -> Answer:
        """Return the answer with the certificate of the window that was chosen."""
        assert fit.window > 0  # every candidate fits the shortest window
        instance = self._instance(batch, fit.window)
        objective_s, step_s = self._solver.score(instance, choice)
        optimal = solution is not None and solution.status is PlanStatus.OPTIMAL
        bound_s = (
            self._solver.bound(instance).lower_bound_s
            if solution is None
            else solution.lower_bound_s
        )
        optimal = optimal and objective_s <= bound_s * (1.0 + 1e-9)
        return Answer(
            status=PlanStatus.OPTIMAL if optimal else PlanStatus.FEASIBLE,
            choice=choice,
            fit=fit,
            step_s=step_s,
            objective_s=objective_s,
            lower_bound_s=min(bound_s, objective_s),
        )

    def _fastest(self, batch: Batch, choice: Ints, allowed: float) -> tuple[Ints, PlanStatus]:
        """Return the fastest placement found whatever it costs to install.

        INFEASIBLE if no placement keeps the SLO, else UNDECIDED: it says nothing about this one.
        """
        instance = batch.instance(window=self._windows[0], read_after=0, switching=False)
        if self._certain_miss(batch, self._solver.bound(instance).lower_bound_s, allowed):
            return choice, PlanStatus.INFEASIBLE
        budget = Share(self._budget, FASTEST_NODES)
        found = self._solver.solve(instance, budget, starts=[choice], seed=self._snapshot.seed)
        if self._certain_miss(batch, found.lower_bound_s, allowed):
            return choice, PlanStatus.INFEASIBLE
        fits_soon = found.choice is not None and self._solver.fits(
            self._instance(batch, self._windows[0]), found.choice
        )
        if found.choice is None or not fits_soon:
            return choice, PlanStatus.UNDECIDED
        return found.choice, PlanStatus.UNDECIDED

    @property
    def _outside_s(self) -> float:
        assert self._snapshot.profile is not None
        return self._snapshot.profile.outside_layers_s

    def _late_allowed(self, batch: Batch, paused: Sequence[RequestState]) -> float:
        """Return alpha for the running requests; a dry reader of a paused one uses up one."""
        deposit = self._parameters.deposit is not False
        assert self._snapshot.profile is not None
        window_s = self._windows[0] * self._snapshot.profile.mean_tpot_s
        num_missed = sum(
            misses(promise_of(request, deposit=deposit), window_s=window_s) for request in paused
        )
        return violations_allowed(
            self._parameters, num_running=len(batch.requests), num_missed=num_missed
        )

    # -- the plan ------------------------------------------------------------------------------

    def _assemble(
        self,
        batch: Sequence[RequestState],
        paused: Sequence[RequestId],
        found: Answer,
        serve_all: PlanStatus,
    ) -> Plan:
        snapshot, outside_s = self._snapshot, self._outside_s
        choice = found.choice if found.choice is not None else np.zeros(0, np.int64)
        library = found.library or self._solver.library
        patterns = {
            request.request_id: library.patterns[column]
            for request, column in zip(batch, choice, strict=True)
        }
        fit = found.fit
        return Plan(
            epoch=snapshot.epoch,
            policy=snapshot.policy,
            status=found.status,
            placements=answer(snapshot, patterns, paused),
            quality=Quality(
                latency_s=found.step_s + outside_s,
                first_latency_s=(fit.first_step_s if fit else 0.0) + outside_s,
                mean_latency_s=(fit.mean_step_s if fit else 0.0) + outside_s,
                objective_s=found.objective_s + outside_s,
                lower_bound_s=found.lower_bound_s + outside_s,
                window=fit.window if fit else self._windows[-1],
                expires_after=fit.expires_after if fit else self._windows[-1],
                num_nodes=self._budget.num_nodes,
                serve_all=serve_all,
            ),
        )


def without(batch: Sequence[RequestState], others: Sequence[RequestState]) -> list[RequestState]:
    gone = {request.request_id for request in others}
    return [request for request in batch if request.request_id not in gone]


def window_lengths(shortest: int, longest: int) -> list[int]:
    """Return the window lengths to try: Delta_min, doubled up to Delta_max, and Delta_max."""
    lengths = [shortest]
    while lengths[-1] * 2 < longest:
        lengths.append(lengths[-1] * 2)
    return lengths if lengths[-1] >= longest else [*lengths, longest]
