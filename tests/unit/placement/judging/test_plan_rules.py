"""What becomes of plans, sound, late, and nonsensical."""

from dataclasses import replace
from typing import Any

import pytest

from lab.planning.snapshots import make_engine
from services.placement.blocks import RESIDENT
from services.placement.judging.plan_rules import (
    LivePlace,
    LivePrefix,
    Moment,
    Question,
    Verdict,
    judge,
)
from services.placement.types import (
    Placement,
    Plan,
    PlanStatus,
    PrefixId,
    PrefixPlacement,
    Quality,
    RequestId,
)

# 8 groups, blocks of 16 tokens. A resident request of 31 + 1 tokens owns 2 * 8 = 16 blocks; with
# everything offloaded and one buffer 2.
ENGINE = make_engine(num_blocks=40)
QUALITY = Quality(
    latency_s=0.01,
    mean_latency_s=0.01,
    first_latency_s=0.01,
    objective_s=0.01,
    lower_bound_s=0.01,
    window=8,
    expires_after=10,
    num_nodes=0,
    serve_all=PlanStatus.FEASIBLE,
)


def live(name: str, **overrides: Any) -> LivePlace:
    values = {
        "request_id": RequestId(name),
        "num_tokens": 31,
        "residency": RESIDENT,
        "holds_kv": True,
        "paused": False,
    }
    return LivePlace(**(values | overrides))


def place(name: str, *layers: int, num_buffers: int | None = None, **options: Any) -> Placement:
    buffers = (1 if layers else 0) if num_buffers is None else num_buffers
    return Placement(
        request_id=RequestId(name),
        offloaded_layers=layers,
        num_prefetch_buffers=buffers,
        **options,
    )


def make_plan(*placements: Placement, **overrides: Any) -> Plan:
    values = {
        "epoch": 5,
        "policy": "orbitflow",
        "status": PlanStatus.OPTIMAL,
        "placements": placements,
        "quality": QUALITY,
    }
    return Plan(**(values | overrides))


ASKED = Question(
    epoch=5,
    policy="orbitflow",
    step=100,
    posted_s=0.0,
    request_ids=frozenset(map(RequestId, ("a", "b", "ended"))),
)
NOW = Moment(step=101, last_applied_epoch=4, live=(live("a"), live("b")), engine=ENGINE)


def test_a_sound_plan_is_carried_out() -> None:
    assert judge(make_plan(place("a"), place("b", 1, 3)), ASKED, NOW) is Verdict.APPLIED


def test_requests_that_have_ended_do_not_count() -> None:
    plan = make_plan(place("a"), place("b"), place("ended"))

    assert judge(plan, ASKED, NOW) is Verdict.APPLIED  # 16 + 16 of 40, not 48


def test_requests_that_came_meanwhile_keep_their_placement_and_count() -> None:
    newcomer = replace(NOW, live=(*NOW.live, live("new")))

    too_much = judge(make_plan(place("a"), place("b")), ASKED, newcomer)  # 48 blocks
    enough = judge(make_plan(place("a"), place("b", *range(8))), ASKED, newcomer)  # 34

    assert (too_much, enough) == (Verdict.REJECTED_CAPACITY, Verdict.APPLIED)


def test_exactly_the_pool_fits() -> None:
    plan = make_plan(place("a"), place("b"))

    fits = replace(NOW, engine=make_engine(num_blocks=32))
    one_short = replace(NOW, engine=make_engine(num_blocks=31))

    assert judge(plan, ASKED, fits) is Verdict.APPLIED
    assert judge(plan, ASKED, one_short) is Verdict.REJECTED_CAPACITY


def test_what_paused_and_waiting_requests_would_take_does_not_count() -> None:
    others = (live("w", holds_kv=False), live("p", paused=True))
    now = replace(NOW, live=(*NOW.live, *others))

    assert judge(make_plan(place("a"), place("b")), ASKED, now) is Verdict.APPLIED
    paused = make_plan(place("a"), place("b", paused=True))
    assert judge(paused, ASKED, replace(now, engine=make_engine(num_blocks=16))) is Verdict.APPLIED


def shared(name: str, *layers: int) -> PrefixPlacement:
    return PrefixPlacement(
        prefix_id=PrefixId(name),
        offloaded_layers=layers,
        num_prefetch_buffers=1 if layers else 0,
    )


# "a" and "b" begin with 3 blocks in each of 8 groups: with their own 16 + 16 they are 56.
BEGINS = tuple(live(name, prefix_ids=(PrefixId("t"),)) for name in "ab")
TRUNK = LivePrefix(prefix_id=PrefixId("t"), num_tokens=48, residency=RESIDENT)
SHARING = replace(NOW, live=BEGINS, prefixes=(TRUNK,), engine=make_engine(num_blocks=56))
ASKED_OF_PREFIXES = replace(ASKED, prefix_ids=frozenset(map(PrefixId, ("t", "gone"))))


def test_what_requests_share_counts_once_and_where_the_plan_has_it() -> None:
    resident = make_plan(place("a"), place("b"), prefixes=(shared("t"),))
    one_short = replace(SHARING, engine=make_engine(num_blocks=55))
    away = make_plan(place("a"), place("b"), prefixes=(shared("t", *range(8)),))  # a buffer of 3
    exactly = replace(SHARING, engine=make_engine(num_blocks=35))

    assert judge(resident, ASKED_OF_PREFIXES, SHARING) is Verdict.APPLIED
    assert judge(resident, ASKED_OF_PREFIXES, one_short) is Verdict.REJECTED_CAPACITY
    assert judge(away, ASKED_OF_PREFIXES, exactly) is Verdict.APPLIED
    unnamed = make_plan(place("a"), place("b"))  # it stays where it is
    assert judge(unnamed, ASKED_OF_PREFIXES, SHARING) is Verdict.APPLIED
    assert judge(unnamed, ASKED_OF_PREFIXES, one_short) is Verdict.REJECTED_CAPACITY


