"""One batch: its best placement and decode window, or a certificate that it cannot keep its SLO.

The window Delta minimises mean step + switching cost / Delta among those that fit the pool and
keep the SLO.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.placement.judging.slo import (
    misses,
    promise_of,
    violations_allowed,
)
from services.placement.mirror import mirror_of
from services.placement.types import PlanStatus, RequestState, Snapshot
from services.planner.policy.batch import Batch
from services.planner.policy.window import Fit, fit_window, num_late
from services.planner.solver.budget import Budget, NodeBudget, Share
from services.planner.solver.instance import Instance
from services.planner.solver.library import Ints
from services.planner.solver.solver import Solution, Solver, score

FASTEST_NODES = 1_000  # spent at most on one batch to see whether it can keep the SLO
TIE_BREAK_SLACK = 1e-6  # relative; a bound of the objective holds its tie-break as well


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finding:
    """What was found for one batch."""

    status: PlanStatus
    choice: Ints | None  # by holder of the batch; None: not even the pool can hold it
    fit: Fit | None
    step_s: float = 0.0  # the longest of the window
    objective_s: float = 0.0
    lower_bound_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.status in (PlanStatus.OPTIMAL, PlanStatus.FEASIBLE)


class Placer:
    """Places batches of one snapshot's requests, within one budget."""

    def __init__(self, snapshot: Snapshot, solver: Solver, budget: Budget) -> None:
        assert snapshot.profile is not None
        self._snapshot, self._solver, self._budget = snapshot, solver, budget
        self._mirror, self._parameters = mirror_of(snapshot), snapshot.parameters
        self.outside_s = snapshot.profile.outside_layers_s
        self.windows = window_lengths(self._parameters.min_window, self._parameters.max_window)

    def place(self, requests: Sequence[RequestState], paused: Sequence[RequestState]) -> Finding:
        """Return the best placement and window of a batch: the plan in force, or a better one."""
        if not requests:
            return Finding(status=PlanStatus.OPTIMAL, choice=np.zeros(0, np.int64), fit=None)
        batch = self._batch(requests)
        present = batch.present_choice()
        first = self._search(batch, self.windows[0], [present], NodeBudget(0))
        if first.choice is None:
            return Finding(status=first.status, choice=None, fit=None)
        allowed = self._late_allowed(batch, paused)
        start, fit = first.choice, self._fit(batch, first.choice, allowed)
        if not fit.keeps_slo:
            start, status = self._fastest(batch, start, allowed)
            fit = self._fit(batch, start, allowed)
            if not fit.keeps_slo:
                return replace(self._rated(batch, start, fit, None), status=status)
        best = self._search(batch, fit.window, [start, present], self._budget)
        candidates = [start] if best.choice is None else [start, best.choice]
        if self._solver.fits(self._instance(batch, self.windows[0]), present):
            candidates.append(present)
        fits = [self._fit(batch, choice, allowed) for choice in candidates]
        order = sorted(range(len(fits)), key=lambda i: (not fits[i].keeps_slo, fits[i].cost_s))
        chosen = fits[order[0]]
        certificate = best if chosen.window == fit.window else None
        return self._rated(batch, candidates[order[0]], chosen, certificate)

    def cannot_fit(self, requests: Sequence[RequestState]) -> bool:
        """Say whether the pool cannot hold a batch, for certain."""
        return self._solver.cannot_fit(self._instance(self._batch(requests), self.windows[0]))

    def is_hopeless(self, requests: Sequence[RequestState], paused: Sequence[RequestState]) -> bool:
        """Say whether one relaxation certifies that a batch cannot keep its constraints."""
        batch = self._batch(requests)
        instance = batch.instance(window=self.windows[0], read_after=0, switching=False)
        if self._solver.cannot_fit(instance):
            return True
        bound_s = self._solver.bound(instance).lower_bound_s
        return self._certain_miss(batch, bound_s, self._late_allowed(batch, paused))

    def _batch(self, requests: Sequence[RequestState]) -> Batch:
        return Batch(self._snapshot, requests, self._solver.library, self._mirror)

    def _windows_of(self, batch: Batch) -> list[int]:
        """Return the windows to try: none beyond the end of a prompt but the shortest."""
        longest = max(self.windows[0], batch.num_steps_alike)
        return [window for window in self.windows if window <= longest]

    def _instance(self, batch: Batch, window: int) -> Instance:
        return batch.instance(window=window, read_after=batch.longest_step(window), switching=True)

    def _search(self, batch: Batch, window: int, starts: list[Ints], budget: Budget) -> Solution:
        instance = self._instance(batch, window)
        return self._solver.solve(instance, budget, starts=starts, seed=self._snapshot.seed)

    def _fit(self, batch: Batch, choice: Ints, allowed: float) -> Fit:
        windows = self._windows_of(batch)
        return fit_window(
            batch.course(choice, windows[-1]),
            windows,
            capacity=batch.capacity,
            late_per_step=allowed,
            switch_s=batch.switch_s(choice),
        )

    def _rated(self, batch: Batch, choice: Ints, fit: Fit, solution: Solution | None) -> Finding:
        """Return the answer with the certificate of the window that was chosen."""
        assert fit.window > 0  # every candidate fits the shortest window
        instance = self._instance(batch, fit.window)
        objective_s, step_s = score(instance, choice, self._solver.library)
        optimal = solution is not None and solution.status is PlanStatus.OPTIMAL
        bound_s = (
            self._solver.bound(instance).lower_bound_s
            if solution is None
            else solution.lower_bound_s
        )
        optimal = optimal and objective_s <= bound_s * (1.0 + 1e-9)
        return Finding(
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
        instance = batch.instance(window=self.windows[0], read_after=0, switching=False)
        if self._certain_miss(batch, self._solver.bound(instance).lower_bound_s, allowed):
            return choice, PlanStatus.INFEASIBLE
        budget = Share(self._budget, FASTEST_NODES)
        found = self._solver.solve(instance, budget, starts=[choice], seed=self._snapshot.seed)
        if self._certain_miss(batch, found.lower_bound_s, allowed):
            return choice, PlanStatus.INFEASIBLE
        fits_soon = found.choice is not None and self._solver.fits(
            self._instance(batch, self.windows[0]), found.choice
        )
        if found.choice is None or not fits_soon:
            return choice, PlanStatus.UNDECIDED
        return found.choice, PlanStatus.UNDECIDED

    def _certain_miss(self, batch: Batch, bound_s: float, allowed: float) -> bool:
        """Say whether no window keeps the SLO if no step of the first ones is below `bound_s`."""
        least_s = (bound_s - TIE_BREAK_SLACK * abs(bound_s)) + self.outside_s
        return all(
            num_late(batch.promises, least_s, min(window, batch.num_steps_alike))
            > (allowed + 1e-9) * window
            for window in self._windows_of(batch)
        )

    def _late_allowed(self, batch: Batch, paused: Sequence[RequestState]) -> float:
        """Return alpha for the running requests; a dry reader of a paused one uses up one."""
        deposit = self._parameters.deposit is not False
        assert self._snapshot.profile is not None
        window_s = self.windows[0] * self._snapshot.profile.mean_tpot_s
        num_missed = sum(
            misses(promise_of(request, deposit=deposit), window_s=window_s) for request in paused
        )
        return violations_allowed(
            self._parameters, num_running=len(batch.requests), num_missed=num_missed
        )


def window_lengths(shortest: int, longest: int) -> list[int]:
    """Return the window lengths to try: Delta_min, doubled up to Delta_max, and Delta_max."""
    lengths = [shortest]
    while lengths[-1] * 2 < longest:
        lengths.append(lengths[-1] * 2)
    return lengths if lengths[-1] >= longest else [*lengths, longest]
