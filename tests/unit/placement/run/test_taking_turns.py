"""What `evenflow` and `joint` decide alike: who joins, whose layers leave, who takes turns."""

from collections.abc import Callable
from typing import TypeAlias

import pytest

from lab.policies import joint
from services.placement.run import evenflow
from services.placement.run.types import RunDecision, RunSnapshot
from tests.unit.placement.run.snapshots import (
    SLOW,
    ask,
    make_engine,
    make_snapshot,
    parked,
    runs,
)

Decide: TypeAlias = Callable[[RunSnapshot], RunDecision]
pytestmark = pytest.mark.parametrize(
    "decide", [evenflow.decide, joint.decide], ids=["evenflow", "joint"]
)


def test_those_who_fit_come_in_the_order_of_their_arrival(decide: Decide) -> None:
    decision = decide(make_snapshot(runs("a", 400), ask("b", 400), ask("c", 400), ask("d", 800)))

    assert decision.run == ("a", "b", "c")
    assert not decision.park
    assert not decision.offloads
    assert decision.chunk_tokens is None


def test_layers_leave_where_nobody_reads_slower_for_it(decide: Decide) -> None:
    # At 5 tokens/s a step may take 190 ms, but three must get no less than two do in 22 ms.
    batch = [runs(name, 600, rate_tps=5.0, slack_s=1.0) for name in "ab"]
    newcomer = ask("c", 600, rate_tps=5.0)

    fast = decide(make_snapshot(*batch, newcomer, h2d_bytes_per_s=3e7))
    slow = decide(make_snapshot(*batch, newcomer, h2d_bytes_per_s=SLOW))

    assert fast.run == ("a", "b", "c")
    assert fast.offloads
    assert slow.run == ("a", "b")
    assert not slow.offloads


def test_a_reader_with_much_in_hand_makes_room_for_a_newcomer_and_others_do_not(
    decide: Decide,
) -> None:
    def decision(slack_s: float) -> RunDecision:
        batch = [runs(f"r{n}", 230, rate_tps=5.0, slack_s=slack_s) for n in range(6)]
        return decide(make_snapshot(*batch, ask("new", 230, rate_tps=5.0)))

    rich, poor = decision(60.0), decision(1.0)

    assert len(rich.park) == 1
    assert "new" in rich.run
    assert not poor.park
    assert "new" not in poor.run


def test_a_request_that_is_parked_returns_before_its_reader_lacks_a_token(decide: Decide) -> None:
    batch = [runs(f"r{n}", 230, rate_tps=5.0, slack_s=30.0) for n in range(6)]
    due = parked("due", 230, rate_tps=5.0, slack_s=0.5, age_s=40.0)
    rich = parked("rich", 230, rate_tps=5.0, slack_s=25.0, age_s=40.0)

    decision = decide(make_snapshot(*batch, due, rich))

    assert "due" in decision.run
    assert "rich" not in decision.run
    assert len(decision.park) == 1


@pytest.mark.parametrize(("num_host_blocks", "is_room"), [(420, True), (419, False)])
def test_nobody_takes_turns_where_the_host_has_no_room_for_all(
    decide: Decide, num_host_blocks: int, is_room: bool
) -> None:
    # Seven of 60 blocks each, in a pool of 400.
    batch = [runs(f"r{n}", 230, rate_tps=5.0, slack_s=60.0) for n in range(6)]
    newcomer = ask("new", 230, rate_tps=5.0)
    engine = make_engine(num_host_blocks=num_host_blocks)

    decision = decide(make_snapshot(*batch, newcomer, engine=engine, mean_answer_tokens=1.0))

    assert ("new" in decision.run) == is_room
    assert len(decision.park) == is_room
