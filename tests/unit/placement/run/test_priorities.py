"""Which of several priorities run: the urgent as if alone, the others in what is left."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.run.evenflow import decide
from services.placement.run.evenflow_rules import DEFAULT_RULES
from services.placement.run.reason import Reason
from services.placement.run.types import RunPhase, RunRequest, RunSnapshot
from tests.fuzz import examples
from tests.unit.placement.run.snapshots import (
    ask,
    make_engine,
    make_snapshot,
    parked,
    runs,
    snapshots,
)

# The pool of `make_engine` holds 1,600 tokens.
NO_COPY = {"num_host_tokens": 0, "num_computed_tokens": 800}
LATE_S = DEFAULT_RULES.raised_after_s


@st.composite
def mixed(draw) -> RunSnapshot:
    """Draw an engine with requests of up to three priorities, waits and copies of all kinds."""
    drawn = draw(snapshots())
    return replace(drawn, requests=tuple(_drawn(draw, request) for request in drawn.requests))


def _drawn(draw, request: RunRequest) -> RunRequest:
    num_host_tokens = request.num_host_tokens * draw(st.sampled_from([0, 1, 1]))
    return replace(
        request,
        priority=draw(st.sampled_from([-1, 0, 0, 5])),
        waited_s=draw(st.sampled_from([0.0, 10.0, LATE_S, 2 * LATE_S])),
        run_age_s=draw(st.sampled_from([0.1, 3.0, 30.0])) if request.runs else math.inf,
        num_host_tokens=num_host_tokens,
        num_computed_tokens=request.num_tokens if request.runs else 0,
    )


# -- where all are alike ---------------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(snapshot=snapshots(), priority=st.integers(-5, 5), waited_s=st.floats(0.0, 200.0))
def test_one_priority_is_none(snapshot: RunSnapshot, priority: int, waited_s: float) -> None:
    alike = [replace(r, priority=priority, waited_s=waited_s) for r in snapshot.requests]
    assert decide(replace(snapshot, requests=tuple(alike))) == decide(snapshot)


# -- the laws of every policy, over priorities -----------------------------------------------------


@settings(max_examples=examples(200))
@given(snapshot=mixed())
def test_some_request_runs_and_none_is_lost(snapshot: RunSnapshot) -> None:
    decision = decide(snapshot)
    running = {request.request_id for request in snapshot.requests if request.runs}

    assert decision.run
    assert len(set(decision.run)) == len(decision.run)
    assert not decision.park & set(decision.run)
    assert decision.park <= running <= decision.park | set(decision.run)
    assert decision.reasons.keys() == {request.request_id for request in snapshot.requests}
    assert decide(snapshot) == decision


@settings(max_examples=examples(200))
@given(snapshot=mixed())
def test_the_urgent_run_as_if_alone_unless_others_cannot_leave(snapshot: RunSnapshot) -> None:
    """Whatever wait the others have behind them is left out: none of them is raised."""
    fresh = [replace(r, waited_s=0.0, num_host_tokens=r.num_tokens) for r in snapshot.requests]
    rested = [replace(r, run_age_s=9.0) if r.runs else r for r in fresh]
    rested = [r for r in rested if r.phase is not RunPhase.RETURNING]
    if not rested:
        return
    most_urgent = min(r.priority for r in rested)
    urgent = tuple(r for r in rested if r.priority == most_urgent)
    together = decide(replace(snapshot, requests=tuple(rested)))
    alone = decide(replace(snapshot, requests=urgent))

    assert together.run[: len(alone.run)] == alone.run
    assert alone.park <= together.park
    assert together.offloads == alone.offloads


@settings(max_examples=examples(200))
@given(snapshot=mixed())
def test_a_request_without_a_complete_copy_leaves_only_what_the_urgent_outgrow(
    snapshot: RunSnapshot,
) -> None:
    decision = decide(snapshot)
    least = min(r.priority for r in snapshot.requests)
    urgent = [r for r in snapshot.requests if r.priority == least or r.waited_s >= LATE_S]
    here = [r for r in snapshot.requests if r.phase in (RunPhase.RUNNING, RunPhase.RETURNING)]
    others = [r for r in here if r not in urgent]
    lost = [r for r in others if r.request_id in decision.park and not r.num_host_tokens]
    in_pool = snapshot.num_blocks_of([*others, *(r for r in here if r in urgent)], growth=1)

    assert not lost or in_pool > snapshot.engine.num_blocks


# -- one by one ------------------------------------------------------------------------------------


def test_an_urgent_newcomer_takes_the_place_of_the_newest_of_the_others() -> None:
    old, new = (runs(n, 700, priority=5, age_s=a) for n, a in (("old", 30.0), ("new", 20.0)))
    decision = decide(make_snapshot(old, new, ask("urgent", 700)))

    assert decision.run == ("urgent", "old")
    assert decision.park == {"new"}
    assert decision.reasons["new"] is Reason.YIELDED


@pytest.mark.parametrize(
    "kept",
    [
        {"num_host_tokens": 0, "num_computed_tokens": 900},
        {"run_age_s": 0.1},
        {"num_output_tokens": 0, "num_host_tokens": 300, "num_computed_tokens": 317},
        {"num_host_tokens": 784, "num_computed_tokens": 800},
    ],
    ids=["no copy", "just came", "a prompt", "a block that it has just filled"],
)
def test_a_request_keeps_its_place_until_its_copy_is_complete(kept: dict[str, float]) -> None:
    low = runs("low", 900, priority=1, **kept)
    decision = decide(make_snapshot(low, ask("urgent", 900)))

    assert decision.run == ("low",)
    assert decision.reasons["urgent"] is Reason.NO_ROOM


@pytest.mark.parametrize("num_host_tokens", [320, 336])
def test_a_prompt_yields_between_two_pieces_once_they_are_copied(num_host_tokens: int) -> None:
    here = {"num_computed_tokens": 337, "num_host_tokens": num_host_tokens}
    low = runs("low", 900, priority=1, num_output_tokens=0, **here)
    decision = decide(make_snapshot(low, ask("urgent", 900)))
    assert ("low" in decision.park) is (num_host_tokens == 336)


def test_a_request_keeps_its_place_where_the_host_has_no_room() -> None:
    low, urgent = runs("low", 900, priority=1), ask("urgent", 900)
    decision = decide(make_snapshot(low, urgent, engine=make_engine(num_host_blocks=100)))
    assert decision.run == ("low",)


def test_what_the_urgent_outgrow_leaves_even_without_a_copy() -> None:
    low, urgent = runs("low", 800, priority=1, **NO_COPY), runs("urgent", 900)
    decision = decide(make_snapshot(urgent, low))
    assert (decision.run, decision.park) == (("urgent",), {"low"})


def test_none_comes_in_while_a_more_urgent_one_waits_for_room() -> None:
    others = ask("low", 50, priority=1), parked("back", 50, priority=1)
    busy = [runs(name, 700, priority=0) for name in ("a", "b")]
    decision = decide(make_snapshot(*busy, ask("urgent", 700), *others))

    assert decision.run == ("a", "b")
    assert {decision.reasons[r.request_id] for r in others} == {Reason.LESS_URGENT}


def test_the_others_come_back_before_newcomers_and_only_where_they_stay_for_a_while() -> None:
    # 1,600 tokens: 800 run; 700 and 48 of each fit beside, 60 more do not.
    decision = decide(
        make_snapshot(
            runs("urgent", 792),
            ask("new", 60, priority=1, age_s=50.0),
            parked("back", 640, priority=1),
        )
    )
    assert decision.run == ("urgent", "back")
    assert decision.reasons["new"] is Reason.NO_ROOM


def test_less_urgent_ones_leave_for_the_more_urgent_of_the_rest() -> None:
    decision = decide(
        make_snapshot(
            runs("urgent", 500),
            runs("batch", 700, priority=9, age_s=50.0),
            ask("middle", 700, priority=1),
        )
    )
    assert (decision.run, decision.park) == (("urgent", "middle"), {"batch"})


# -- raised ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("waited_s", [LATE_S - 1.0, LATE_S])
def test_a_request_that_has_waited_for_long_is_as_urgent_as_any(waited_s: float) -> None:
    low = parked("low", 700, priority=1, age_s=90.0, waited_s=waited_s)
    busy = [runs(name, 700) for name in ("a", "b")]
    decision = decide(make_snapshot(*busy, low))
    assert ("low" in decision.run) is (waited_s >= LATE_S)


@pytest.mark.parametrize("run_age_s", [1.0, DEFAULT_RULES.raised_turn_s])
def test_its_turn_is_as_long_as_it_says(run_age_s: float) -> None:
    low = runs("low", 700, priority=1, age_s=90.0, waited_s=LATE_S, run_age_s=run_age_s)
    decision = decide(make_snapshot(low, *[runs(name, 440) for name in ("a", "b")], ask("c", 440)))
    assert ("low" in decision.run) is (run_age_s < DEFAULT_RULES.raised_turn_s)


def test_one_at_a_time_has_a_turn() -> None:
    low = [
        parked(f"low{n}", 400, priority=1, age_s=90.0 + n, waited_s=LATE_S + n) for n in range(3)
    ]
    busy = [runs(f"r{n}", 380) for n in range(4)]
    decision = decide(make_snapshot(*busy, *low))
    assert {name for name in decision.run if name.startswith("low")} == {"low2"}


# -- prompts ---------------------------------------------------------------------------------------


def test_no_urgent_prompt_is_cut_for_a_reader_that_is_less_urgent() -> None:
    prompt = ask("urgent", 400, phase=RunPhase.RUNNING, run_age_s=0.0)
    reader = runs("reader", 100, rate_tps=5.0, slack_s=0.5, num_parks=0)

    def chunk(priority: int) -> int | None:
        return decide(make_snapshot(prompt, replace(reader, priority=priority))).chunk_tokens

    assert chunk(0) is not None
    assert chunk(1) is None
