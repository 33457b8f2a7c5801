"""What `evenflow watch` shows changes with the engine of `test_metrics.py`, which imports this."""

import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from cli.client.engine_view import STATES, summary_lines
from cli.client.engine_watch import EngineState
from evenflow.executor.v1 import executor_pb2 as pb
from lab.engine.orders import forget_free_blocks, park, pause, place, resume
from lab.engine.step_runner import Arrival, StepRunner, make_prompt
from services.executor import kv_holders
from services.executor.convert import kv_account_to_proto, observation_to_proto
from services.executor.observation import from_plain
from services.executor.request_tag import KeptTokens, to_extra_args, with_kept
from services.executor.scheduler import retaining
from services.executor.serving.kv_account import account_of
from services.executor.types import Holder, Submission
from services.generation.prompts import TextPrompt
from services.pacing.types import ServiceLevel
from services.placement.layer_placement import LayerPlacement
from services.placement.run.resume import ResumeWay
from tests.exact.scenes import copies_complete
from tests.link_gate import LinkGate

PLAIN = Arrival(request_id="plain", prompt=make_prompt(70, seed=6), num_output_tokens=30)
PACED = replace(  # its reader is faster than any engine, and its gateway goes on after the end
    PLAIN,
    request_id="paced",
    prompt=make_prompt(150, seed=5),
    sampling={"extra_args": to_extra_args(ServiceLevel(consumption_rate_tps=1e6, pace_tail=True))},
)


ALIKE = [  # they come later, and begin as the others do
    replace(one, request_id=f"{one.request_id} too", prompt=[*one.prompt, 7, 8], step=6)
    for one in (PACED, PLAIN)
]