def test_what_only_paused_requests_begin_with_does_not_count() -> None:
    now = replace(SHARING, engine=make_engine(num_blocks=40))
    one = make_plan(place("a"), place("b", paused=True), prefixes=(shared("t"),))
    none = make_plan(place("a", paused=True), place("b", paused=True), prefixes=(shared("t"),))

    assert judge(one, ASKED_OF_PREFIXES, now) is Verdict.APPLIED  # 16 + 24
    no_room = replace(now, engine=make_engine(num_blocks=1))
    assert judge(none, ASKED_OF_PREFIXES, no_room) is Verdict.APPLIED


@pytest.mark.parametrize(
    ("prefixes", "verdict"),
    [
        ((shared("t"), shared("gone", 1)), Verdict.APPLIED),
        ((shared("never"),), Verdict.REJECTED_UNKNOWN_ID),
        ((shared("t"), shared("t")), Verdict.REJECTED_SHAPE),
        ((shared("t", 3, 1),), Verdict.REJECTED_SHAPE),
    ],
)
def test_prefixes_of_a_plan_are_judged_as_requests_are(
    prefixes: tuple[PrefixPlacement, ...], verdict: Verdict
) -> None:
    plan = make_plan(place("a"), place("b"), prefixes=prefixes)

    assert judge(plan, ASKED_OF_PREFIXES, SHARING) is verdict


def test_of_two_plans_the_one_with_the_greater_epoch_holds() -> None:
    late = replace(NOW, last_applied_epoch=5)

    assert judge(make_plan(place("a")), ASKED, late) is Verdict.IGNORED_SUPERSEDED


@pytest.mark.parametrize(("step", "verdict"), [(110, "applied"), (111, "ignored_expired")])
def test_a_plan_is_good_until_it_expires(step: int, verdict: str) -> None:
    assert judge(make_plan(place("a")), ASKED, replace(NOW, step=step)).value == verdict


def test_a_plan_that_predicts_nothing_does_not_expire() -> None:
    plan = make_plan(place("a"), quality=None)

    assert judge(plan, ASKED, replace(NOW, step=10_000)) is Verdict.APPLIED


@pytest.mark.parametrize(
    ("plan", "question", "verdict"),
    [
        pytest.param(make_plan(place("a"), epoch=6), ASKED, "rejected_epoch", id="other-epoch"),
        pytest.param(make_plan(place("a")), None, "rejected_epoch", id="nobody-asked"),
        pytest.param(
            make_plan(place("a"), policy="joint"), ASKED, "rejected_policy", id="other-policy"
        ),
        pytest.param(make_plan(place("z")), ASKED, "rejected_unknown_id", id="unknown-id"),
        pytest.param(make_plan(place("a"), place("a")), ASKED, "rejected_shape", id="twice"),
        pytest.param(make_plan(place("a", 3, 1)), ASKED, "rejected_shape", id="not-ascending"),
        pytest.param(make_plan(place("a", 8)), ASKED, "rejected_shape", id="no-such-layer"),
        pytest.param(make_plan(place("a", -1)), ASKED, "rejected_shape", id="negative-layer"),
        pytest.param(
            make_plan(place("a", 1, num_buffers=2)), ASKED, "rejected_shape", id="idle-buffer"
        ),
        pytest.param(
            make_plan(place("a", 1, num_buffers=0)), ASKED, "rejected_shape", id="no-buffer"
        ),
        pytest.param(
            make_plan(place("a", num_buffers=1)), ASKED, "rejected_shape", id="needless-buffer"
        ),
    ],
)
def test_nonsense_is_rejected_as_a_whole(
    plan: Plan, question: Question | None, verdict: str
) -> None:
    assert judge(plan, question, NOW).value == verdict


def test_a_split_layer_group_is_rejected() -> None:
    pairs = replace(NOW, engine=make_engine(layers_per_group=2, num_blocks=40))

    assert judge(make_plan(place("a", 1)), ASKED, pairs) is Verdict.REJECTED_SHAPE
    assert judge(make_plan(place("a", 0, 1)), ASKED, pairs) is Verdict.APPLIED


def test_groups_that_never_leave_count_whatever_the_plan() -> None:
    """Of 32 tokens a window of 20 lies in two blocks at most, and one state in one."""
    plan = make_plan(place("a"), place("b", *range(8)))  # 16 + 2 blocks
    engine = make_engine(num_blocks=24, side_windows=(20, 0), max_in_flight_tokens=64)

    assert judge(plan, ASKED, replace(NOW, engine=engine)) is Verdict.APPLIED
    one_short = replace(NOW, engine=replace(engine, num_blocks=23))
    assert judge(plan, ASKED, one_short) is Verdict.REJECTED_CAPACITY


def test_drafts_have_room_in_a_plan() -> None:
    """Of 32 tokens and the next one, 16 a block, drafts of 15 fill the open block, 16 open one."""
    plan = make_plan(place("a"), place("b", *range(8)))
    roomy, tight = (make_engine(num_blocks=200, max_ahead_tokens=n) for n in (0, 500))

    assert judge(plan, ASKED, replace(NOW, engine=roomy)) is Verdict.APPLIED
    assert judge(plan, ASKED, replace(NOW, engine=tight)) is Verdict.REJECTED_CAPACITY
