"""The closed loop on a real engine: plans act, a bad planner costs quality and never tokens.

One engine on an emulated device, so that steps take the same time again and again; its planner is
a real one in a process of its own, or one that misbehaves by script.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from evenflow.planner.v1 import planner_pb2 as pb
from lab.engine.agents import agents
from lab.engine.closed_loop import TokenTimes, asking
from lab.engine.halved_link import measured_slo_s, run_arm
from lab.engine.link import h2d_link
from lab.engine.step_runner import (
    Arrival,
    EngineCase,
    Outcome,
    StepRunner,
    make_prompt,
)
from lab.engine.workloads import mixed, together
from lab.slow_device.emulated_device import LayerTime
from lab.stack.planner_process import warm_planner
from services.control.options import ControllerOptions
from services.executor.copies.device.cpu_device import LinkModel
from services.executor.kv_options import KVOptions
from services.executor.request_tag import to_extra_args
from services.pacing.attainment import violates_delivered_tbt
from services.pacing.deposit import due_times_s
from services.pacing.types import ServiceLevel
from services.placement.types import PolicyParameters, VictimRule
from tests.exact.reference import reference
from tests.exact.shared_prefixes import Sharing
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
        restore_when_free_frac=0.02,
        poison=True,
        max_pause_s=3_600.0,  # no hold ends by itself
    ),
    controller=ControllerOptions(plan_timeout_s=30.0, seed=7),
    layer_time=LayerTime(base_s=2e-3, per_token_s=1e-4, per_context_token_s=1e-6),
)
STEADY = [
    Arrival(request_id=f"s{n}", prompt=make_prompt(300, seed=90 + n), num_output_tokens=150)
    for n in range(3)
]


@pytest.fixture(scope="module")
def expected() -> Outcome:
    """What stock vLLM answers to `mixed`."""
    return reference("float32")["mixed"]


@pytest.fixture(scope="module")
def runner() -> Iterator[StepRunner]:
    runner = StepRunner(CASE)
    runner.run([replace(STEADY[0], num_output_tokens=2)])  # the first step brings the calibration
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def planner_address() -> Iterator[str]:
    with warm_planner(num_groups=8) as address:
        yield address


SHORT = [replace(arrival, num_output_tokens=32) for arrival in mixed()]


def assert_right(outcome: Outcome, expected: Outcome) -> None:
    """Assert that every request of `SHORT` has stock vLLM's first tokens."""
    assert outcome.tokens == {a.request_id: expected.tokens[a.request_id][:32] for a in SHORT}


def test_tokens_are_stock_vllms_while_plans_come_and_go(
    runner: StepRunner, expected: Outcome, planner_address: str
) -> None:
    with asking(runner, planner_address, patient=True) as loop:
        outcome = runner.run(SHORT)

        assert_right(outcome, expected)
        assert loop.counts.plans["applied"] >= 10
        assert outcome.num_offloads > 0
        assert outcome.num_restores > 0


class PlacedTrunks:
    """Counts, over steps, the trunks of several users that a plan has sent to the host."""

    def __init__(self) -> None:
        self.num_there = 0

    def __call__(self, scheduler: Any, step: int) -> None:
        for trunk in scheduler.block_owner.trunks.all:
            if trunk.floor is not None and len(trunk.users) > 1:
                self.num_there += trunk.floor.offloaded <= set(trunk.offloaded)


def test_what_requests_share_is_placed_by_plans_and_tokens_are_stock_vllms(
    runner: StepRunner, planner_address: str
) -> None:
    # Agents on a prefix of 8 * 13 blocks of 168, and on one of 8 * 21 that begins with it.
    expected = reference("float32")["agents"].tokens
    workload = [
        replace(a, num_output_tokens=32, step=a.step - 90)
        for a in agents()
        if a.request_id.startswith(("a1.", "a2."))
    ]
    sharing, placed = Sharing(runner), PlacedTrunks()
    with asking(runner, planner_address, patient=True) as loop:
        outcome = runner.run(workload, hook=together(sharing, placed))

        plans = loop.counts.plans
    assert plans["applied"] >= 10
    assert plans["applied"] > 0.8 * plans["asked"]
    assert outcome.tokens == {a.request_id: expected[a.request_id][:32] for a in workload}
    assert placed.num_there >= 10
    assert sharing.num_left > 0


