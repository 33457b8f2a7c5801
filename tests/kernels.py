"""The planner's kernels, compiled before the tests that use them: `python -m tests.kernels`."""

import fcntl
from pathlib import Path

from lab.planning.snapshots import make_request, make_snapshot
from services.placement.step_time.patterns import PatternSpace
from services.planner.solver.solver import warm_solver
from tests.planning import plan_of

LOCK = Path(__file__).resolve().parents[1] / ".cache" / "kernels.lock"


def compile_kernels() -> None:
    """Compile what is not compiled yet: half a minute, once on a machine; others wait for it."""
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        warm_solver(8, PatternSpace.FULL)
        plan_of(make_snapshot(make_request("a"), num_free_blocks=600))  # some layers must leave


if __name__ == "__main__":
    compile_kernels()
