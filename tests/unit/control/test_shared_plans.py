"""Planning for what requests share: said once, placed by plans, forgotten with them."""

from dataclasses import replace

import pytest

from lab.planning.snapshots import BLOCK_SIZE
from services.control import planning
from services.control.types import Trigger
from services.placement.judging.contradiction import find_contradiction
from services.placement.layer_placement import LayerPlacement
from services.placement.types import PrefixId, PrefixPlacement, PrefixState
from tests.unit.control.fake_engine import NUM_TOKENS, place
from tests.unit.control.test_step_loop import Bench


def shared(name: str, *layers: int) -> PrefixPlacement:
    return PrefixPlacement(
        prefix_id=PrefixId(name),
        offloaded_layers=layers,
        num_prefetch_buffers=1 if layers else 0,
    )


def test_the_planner_sees_own_parts_and_once_what_several_begin_with() -> None:
    bench = Bench("a", "b", "c")
    bench.steps(40)
    whole = bench.planner.asked[-1]
    bench.engine.share("t", "a", "b")
    bench.engine.share("u", "a")
    bench.engine.num_free_blocks = 10_000 - 2 * 16

    bench.loop.note(Trigger.PREEMPTED)
    bench.step()

    asked = bench.planner.asked[-1]
    a, b, c = asked.requests
    assert [one.prefix_ids for one in (a, b, c)] == [("t", "u"), ("t",), ()]
    assert a.num_prompt_tokens == whole.requests[0].num_prompt_tokens - 4 * BLOCK_SIZE
    assert a.num_computed_tokens == whole.requests[0].num_computed_tokens - 4 * BLOCK_SIZE
    assert replace(b, prefix_ids=()).num_tokens == c.num_tokens - 2 * BLOCK_SIZE
    assert asked.prefixes == tuple(
        PrefixState(
            prefix_id=PrefixId(name),
            num_tokens=2 * BLOCK_SIZE,
            num_blocks=(2,) * 8,
            num_host_blocks=(2,) * 8,
        )
        for name in "tu"
    )
    assert asked.engine == whole.engine
    assert find_contradiction(asked) is None


def test_a_prompt_that_is_shared_to_its_end_keeps_a_token() -> None:
    bench = Bench("a")
    bench.engine.requests["a"].num_prompt_tokens = 2 * BLOCK_SIZE
    bench.engine.share("t", "a")

    bench.loop.note(Trigger.ADMITTED)
    bench.steps(6)

    (a,) = bench.planner.asked[-1].requests
    assert (a.num_prompt_tokens, a.num_computed_tokens) == (1, NUM_TOKENS - 2 * BLOCK_SIZE)


def test_what_only_requests_in_the_queue_begin_with_is_not_said() -> None:
    bench = Bench("a", "b")
    bench.engine.share("t", "b")
    bench.engine.records["b"].preempted()

    bench.loop.note(Trigger.ADMITTED)
    bench.steps(6)

    asked = bench.planner.asked[-1]
    assert asked.prefixes == ()
    assert [one.prefix_ids for one in asked.requests] == [(), ()]


def test_no_more_is_said_than_a_snapshot_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_REQUESTS", 2)
    bench = Bench("a", "b")
    bench.engine.share("t", "a", "b")
    bench.engine.share("u", "b")
    bench.engine.share("v", "b")

    bench.loop.note(Trigger.ADMITTED)
    bench.steps(6)

    asked = bench.planner.asked[-1]
    assert [one.request_id for one in asked.requests] == ["a"]
    assert [one.prefix_id for one in asked.prefixes] == ["t"]


def test_a_plan_says_where_what_is_shared_belongs() -> None:
    bench = Bench("a", "b")
    t, u = bench.engine.share("t", "a", "b"), bench.engine.share("u", "a")
    bench.steps(6)
    bench.answer(place("a"), place("b"), prefixes=(shared("t", 1, 3), shared("u")))
    bench.step()
    assert t.floor == LayerPlacement(offloaded=frozenset({1, 3}), num_staging=1)
    assert u.floor is None

    bench.loop.note(Trigger.PREEMPTED)
    bench.step()
    bench.answer(place("a"), place("b"), prefixes=(shared("u", 7),))
    bench.step()

    assert t.floor == LayerPlacement(offloaded=frozenset({1, 3}))  # it is not named
    assert u.floor == LayerPlacement(offloaded=frozenset({7}))


def test_a_plan_for_what_has_ended_meanwhile_is_carried_out_but_for_that() -> None:
    bench = Bench("a", "b")
    bench.engine.share("t", "a", "b")
    bench.steps(6)
    for name in "ab":
        bench.engine.records[name].kv.trunks = ()
    new = bench.engine.share("new", "a", "b")

    bench.answer(place("a", 2), place("b"), prefixes=(shared("t", 1, 3),))
    bench.step()

    assert bench.plans["applied"] == 1
    assert bench.engine.placed == {"a": (2,)}
    assert new.floor is None


def test_what_is_shared_counts_once_where_a_plan_is_judged() -> None:
    # Apart they take 20 * 808 blocks of 10,000; 80 of the 100 blocks of a row are shared.
    names = [f"r{n}" for n in range(20)]
    bench = Bench(*names)
    for number in range(40):
        bench.engine.share(f"t{number}", *names)
    bench.steps(6)

    bench.answer(*(place(name) for name in names))
    bench.step()

    assert bench.plans == {"asked": 1, "applied": 1}


def test_a_plan_that_is_dropped_is_dropped_for_what_is_shared_too() -> None:
    bench = Bench("a", "b")
    trunk = bench.engine.share("t", "a", "b")
    bench.steps(6)
    bench.answer(place("a"), place("b"), prefixes=(shared("t", 1),), window=4, expires_after=8)
    bench.step()
    assert trunk.floor is not None

    bench.steps(100)

    assert trunk.floor is None
