"""One engine in this process, whose step loop asks one planner after another."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lab.engine.step_runner import StepRunner
from services.control.options import ControllerOptions
from services.executor.scheduler.planner_client import PlannerClient
from services.placement.presets import Run
from services.placement.types import Snapshot

WAIT_S = 120.0


class PatientClient(PlannerClient):
    """Waits for each answer, so that it is there in the next step however slow the machine is."""

    def post(self, snapshot: Snapshot) -> bool:
        dropped = super().post(snapshot)
        deadline_s = time.monotonic() + WAIT_S
        while all(answer.epoch != snapshot.epoch for answer in tuple(self._answers)):
            assert time.monotonic() < deadline_s, "the planner never answers"
            time.sleep(1e-3)
        return dropped


@contextmanager
def asking(
    runner: StepRunner,
    address: str,
    *,
    timeout_s: float = WAIT_S,
    patient: bool = False,
    run_policy: Run | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Let the engine's step loop ask another planner, with other options, for a while.

    `patient`: the engine waits for each answer; `run_policy`: in place of the options'.
    """
    before = runner.case.controller
    assert before is not None
    shadow_policy = str(options.get("shadow_policy", before.shadow_policy))
    client = (PatientClient if patient else PlannerClient)(
        address, timeout_s=timeout_s, shadow_policy=shadow_policy
    )
    log_stats, runner.scheduler.log_stats = runner.scheduler.log_stats, False  # counts add up
    swap_loop(runner, replace(before, **options), client, run_policy)
    try:
        yield runner.scheduler.loop
    finally:
        client.close()
        runner.scheduler.log_stats = log_stats
        swap_loop(runner, before, None)


def swap_loop(
    runner: StepRunner,
    options: ControllerOptions,
    client: PlannerClient | None,
    run_policy: Run | None = None,
) -> None:
    """Start with a new loop, which knows the calibrated link and nothing else."""
    before = runner.scheduler.loop.meter
    runner.scheduler.set_up(options, client, run_policy)
    after = runner.scheduler.loop.meter
    after._h2d, after._d2h = before._h2d, before._d2h


class Trace:
    """The counters of the loop, step by step."""

    def __init__(self, loop: Any) -> None:
        self._counts = loop.counts
        self.triggers: list[dict[str, int]] = []
        self.plans: list[dict[str, int]] = []

    def __call__(self, scheduler: Any, step: int) -> None:
        self.triggers.append(dict(self._counts.triggers))
        self.plans.append(dict(self._counts.plans))

    def rises(self, series: list[dict[str, int]], name: str, *, since: int) -> list[int]:
        """Return the steps after `since` before which a counter had grown, counted from it."""
        values = [entry.get(name, 0) for entry in series]
        return [n - since for n in range(since + 1, len(values)) if values[n] > values[n - 1]]


class TokenTimes:
    """When each request's tokens were there, seconds of the monotonic clock, to a step's length.

    Tokens of a request's last step are not seen: it is gone before the next.
    """

    def __init__(self) -> None:
        self.generated_s: dict[str, list[float]] = {}

    def __call__(self, scheduler: Any, step: int) -> None:
        now_s = time.monotonic()
        for request in scheduler.running:
            times_s = self.generated_s.setdefault(request.request_id, [])
            times_s.extend([now_s] * (request.num_output_tokens - len(times_s)))
