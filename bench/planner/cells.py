"""One cell of the benchmark: many instances of one size, planned and compared."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lab.planning.exhaustive import exhaustive
from lab.planning.instances import HARDWARE, realistic_instance
from services.placement.step_time.patterns import PatternSpace
from services.placement.types import PlanStatus
from services.planner.solver.budget import DeadlineBudget, NodeBudget
from services.planner.solver.instance import Instance, pool_blocks
from services.planner.solver.kernels.load import Board
from services.planner.solver.kernels.rounding import repair
from services.planner.solver.kernels.step import objective_s
from services.planner.solver.library import PatternLibrary
from services.planner.solver.solver import Solver, warm_solver

UNLIMITED_NODES = 10**8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is planned. `budget_s` is process CPU time: the machine is shared."""

    hardware: str
    num_requests: int
    layers_per_group: int
    space: PatternSpace
    budget_s: float

    @property
    def num_groups(self) -> int:
        return -(-HARDWARE[self.hardware].num_layers // self.layers_per_group)


def search_budget_s(num_requests: int) -> float:
    """Return the CPU time of a search: 5 ms up to 8 requests, then 10 and 20 ms."""
    return 0.004 if num_requests <= 8 else 0.008 if num_requests <= 16 else 0.018


def run_cell(cell: Cell, num_instances: int, seed: int) -> dict[str, Any]:
    """Return the cell's figures: times in seconds, gaps and gains as fractions."""
    solver = warm_solver(cell.num_groups, cell.space)
    random = np.random.default_rng([seed, cell.num_requests, cell.num_groups])
    rows = [measure(cell, solver, random) for _ in range(num_instances)]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    shown = {name: quantiles(values) for name, values in columns.items()}
    return asdict(cell) | {"space": cell.space.value, "num_instances": num_instances} | shown


def quantiles(values: np.ndarray) -> dict[str, float]:
    known = values[np.isfinite(values)]
    if len(known) == 0:
        return {"count": 0}
    p50, p90, p99 = np.percentile(known, [50, 90, 99])
    return {
        "count": len(known),
        "mean": float(known.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(known.max()),
    }


def measure(cell: Cell, solver: Solver, random: np.random.Generator) -> dict[str, float]:
    """Plan one instance: the first plan, then with the budget; compare with simple methods."""
    instance = realistic_instance(
        random,
        solver.library,
        HARDWARE[cell.hardware],
        cell.num_requests,
        layers_per_group=cell.layers_per_group,
    )
    first_wall_s, first_cpu_s, first = timed(
        lambda: solver.solve(instance, NodeBudget(0), starts=[])
    )

    def with_budget() -> Any:
        deadline_s = time.process_time() + cell.budget_s
        return solver.solve(instance, DeadlineBudget(time.process_time, deadline_s), starts=[])

    wall_s, cpu_s, plan = timed(with_budget)
    board = Board(instance, solver.library.tables)
    return {
        "first_wall_s": first_wall_s,
        "first_cpu_s": first_cpu_s,
        "first_gap": first.objective_s / first.lower_bound_s - 1.0,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "gap": plan.objective_s / plan.lower_bound_s - 1.0,
        "proven": float(plan.status is PlanStatus.OPTIMAL),
        "uniform_loss": uniform_s(instance, solver.library, board) / plan.objective_s - 1.0,
        "greedy_loss": greedy_s(instance, solver.library, board) / plan.objective_s - 1.0,
    }


def timed(work: Any) -> tuple[float, float, Any]:
    """Return (wall seconds, process CPU seconds, result)."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s, result


def uniform_s(instance: Instance, library: PatternLibrary, board: Board) -> float:
    """Return the objective of the best even distance for the whole batch."""
    choices = (np.full(instance.num_requests, column) for column in library.even)
    return min(
        (
            objective_s(choice, board)
            for choice in choices
            if pool_blocks(instance, choice) <= instance.capacity
        ),
        default=float("nan"),
    )


def greedy_s(instance: Instance, library: PatternLibrary, board: Board) -> float:
    """Return the objective of greedy offloading: fewest seconds of copies per block freed."""
    choice = np.zeros(instance.num_requests, dtype=np.int64)
    copies_s = np.outer(instance.transfer_s, library.tables.num_jobs)
    if not repair(choice, board, library.even, copies_s):
        return float("nan")
    return objective_s(choice, board)


def against_exhaustive(hardware: str, num_requests: int, count: int, seed: int) -> dict[str, Any]:
    """Compare complete searches of the paper's space with enumeration."""
    shape = HARDWARE[hardware]
    solver = warm_solver(shape.num_layers, PatternSpace.EVEN)
    random = np.random.default_rng([seed, num_requests])
    excess, wall, cpu, nodes = [], [], [], []
    for _ in range(count):
        instance = realistic_instance(random, solver.library, shape, num_requests)
        budget = NodeBudget(UNLIMITED_NODES)
        wall_s, cpu_s, plan = timed(lambda i=instance, b=budget: solver.solve(i, b, starts=[]))
        best_s = exhaustive(instance, solver.library)
        same = not np.isfinite(best_s) and not np.isfinite(plan.objective_s)
        excess.append(0.0 if same else abs(plan.objective_s / best_s - 1.0))
        wall.append(wall_s)
        cpu.append(cpu_s)
        nodes.append(budget.num_nodes)
    return {
        "hardware": hardware,
        "num_requests": num_requests,
        "num_instances": count,
        "max_difference": float(np.max(excess)),
        "wall_s": quantiles(np.array(wall)),
        "cpu_s": quantiles(np.array(cpu)),
        "nodes": quantiles(np.array(nodes, dtype=float)),
    }
