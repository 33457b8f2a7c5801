"""Runs in which copies go wrong, and what must hold of them, whatever the engine's options."""

from dataclasses import dataclass, replace
from typing import Any

from lab.engine.step_runner import Hook, Outcome, StepRunner
from lab.engine.workloads import mixed
from services.control.counters import Counters
from tests.exact import failing_engine
from tests.exact.failing_engine import FaultRates

ALONE = {
    "loads-fail": FaultRates(load_fails=0.003),
    "loads-hang": FaultRates(load_hangs=0.003),
    "loads-change": FaultRates(load_changes=0.003),
    "saves-fail": FaultRates(save_fails=0.03),
    "saves-hang": FaultRates(save_hangs=0.03),
    "saves-change": FaultRates(save_changes=0.02),
}
TOGETHER = FaultRates(
    load_fails=0.001,
    load_hangs=0.001,
    load_changes=0.001,
    save_fails=0.005,
    save_hangs=0.005,
    save_changes=0.005,
)
# Rarer where bytes change: from then on nobody begins with what is on the host by now.
CONVERSING = replace(TOGETHER, load_changes=0.0003, save_changes=0.002)


@dataclass(frozen=True, kw_only=True)
class FailureRun:
    outcome: Outcome
    faults: dict[str, int]  # by kind, over all ranks
    lost: frozenset[str]  # requests whose KV was lost at least once
    counts: Counters  # of this run


def run_with_faults(
    runner: StepRunner,
    rates: FaultRates,
    *,
    seed: int = 1,
    hook: Hook | None = None,
    workload: Any = None,
) -> FailureRun:
    """Run a workload while copies go wrong; the engine is healthy again afterwards."""
    losses, rpc = runner.scheduler.recovery.losses, runner.core.model_executor.collective_rpc
    lost: set[str] = set()
    absorb = losses.absorb

    def listen(feedback: Any) -> Any:
        found = absorb(feedback)
        lost.update(found)
        return found

    counters = runner.scheduler.block_owner.counters
    before = counters.copy()
    drain = runner._drain
    counts: list[dict[str, int]] = []

    def heal_and_drain() -> None:
        counts.extend(rpc(failing_engine.heal))
        drain()

    losses.absorb, runner._drain = listen, heal_and_drain  # type: ignore[method-assign]
    rpc(failing_engine.install, args=(rates, seed))
    try:
        outcome = runner.run(workload or mixed(8), hook=hook)
    finally:
        losses.absorb, runner._drain = absorb, drain  # type: ignore[method-assign]
    return FailureRun(
        outcome=outcome,
        faults={kind: sum(count[kind] for count in counts) for kind in counts[0]},
        lost=frozenset(lost),
        counts=Counters(**counters.since(before)),
    )


def assert_right(run: FailureRun, expected: dict[str, list[int]]) -> None:
    """Assert that what finished is exact, and what ended with an error is a part of it."""
    for request_id, tokens in expected.items():
        got = run.outcome.tokens.get(request_id, [])
        if run.outcome.finish_reasons[request_id] == "error":
            assert got == tokens[: len(got)], f"{request_id} got wrong tokens before its error"
        else:
            assert got == tokens, request_id