@pytest.mark.nightly
def test_a_link_that_halves_is_planned_for_within_20_steps_and_readers_recover(
    runner: StepRunner, planner_address: str
) -> None:
    """Without the trigger nobody plans anew, and the readers fall behind for good.

    Some 17 and 75 tokens of a hundred are late after the change on a quiet machine.
    """
    slo_s = measured_slo_s(runner, planner_address)
    without = run_arm(runner, planner_address, slo_s=slo_s, mismatch_frac=0.0)
    trigger = run_arm(runner, planner_address, slo_s=slo_s, mismatch_frac=0.15)

    assert trigger.triggers["mismatch"] >= 1
    assert min(trigger.plans) <= 20
    assert "mismatch" not in without.triggers
    assert min(without.plans, default=1_000) > 20
    gain_frac = trigger.after.in_time_frac - without.after.in_time_frac
    assert gain_frac >= 0.25, (without, trigger)


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


SAID_BY_UNIT_TESTS = pytest.mark.nightly  # that of plan_rules; the engine asks for one verdict


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        pytest.param(refuse, "failed_internal", id="fails"),
        pytest.param(lambda snapshot, context: pb.Plan(), "failed_garbage", id="garbage"),
        pytest.param(
            changed(epoch=1_000_000), "rejected_epoch", id="another-epoch", marks=SAID_BY_UNIT_TESTS
        ),
        pytest.param(
            changed(policy="tokenflow"),
            "rejected_policy",
            id="another-policy",
            marks=SAID_BY_UNIT_TESTS,
        ),
        pytest.param(
            changed(placements=[pb.Placement(request_id="nobody")]),
            "rejected_unknown_id",
            id="unknown-id",
            marks=SAID_BY_UNIT_TESTS,
        ),
        pytest.param(
            changed(placements=[pb.Placement(request_id="r1", offloaded_layers=[99])]),
            "rejected_shape",
            id="no-such-layer",
            marks=SAID_BY_UNIT_TESTS,
        ),
        pytest.param(everything_resident, "rejected_capacity", id="more-than-the-pool"),
    ],
)
def test_a_bad_planner_costs_no_token(
    runner: StepRunner, expected: Outcome, answer: Answer, count: str
) -> None:
    with scripted_planner() as planner:
        planner.answer = answer
        with asking(runner, planner.address, patient=True) as loop:
            outcome = runner.run(SHORT)

            assert loop.counts.plans[count] >= 1, loop.counts.plans
    assert_right(outcome, expected)


def test_a_planner_that_hangs_costs_no_token(runner: StepRunner, expected: Outcome) -> None:
    with scripted_planner() as planner:
        planner.answer = hang
        with asking(runner, planner.address, timeout_s=0.3, patient=True) as loop:
            outcome = runner.run(SHORT)

            assert loop.counts.plans["failed_deadline_exceeded"] >= 1
    assert_right(outcome, expected)