def test_every_field_of_watch_follows_the_engine(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is computed in parts, read, held, moved to the host, parked, and loaded again.

    Beside others, with which it shares what it begins with.
    """
    scheduler, state, gates = runner.scheduler, EngineState(), list[LinkGate]()
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 64)
    monkeypatch.setattr(scheduler.block_owner.trunks, "min_tokens", 32)
    monkeypatch.setattr(scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    values: defaultdict[str, set[str]] = defaultdict(set)
    places: set[int] = set()
    shown = ""
    away = LayerPlacement(offloaded=frozenset({7}), num_staging=1)
    acts = {
        8: lambda: scheduler.deliver({"paced": (2, time.monotonic())}),
        9: lambda: place(scheduler, "paced", away),
        10: lambda: place_trunks(scheduler, away),
        12: lambda: pause(scheduler, "paced"),
        14: lambda: resume(scheduler, "paced"),
        17: lambda: park(scheduler, "paced"),
        19: lambda: forget_free_blocks(scheduler),
        20: lambda: gates.append(LinkGate(monkeypatch)),
        21: lambda: resume(scheduler, "paced"),
        26: lambda: gates[0].open(),
    }

    def hook(scheduler: Any, step: int) -> None:
        nonlocal shown
        if step < 20:
            copies_complete(scheduler, step)
        acts.get(step, lambda: None)()
        update = observation_to_proto(from_plain(scheduler.observe()))
        state.take(update, now_s=float(step))
        shown += "\n".join(summary_lines(state))
        for message in (update, *update.requests, *update.prefixes):
            note(message, values)
        places.update(place for request in update.requests for place in request.residency)

    runner.run([PACED, PLAIN, *ALIKE], hook=hook)

    kinds = (pb.WatchRequestsResponse, pb.ObservedRequest, pb.ObservedPrefix)
    fields = {field.full_name for kind in kinds for field in kind.DESCRIPTOR.fields}
    still = {name for name in fields if len(values[name]) < 2}
    update_name = pb.WatchRequestsResponse.DESCRIPTOR.full_name
    # `test_drafts.py` sees the last one change: nothing drafts here.
    constant = ("num_pool_blocks", "num_host_blocks", "tokens_per_step")
    assert still == {f"{update_name}.{name}" for name in constant}
    assert {name for name, _ in STATES.values() if f": {name}" not in shown} == set()
    assert "shared 128 tokens" in shown
    assert places == set(pb.Residency.values()) - {pb.RESIDENCY_UNSPECIFIED}


def test_every_field_of_the_account_of_kv_follows_the_engine(
    runner: StepRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests share what they begin with; one is parked, loaded again, and kept for its session
    once it has ended; the next one goes on from that.
    """
    scheduler, kept = runner.scheduler, KeptTokens("alice", "s", [(0, 3_600.0)])
    monkeypatch.setattr(scheduler.block_owner.trunks, "min_tokens", 32)
    monkeypatch.setattr(scheduler.control.resumes, "choose_way", lambda *_: ResumeWay.LOAD)
    sampling = {"extra_args": with_kept({}, kept)}
    workload = [replace(PACED, sampling=sampling), PLAIN, *ALIKE, replace(PLAIN, step=90)]
    workload[-1] = replace(workload[-1], request_id="later")
    submissions = {one.request_id: submission_of(one.request_id) for one in workload}
    values: defaultdict[str, set[str]] = defaultdict(set)
    sessions: list[pb.HoldingSession] = []
    acts = {
        12: lambda: park(scheduler, "paced"),
        16: lambda: forget_free_blocks(scheduler),
        18: lambda: resume(scheduler, "paced"),
        95: lambda: monkeypatch.setattr(retaining, "MAX_COUNTED_COLUMNS", 0),
        97: lambda: scheduler.release_session("alice", "s"),
    }

    def hook(scheduler: Any, step: int) -> None:
        copies_complete(scheduler, step)
        acts.get(step, lambda: None)()
        holders = kv_holders.from_plain(scheduler.kv_holders(9))
        told = kv_account_to_proto(account_of(holders, submissions, limit=9))
        sessions.extend(told.sessions)
        for message in (told, *told.requests, *told.sessions, *told.shares):
            note(message, values)

    runner.run(workload, hook=hook)

    kinds = (
        pb.GetKVHoldersResponse,
        pb.HoldingRequest,
        pb.HoldingSession,
        pb.HoldingShare,
    )
    fields = {field.full_name for kind in kinds for field in kind.DESCRIPTOR.fields}
    session_name = pb.HoldingSession.DESCRIPTOR.full_name
    constant = {  # one session is kept; all have one priority
        *(f"{session_name}.{name}" for name in ("account", "session_id")),
        f"{pb.HoldingRequest.DESCRIPTOR.full_name}.priority",
    }
    still = {name for name in fields if len(values[name]) < 2}
    assert still == constant, still ^ constant
    counted = [one for one in sessions if one.HasField("retained_for_s")]
    assert 0 < len(counted) < len(sessions)
    assert all(one.num_host_tokens <= one.num_retained_tokens for one in counted)
    # A copy that ends behind its own step is told of with the next one.
    assert all(one.num_host_tokens > 0 for one in counted[2:])
    assert all(3_000.0 < one.retained_for_s <= 3_601.0 for one in counted)


def submission_of(request_id: str) -> Submission:
    """Return what a gateway would have said of a request."""
    account = "bob" if request_id == "later" else "alice"
    kind = "agent" if "paced" in request_id else "batch"
    holder = Holder(account=account, session_id=request_id, request_class=kind)
    prompt = TextPrompt("")
    return Submission(request_id=request_id, generation=1, model="m", prompt=prompt, holder=holder)


def place_trunks(scheduler: Any, placement: LayerPlacement) -> None:
    for trunk in scheduler.trunks:
        trunk.floor = placement


def note(message: Message, values: defaultdict[str, set[str]]) -> None:
    """Add what each field of a message says; an optional one may say nothing."""
    for field in message.DESCRIPTOR.fields:
        is_there = not field.has_presence or message.HasField(field.name)
        values[field.full_name].add(repr(getattr(message, field.name)) if is_there else "")
