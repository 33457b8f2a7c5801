"""The closed loop on a real engine: plans act, a bad planner costs quality and never tokens.

One engine on an emulated device, so that steps take the same time again and again; its planner is
a real one in a process of its own, or one that misbehaves by script.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from evenflow.planner.v1 import planner_pb2 as pb
from services.executor.controller.options import ControllerOptions
from services.executor.controller.planner_client import PlannerClient
from services.executor.kv.copy_engine import Direction
from services.executor.kv.cpu_copy_engine import LinkModel
from services.executor.kv.options import KVOptions
from services.executor.service_level import RequestTag, to_extra_args
from services.pacing.types import ServiceLevel
from services.placement.types import BufferMode, PolicyParameters, VictimRule
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
from tests.scripted_planner import Answer, keep_everything, scripted_planner

# Engines run in this process: their warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

LINK_BYTES_PER_S = 5e7  # 16 KiB blocks: 0.3 ms each
CASE = EngineCase(
    num_blocks=168,  # 40 % of what `mixed` takes
    kv=KVOptions(
        host_bytes=256 << 20,
        h2d_bytes_per_s=LINK_BYTES_PER_S,
        d2h_bytes_per_s=LINK_BYTES_PER_S,
        copy_latency_s=0.1e-3,
        emulated_layer_s=2e-3,
        emulated_token_s=1e-4,
        emulated_context_token_s=1e-6,
        restore_when_free_frac=0.02,
        poison=True,
    ),
    controller=ControllerOptions(plan_timeout_s=30.0, seed=7),
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
    runner.run([replace(STEADY[0], num_output_tokens=2)])  # the first step brings the calibration
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
    log_stats, runner.scheduler.log_stats = runner.scheduler.log_stats, False  # counts add up
    swap_controller(runner, replace(CASE.controller, **options), client)
    try:
        yield runner.scheduler.controller
    finally:
        client.close()
        runner.scheduler.log_stats = log_stats
        swap_controller(runner, CASE.controller, None)


def swap_controller(
    runner: StepRunner, options: ControllerOptions, client: PlannerClient | None
) -> None:
    """Start with a new controller, which knows the calibrated link and nothing else."""
    before = runner.scheduler.controller.meter
    runner.scheduler.set_up(options, client)
    after = runner.scheduler.controller.meter
    after._h2d, after._d2h = before._h2d, before._d2h


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


def set_link(bytes_per_s: float) -> None:
    """Change the speed of the modelled link into the pool."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    queue = connector._backend.engine._queues[Direction.H2D]
    queue._link = LinkModel(bytes_per_s=bytes_per_s)


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
                set_link(LINK_BYTES_PER_S / 2)
                halved_at = len(trace.plans) - 1

        try:
            runner.run(STEADY, hook=hook)
        finally:
            set_link(LINK_BYTES_PER_S)

        alarms = trace.rises(trace.triggers, "mismatch", since=halved_at)
        plans = trace.rises(trace.plans, "applied", since=halved_at)
        if mismatch_frac:
            assert alarms, trace.triggers[-1]
            assert min(plans) <= 20
        else:
            assert not alarms
            assert min(plans, default=1_000) > 20


# -- planners that misbehave ---------------------------------------------------------------------


