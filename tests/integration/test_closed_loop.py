"""The closed loop on a real engine: plans act, a bad planner costs quality and never tokens.

One engine on an emulated device, so that steps take the same time again and again; its planner is
a real one in a process of its own, or one that misbehaves by script.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from services.executor.controller.options import ControllerOptions
from services.executor.controller.planner_client import PlannerClient
from services.executor.kv.options import KVOptions
from services.placement.types import PolicyParameters
from tests.exact.harness import (
    Arrival,
    EngineCase,
    Outcome,
    StepRunner,
    first_difference,
    make_prompt,
    run_case,
    stock,
)
from tests.exact.workloads import mixed
from tests.planner_process import warm_planner

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

LINK_BYTES_PER_S = 5e7  # 16 KiB blocks: 0.3 ms each
CASE = EngineCase(
    num_blocks=168,  # 40 % of what `mixed` takes
    kv=KVOptions(
        host_bytes=256 << 20,
        h2d_bytes_per_s=LINK_BYTES_PER_S,
        d2h_bytes_per_s=LINK_BYTES_PER_S,
        emulated_layer_s=2e-3,
        restore_when_free_frac=0.02,
        poison=True,
    ),
    controller=ControllerOptions(plan_timeout_s=30.0),
)
STEADY = [
    Arrival(request_id=f"s{n}", prompt=make_prompt(300, seed=90 + n), num_output_tokens=150)
    for n in range(3)
]


@pytest.fixture(scope="module")
def reference() -> Outcome:
    """What stock vLLM answers to `mixed`."""
    return run_case(stock(CASE), mixed())


@pytest.fixture(scope="module")
def runner(reference: Outcome) -> Iterator[StepRunner]:
    """The engine under test, started when the stock one is gone."""
    runner = StepRunner(CASE)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def planner_address() -> Iterator[str]:
    with warm_planner(num_groups=8) as address:
        yield address


@contextmanager
def asking(
    runner: StepRunner, address: str, *, timeout_s: float = 30.0, **options: Any
) -> Iterator[Any]:
    """Let the engine's controller ask another planner, with other options, for a while."""
    assert CASE.controller is not None
    client = PlannerClient(address, timeout_s=timeout_s)
    runner.scheduler.set_up(replace(CASE.controller, **options), client)
    try:
        yield runner.scheduler.controller
    finally:
        client.close()
        runner.scheduler.set_up(CASE.controller, None)


class Trace:
    """The counters of the loop, step by step."""

    def __init__(self, controller: Any) -> None:
        self._counts = controller.counts
        self.triggers: list[dict[str, int]] = []
        self.plans: list[dict[str, int]] = []

    def __call__(self, scheduler: Any, step: int) -> None:
        self.triggers.append(dict(self._counts.triggers))
        self.plans.append(dict(self._counts.plans))

    def rises(self, series: list[dict[str, int]], name: str, *, since: int) -> list[int]:
        """Return the steps after `since` before which a counter had grown, counted from it."""
        values = [entry.get(name, 0) for entry in series]
        return [n - since for n in range(since + 1, len(values)) if values[n] > values[n - 1]]


def test_tokens_are_stock_vllms_while_plans_come_and_go(
    runner: StepRunner, reference: Outcome, planner_address: str
) -> None:
    with asking(runner, planner_address) as controller:
        outcome = runner.run(mixed())

        assert first_difference(reference, outcome) == {}
        assert controller.counts.plans["applied"] >= 10
        assert outcome.num_offloads > 0
        assert outcome.num_restores > 0


def halve_the_link(runner: StepRunner) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from services.executor.kv.cpu_copy_engine import LinkModel

    queue = next(iter(get_kv_transfer_group().runner.engine._queues.values()))
    queue._link = LinkModel(bytes_per_s=LINK_BYTES_PER_S / 2)


def restore_the_link(runner: StepRunner) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from services.executor.kv.cpu_copy_engine import LinkModel

    queue = next(iter(get_kv_transfer_group().runner.engine._queues.values()))
    queue._link = LinkModel(bytes_per_s=LINK_BYTES_PER_S)


@pytest.mark.parametrize("mismatch_frac", [0.15, 0.0], ids=["with-trigger", "without"])
def test_a_link_that_halves_is_planned_for_within_20_steps(
    runner: StepRunner, planner_address: str, mismatch_frac: float
) -> None:
    """The window is long, so that nothing but the mismatch can ask."""
    parameters = PolicyParameters(min_window=96, max_window=256)
    with asking(
        runner, planner_address, mismatch_frac=mismatch_frac, parameters=parameters
    ) as controller:
        trace = Trace(controller)
        halved_at = 0

        def hook(scheduler: Any, step: int) -> None:
            nonlocal halved_at
            trace(scheduler, step)
            if step == 40:
                halve_the_link(runner)
                halved_at = len(trace.plans) - 1

        try:
            runner.run(STEADY, hook=hook)
        finally:
            restore_the_link(runner)

        alarms = trace.rises(trace.triggers, "mismatch", since=halved_at)
        plans = trace.rises(trace.plans, "applied", since=halved_at)
        if mismatch_frac:
            assert alarms, trace.triggers[-1]
            assert min(plans) <= 20
        else:
            assert not alarms
            assert min(plans, default=1_000) > 20
