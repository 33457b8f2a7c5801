"""The thread that solves: one, because solvers hold state while they work."""

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor

import structlog

from services.kit.clock import Clock
from services.placement.step_time.patterns import PatternSpace
from services.placement.types import Plan, Snapshot
from services.planner.metrics import PLAN_SECONDS, WARM
from services.planner.policy.orbitflow import OrbitFlow
from services.planner.policy.policies import make_plan, needs_solver
from services.planner.solver.budget import DeadlineBudget
from services.planner.solver.solver import warm_solver

log = structlog.get_logger()


class Worker:
    """Makes plans off the event loop, one after the other."""

    def __init__(self, now_s: Clock, *, max_budget_s: float) -> None:
        self._now_s, self._max_budget_s = now_s, max_budget_s
        self._optimiser = OrbitFlow(warm_solver)
        self._busy = False  # whether the warm-up is running
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="solver")

    def warm_up(self, num_groups: tuple[int, ...]) -> None:
        """Start compiling kernels and building solvers; plans that need them wait for it."""
        self._thread.submit(self._warm_up, num_groups)

    def _warm_up(self, num_groups: tuple[int, ...]) -> None:
        start_s, self._busy = self._now_s(), True
        for count in num_groups:
            warm_solver(count, PatternSpace.FULL)
        gc.collect()
        gc.freeze()  # what lives from here on is not looked through again
        self._busy = False
        WARM.set(1)
        log.info("solver_warmed", num_groups=num_groups, duration_s=self._now_s() - start_s)

    async def plan(self, snapshot: Snapshot, *, budget_s: float) -> Plan:
        """Return a plan, searching for at most `budget_s` and the planner's own budget."""
        loop = asyncio.get_running_loop()
        thread = self._thread if needs_solver(snapshot) else None
        allowed_s = min(budget_s, self._max_budget_s)
        return await loop.run_in_executor(thread, self._plan, snapshot, allowed_s)

    def _plan(self, snapshot: Snapshot, budget_s: float) -> Plan:
        start_s = self._now_s()
        plan = make_plan(snapshot, DeadlineBudget(self._now_s, start_s + budget_s), self._optimiser)
        PLAN_SECONDS.labels(snapshot.policy).observe(self._now_s() - start_s)
        return plan

    def close(self) -> bool:
        """Drop what waits. Returns whether nothing is running: a compilation cannot be stopped."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        return not self._busy
