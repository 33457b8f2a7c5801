"""How long the step of a load takes, by the event recursion."""

from services.planner.solver.jit import compiled
from services.planner.solver.kernels.load import Board, Load, load_of
from services.planner.solver.library import Ints


@compiled
def step_s(load: Load, board: Board) -> float:
    """Return the step's length by the event recursion over patterns."""
    mass, work, active = load.mass, load.work, load.active
    tables, compute_s = board.tables, board.instance.compute_s
    num_layers = compute_s.shape[0]
    for layer in range(num_layers + 1):
        work[layer] = 0.0
    num_active = 0
    for k in range(mass.shape[0]):
        if mass[k] > 0.0 and tables.first[k, 0] >= 0:
            active[num_active] = k
            num_active += 1
            work[tables.first[k, 0]] += mass[k]
            if tables.first[k, 1] >= 0:
                work[tables.first[k, 1]] += mass[k]
    total = 0.0
    head = 0
    for layer in range(num_layers):
        total += work[layer] + compute_s[layer]
        work[layer] = 0.0
        left = compute_s[layer]
        head = max(head, layer + 1)
        while head < num_layers:
            if work[head] > left:
                work[head] -= left
                break
            left -= work[head]
            work[head] = 0.0
            head += 1
        for a in range(num_active):
            target = tables.release[active[a], layer]
            if target >= 0:
                work[target] += mass[active[a]]
                head = min(head, target)
    return total


@compiled
def objective_s(choice: Ints, board: Board) -> float:
    """Return step length + penalty of a choice."""
    load = load_of(choice, board)
    return step_s(load, board) + load.sums[1]