def test_a_late_plan_costs_no_token(runner: StepRunner, expected: Outcome) -> None:
    """Each comes when more steps have passed than it is good for."""
    steps: list[int] = []

    def late(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        asked_at = len(steps)
        while context.is_active() and len(steps) < asked_at + 5:
            time.sleep(1e-3)
        plan = keep_everything(snapshot, context)
        plan.quality.expires_after = 2
        return plan

    with scripted_planner() as planner:
        planner.answer = late
        with asking(runner, planner.address) as loop:
            outcome = runner.run(SHORT, hook=lambda scheduler, step: steps.append(step))

            assert loop.counts.plans["ignored_expired"] >= 1, loop.counts.plans
    assert_right(outcome, expected)


def test_a_planner_that_dies_in_the_middle_costs_no_token(
    runner: StepRunner, expected: Outcome
) -> None:
    with scripted_planner() as planner, asking(runner, planner.address, patient=True) as loop:
        planner.answer = lambda snapshot, context: (
            keep_everything(snapshot, context) if snapshot.epoch < 4 else refuse(snapshot, context)
        )
        outcome = runner.run(SHORT)

        assert loop.counts.plans["applied"] >= 1
        assert loop.counts.plans["failed_internal"] >= 1
    assert_right(outcome, expected)


# -- pauses --------------------------------------------------------------------------------------


def pausing(*names: str) -> Answer:
    """Answer with some requests paused, for ever."""

    def answer(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        plan = keep_everything(snapshot, context)
        for placement in plan.placements:
            placement.paused = placement.request_id in names
        return plan

    return answer


@pytest.mark.parametrize("victims", [("s1",), ("s0", "s1", "s2")], ids=["one", "all"])
def test_nobody_starves_though_the_planner_pauses_for_ever(
    runner: StepRunner, victims: tuple[str, ...]
) -> None:
    parameters = PolicyParameters(min_pause_s=0.1, max_pause_s=0.4)
    workload = [replace(a, num_output_tokens=24) for a in STEADY]
    plain = runner.run(workload)
    times = TokenTimes()
    with scripted_planner() as planner:
        planner.answer = pausing(*victims)
        with asking(runner, planner.address, parameters=parameters) as loop:
            outcome = runner.run(workload, hook=times)

            assert loop.counts.triggers["resumed"] >= 1
    assert outcome.tokens == plain.tokens
    longest_s = max(gap_s for name in plain.tokens for gap_s in gaps_of(times.generated_s[name]))
    assert longest_s >= 0.1  # somebody was paused


def gaps_of(times_s: Sequence[float]) -> list[float]:
    return [after_s - before_s for before_s, after_s in pairwise(times_s)]


def num_late(delivered_s: Sequence[float], interval_s: float) -> int:
    """Return how many tokens violate the delivered TBT, if each comes when it is due."""
    return sum(violates_delivered_tbt(b, a, interval_s) for a, b in pairwise(delivered_s))


def paused_with_a_deposit(name: str, *, num_tokens: int) -> Answer:
    """Answer with one pause of one request, from when its reader has so many tokens in hand."""

    def answer(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        plan = keep_everything(snapshot, context)
        for request, placement in zip(snapshot.requests, plan.placements, strict=True):
            if request.request_id == name:
                began = request.HasField("resumed_age_s")
                begins = not began and request.num_deposited_tokens >= num_tokens
                placement.paused = begins or request.phase == pb.REQUEST_PHASE_PAUSED
        return plan

    return answer


@pytest.mark.nightly
def test_a_pause_shorter_than_the_deposit_lasts_is_not_seen_by_the_reader(
    runner: StepRunner,
) -> None:
    """Reading takes 1.5 s a token, so that 12 tokens in hand last 18 s; the pause takes 2 s."""
    interval_s, pause_s = 1.5, 2.0
    level = ServiceLevel(consumption_rate_tps=1 / interval_s)
    sampling = {"extra_args": to_extra_args(level)}
    workload = [  # the others run on for longer than the pause
        replace(a, num_output_tokens=24 if a.request_id == "s1" else 120, sampling=sampling)
        for a in STEADY
    ]
    times = TokenTimes()
    with scripted_planner() as planner:
        planner.answer = paused_with_a_deposit("s1", num_tokens=12)
        parameters = PolicyParameters(min_pause_s=0.1, max_pause_s=pause_s)
        with asking(runner, planner.address, parameters=parameters):
            runner.run(workload, hook=times)

    generated_s = times.generated_s["s1"]
    assert max(gaps_of(generated_s)) >= pause_s
    assert num_late(generated_s, interval_s) == 1  # without a deposit the pause is seen
    assert num_late(due_times_s(generated_s, interval_s), interval_s) == 0
    # A deposit of 24 tokens or fewer lasts 1.2 s at most where reading takes a twentieth of one.
    assert num_late(due_times_s(generated_s, 0.05), 0.05) >= 1


def test_a_held_request_is_not_scheduled_and_goes_on_with_the_same_tokens(
    runner: StepRunner,
) -> None:
    """Its layers leave the pool meanwhile; what its reader has in hand stays as it was."""
    workload = [replace(a, num_output_tokens=40) for a in STEADY]
    plain = runner.run(workload)
    held: list[tuple[int, int]] = []  # tokens generated, tokens in hand

    def hook(scheduler: Any, step: int) -> None:
        if step == 10:
            scheduler.hold({"s1": True})
        elif step > 11 and len(held) < 20:
            buffer = scheduler.records["s1"].buffer
            held.append((buffer.num_generated, buffer.num_deposited(time.monotonic())))
            assert "s1" not in scheduler.loop.ledger.last_scheduled
            if len(held) == 20:
                scheduler.hold({"s1": False})

    with scripted_planner() as planner, asking(runner, planner.address, patient=True):
        outcome = runner.run(workload, hook=hook)

    assert outcome.tokens == plain.tokens
    ((num_generated, num_deposited),) = set(held)
    assert num_generated == num_deposited > 0  # nothing was delivered
    assert any(r.request_id == "s1" and r.on_hold for s in planner.snapshots for r in s.requests)


def test_who_comes_gets_the_room_of_a_request_whose_reader_has_stopped(
    runner: StepRunner,
) -> None:
    """The pool holds little more than one of them; where both are read, the later has less."""
    workload = [
        Arrival(
            request_id=name, prompt=make_prompt(400, seed=step), num_output_tokens=40, step=step
        )
        for name, step in (("held", 0), ("other", 12))
    ]
    groups_away = {"held": set[int](), "other": set[int]()}  # of each, while both are there
    num_generated: set[int] = set()  # of the held request

    def look(scheduler: Any, step: int) -> None:
        if groups_away.keys() <= scheduler.requests.keys():
            for name, away in groups_away.items():
                if kv := scheduler.records[name].kv:
                    away.add(len(kv.offloaded))

    def hold(scheduler: Any, step: int) -> None:
        look(scheduler, step)
        if step == 10:
            scheduler.hold({"held": True})
        elif step == 12 or (step > 12 and "other" in scheduler.requests):
            num_generated.add(scheduler.records["held"].buffer.num_generated)
        elif step > 12:
            scheduler.hold({"held": False})

    plain = runner.run(workload, hook=look)
    assert groups_away["held"] == {0}
    assert 0 not in groups_away["other"]
    for away in groups_away.values():
        away.clear()
    outcome = runner.run(workload, hook=hold)

    assert outcome.tokens == plain.tokens
    assert max(groups_away["held"]) > 0
    assert 0 in groups_away["other"]
    assert len(num_generated) == 1


# -- the snapshot --------------------------------------------------------------------------------


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


@pytest.mark.nightly
def test_under_load_every_field_of_the_snapshot_is_filled(runner: StepRunner) -> None:
    level = ServiceLevel(slo_ttft_s=1.0, slo_tpot_s=0.2, slo_tbt_s=0.3, consumption_rate_tps=5.0)
    sampling = {"extra_args": to_extra_args(level)}
    workload = [replace(a, sampling=sampling, num_output_tokens=60) for a in [*mixed(8), *STEADY]]
    parameters = PolicyParameters(
        deposit=True,
        pause=True,
        victim_rule=VictimRule.LONGEST,
        even_patterns_only=True,
        min_pause_s=0.05,
        max_pause_s=0.3,
    )

    kept_back: list[str] = []

    def hook(scheduler: Any, step: int) -> None:
        for request in scheduler.requests.values():
            request.priority = 1
        if step in (30, 50):
            scheduler.hold({"r0": step == 30})
        if step == 60:  # one of them stays in the queue for a while
            kept_back.append(scheduler.running[-1].request_id)
            while scheduler.running:
                scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
        if kept_back and step in (60, 64):
            scheduler.hold({kept_back[-1]: step == 60})

    def answer(snapshot: pb.Snapshot, context: grpc.ServicerContext) -> pb.Plan:
        plan = pausing("r2", "s1")(snapshot, context)
        paused = [placement for placement in plan.placements if placement.paused]
        del plan.placements[:]
        plan.placements.extend(paused)  # of the others the guard brings back what it can
        plan.quality.window = 1  # a snapshot in every step: in those of a restore, too
        return plan

    filled: set[str] = set()
    for slowdown in (4, 16, 64):  # until a restore takes longer than a step of this machine
        slow = LinkModel(bytes_per_s=LINK_BYTES_PER_S / slowdown, latency_s=0.1e-3)
        with scripted_planner() as planner, h2d_link(slow):
            planner.answer = answer
            with asking(runner, planner.address, patient=True, parameters=parameters):
                outcome = runner.run(workload, hook=hook)
        assert outcome.num_restores > 0
        filled |= set().union(*(set_fields(snapshot) for snapshot in planner.snapshots))
        if all_fields(pb.Snapshot.DESCRIPTOR) == filled:
            return
    assert all_fields(pb.Snapshot.DESCRIPTOR) == filled