def hang(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
    while context.is_active():  # until the client gives up
        time.sleep(0.01)
    return pb.Plan()


def refuse(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
    context.abort(grpc.StatusCode.INTERNAL, "out of order")
    raise AssertionError


def changed(**fields: Any) -> Answer:
    """Answer soundly but for some fields of the plan."""

    def answer(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        plan = keep_everything(snapshot, context)
        plan.MergeFrom(pb.Plan(**fields))
        return plan

    return answer


def everything_resident(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
    plan = keep_everything(snapshot, context)
    for placement in plan.placements:
        placement.ClearField("offloaded_layers")
        placement.num_prefetch_buffers = 0
    return plan


def late(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
    time.sleep(0.2)  # some ten steps
    plan = keep_everything(snapshot, context)
    plan.quality.expires_after = 2
    return plan


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        pytest.param(hang, "failed_deadline_exceeded", id="hangs"),
        pytest.param(refuse, "failed_internal", id="fails"),
        pytest.param(lambda snapshot, context: pb.Plan(), "failed_garbage", id="garbage"),
        pytest.param(changed(epoch=1_000_000), "rejected_epoch", id="another-epoch"),
        pytest.param(changed(policy="joint"), "rejected_policy", id="another-policy"),
        pytest.param(
            changed(placements=[pb.Placement(request_id="nobody")]),
            "rejected_unknown_id",
            id="unknown-id",
        ),
        pytest.param(
            changed(placements=[pb.Placement(request_id="r1", offloaded_layers=[99])]),
            "rejected_shape",
            id="no-such-layer",
        ),
        pytest.param(everything_resident, "rejected_capacity", id="more-than-the-pool"),
        pytest.param(late, "ignored_expired", id="late"),
    ],
)
def test_a_bad_planner_costs_no_token(
    runner: StepRunner, reference: Outcome, answer: Answer, count: str
) -> None:
    workload = [replace(a, num_output_tokens=32) for a in mixed()]
    with scripted_planner() as planner:
        planner.answer = answer
        with asking(runner, planner.address, timeout_s=0.3) as controller:
            outcome = runner.run(workload)

            assert controller.counts.plans[count] >= 1, controller.counts.plans
    for arrival in workload:
        expected = reference.tokens[arrival.request_id][:32]
        assert outcome.tokens[arrival.request_id] == expected


def test_a_planner_that_dies_in_the_middle_costs_no_token(
    runner: StepRunner, reference: Outcome
) -> None:
    workload = [replace(a, num_output_tokens=32) for a in mixed()]
    with scripted_planner() as planner, asking(runner, planner.address) as controller:
        planner.answer = lambda snapshot, context: (
            keep_everything(snapshot, context) if snapshot.epoch < 4 else refuse(snapshot, context)
        )
        outcome = runner.run(workload)

        assert controller.counts.plans["applied"] >= 1
        assert controller.counts.plans["failed_internal"] >= 1
    for arrival in workload:
        assert outcome.tokens[arrival.request_id] == reference.tokens[arrival.request_id][:32]


# -- pauses --------------------------------------------------------------------------------------


def pausing(*names: str) -> Answer:
    """Answer with some requests paused, for ever."""

    def answer(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        plan = keep_everything(snapshot, context)
        for placement in plan.placements:
            placement.paused = placement.request_id in names
        return plan

    return answer


class Gaps:
    """The longest time between two tokens of each request, measured around engine steps."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float]] = {}
        self.longest_s: dict[str, float] = {}

    def __call__(self, scheduler: Any, step: int) -> None:
        now_s = time.monotonic()
        for request in scheduler.running:
            name, number = request.request_id, request.num_output_tokens
            before, since_s = self._last.get(name, (0, now_s))
            if number and before:
                self.longest_s[name] = max(self.longest_s.get(name, 0.0), now_s - since_s)
            if number != before:
                self._last[name] = (number, now_s)


@pytest.mark.parametrize("victims", [("s1",), ("s0", "s1", "s2")], ids=["one", "all"])
def test_nobody_starves_though_the_planner_pauses_for_ever(
    runner: StepRunner, victims: tuple[str, ...]
) -> None:
    parameters = PolicyParameters(min_pause_s=0.1, max_pause_s=0.4)
    workload = [replace(a, num_output_tokens=24) for a in STEADY]
    plain = runner.run(workload)
    gaps = Gaps()
    with scripted_planner() as planner:
        planner.answer = pausing(*victims)
        with asking(runner, planner.address, parameters=parameters) as controller:
            outcome = runner.run(workload, hook=gaps)

            assert controller.counts.triggers["resumed"] >= 1
    assert outcome.tokens == plain.tokens
    assert max(gaps.longest_s.values()) >= 0.1  # somebody was paused
    # The bound holds for each pause; a resumed request then has its turn within a step or two.
    assert max(gaps.longest_s.values()) < 0.4 + 5.0


# -- the snapshot --------------------------------------------------------------------------------

NEVER_SET = {
    "requests.num_uncached_tokens",  # no policy recomputes a prefix
}


def set_fields(message: Message, prefix: str = "") -> set[str]:
    """Return the paths of all fields that differ from their default, of repeated ones together."""
    found = set()
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        found.add(path)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for entry in value if field.is_repeated else [value]:
                found |= set_fields(entry, f"{path}.")
    return found


def all_fields(descriptor: Any, prefix: str = "") -> set[str]:
    found = set()
    for field in descriptor.fields:
        path = f"{prefix}{field.name}"
        found.add(path)
        if field.message_type is not None:
            found |= all_fields(field.message_type, f"{path}.")
    return found


def test_under_load_every_field_of_the_snapshot_is_filled(runner: StepRunner) -> None:
    level = ServiceLevel(slo_ttft_s=1.0, slo_tpot_s=0.2, slo_tbt_s=0.3, consumption_rate_tps=5.0)
    sampling = {"extra_args": to_extra_args(RequestTag(service_level=level))}
    workload = [replace(a, sampling=sampling) for a in [*mixed(), *STEADY]]
    parameters = PolicyParameters(
        placement_policy="optimiser",
        run_policy="fcfs",
        admission_policy="fcfs",
        deposit=True,
        pause=True,
        victim_rule=VictimRule.LONGEST,
        buffer_mode=BufferMode.PRIVATE,
        even_patterns_only=True,
        overlap=False,
        slo_aware=False,
        min_pause_s=0.05,
        max_pause_s=0.3,
    )

    def hook(scheduler: Any, step: int) -> None:
        for request in scheduler.requests.values():
            request.priority = 1
        if step == 30:
            scheduler.controller.ledger.entries["r0"].on_hold = True
        if step == 60:  # as vLLM does when it runs out of blocks
            victim = scheduler.running.pop()
            scheduler._preempt_request(victim, time.monotonic())

    with scripted_planner() as planner:
        planner.answer = pausing("r2", "s1")
        with asking(runner, planner.address, parameters=parameters):
            runner.run(workload, hook=hook)

    filled = set().union(*(set_fields(snapshot) for snapshot in planner.snapshots))
    assert all_fields(pb.Snapshot.DESCRIPTOR) - filled == NEVER_SET
