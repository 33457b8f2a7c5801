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
from services.executor.convert import observation_to_proto
from services.executor.observation import from_plain
from services.executor.request_tag import to_extra_args
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


def place_trunks(scheduler: Any, placement: LayerPlacement) -> None:
    for trunk in scheduler.trunks:
        trunk.floor = placement


def note(message: Message, values: defaultdict[str, set[str]]) -> None:
    """Add what each field of a message says; an optional one may say nothing."""
    for field in message.DESCRIPTOR.fields:
        is_there = not field.has_presence or message.HasField(field.name)
        values[field.full_name].add(repr(getattr(message, field.name)) if is_there else "")
