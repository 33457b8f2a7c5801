"""Run policies count what several requests begin with once."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.placement.run.evenflow import decide
from services.placement.run.promise import Used
from services.placement.run.reason import Reason
from services.placement.run.step_estimate import Steps
from services.placement.run.types import RunPhase, RunSnapshot
from tests.unit.placement.run.snapshots import (
    SLOW,
    ask,
    make_engine,
    make_snapshot,
    parked,
    runs,
    snapshots,
)

ROWS = 50  # of the part that all share, 800 tokens


def agents(number: int, num_own_tokens: int = 100) -> list:
    return [
        runs(f"r{n}", ROWS * 16 + num_own_tokens, prefixes=(0,), age_s=20.0 - n)
        for n in range(number)
    ]


def newcomer(num_own_tokens: int = 100):
    num_tokens = ROWS * 16 + num_own_tokens
    return ask("new", num_tokens, prefixes=(0,), num_host_tokens=ROWS * 16)


@given(snapshots(), st.data())
def test_a_batch_has_the_blocks_of_its_union(snapshot, data) -> None:
    rows = data.draw(st.lists(st.integers(1, 5), max_size=4))
    chosen = [
        data.draw(st.sets(st.sampled_from(range(len(rows))))) if rows else set()
        for _ in snapshot.requests
    ]
    requests = tuple(
        replace(r, prefixes=tuple(sorted(parts)))
        for r, parts in zip(snapshot.requests, chosen, strict=True)
    )
    shared = replace(snapshot, requests=requests, prefix_rows=tuple(rows))
    groups = snapshot.engine.num_groups

    own = sum(shared.num_own_blocks(request, growth=3) for request in requests)
    union = sum(rows[part] for part in set().union(*chosen)) * groups

    assert shared.num_blocks_of(requests, growth=3) == own + union
    always = Used(shared)
    for request in requests:
        always.add(request, 1.0, shared.num_blocks(request, growth=3))
    assert always.num_blocks == own + union


def test_who_shares_what_runs_is_admitted_where_his_whole_prompt_would_not_fit() -> None:
    batch = [*agents(3), newcomer()]
    engine = make_engine(num_blocks=4 * (ROWS + 4 * 10))

    alone = decide(make_snapshot(*[replace(r, prefixes=()) for r in batch], engine=engine))
    shared = decide(make_snapshot(*batch, engine=engine, prefix_rows=(ROWS,)))

    assert "new" not in alone.run
    assert "new" in shared.run
    assert shared.reasons["new"] is Reason.FITS


def test_nobody_leaves_whose_leaving_frees_nothing() -> None:
    reads = {"rate_tps": 5.0, "prefixes": (0,)}
    sharers = [runs(f"s{n}", ROWS * 16 + 8, slack_s=60.0 + n, **reads) for n in range(6)]
    other = runs("other", 300, rate_tps=5.0, slack_s=30.0)
    due = parked("due", 250, rate_tps=5.0, slack_s=0.1, age_s=40.0)
    engine = make_engine(num_blocks=4 * (ROWS + 6 * 2 + 22))

    decision = decide(make_snapshot(*sharers, other, due, engine=engine, prefix_rows=(ROWS,)))

    assert "due" in decision.run
    assert decision.park == {"other"}


def test_a_parked_request_loads_what_nobody_has_in_the_pool() -> None:
    away = parked("away", ROWS * 16 + 160, prefixes=(0,))
    alone = make_snapshot(away, prefix_rows=(ROWS,), h2d_bytes_per_s=SLOW)
    beside = make_snapshot(*agents(1), away, prefix_rows=(ROWS,), h2d_bytes_per_s=SLOW)

    assert alone.load_s(away) - beside.load_s(away) == ROWS * 4 * 1_000 / SLOW


def test_a_step_copies_once_what_all_have_on_the_host() -> None:
    batch = agents(8)
    engine = make_engine(num_blocks=4 * 30 + 8 * 4 * 8)
    shared = make_snapshot(*batch, engine=engine, prefix_rows=(ROWS,), h2d_bytes_per_s=1e5)
    each = make_snapshot(
        *[replace(r, prefixes=()) for r in batch], engine=engine, h2d_bytes_per_s=1e5
    )

    with_sharing = Steps(shared).decode_s(shared.requests, growth=1)
    without = Steps(each).decode_s(each.requests, growth=1)

    assert with_sharing < without / 3


def test_all_leave_for_whom_a_long_part_would_give_layers_up() -> None:
    """One victim alone changes nothing: the part that all share would lose as many layers."""
    batch = [replace(r, rate_tps=0.0) for r in agents(8)]
    num_fitting = 6
    blocks = 4 * (ROWS + num_fitting * 7 + 1)
    slow = make_snapshot(
        *batch, engine=make_engine(num_blocks=blocks), prefix_rows=(ROWS,), h2d_bytes_per_s=2e6
    )
    steps = Steps(slow)
    one_less = [*batch[:-1]]
    assert 8 * steps.decode_s(one_less, growth=4) >= 7 * steps.decode_s(batch, growth=4)
    assert 8 * steps.decode_s(batch[:6], growth=4) < 6 * steps.decode_s(batch, growth=4)

    assert decide(slow).park == {"r6", "r7"}


def beyond(shared: tuple[int, ...], **overrides) -> RunSnapshot:
    """Return a snapshot of three agents whose prompts are larger than the pool."""
    first, *rest = agents(3)
    waiting = [replace(r, phase=RunPhase.NEW, run_age_s=math.inf) for r in rest]
    requests = [replace(r, prefixes=shared) for r in (first, *waiting)]
    engine = make_engine(num_blocks=4 * (ROWS - 10))
    return make_snapshot(*requests, engine=engine, prefix_rows=(ROWS, 1), **overrides)


def test_who_shares_what_is_larger_than_the_pool_runs_together() -> None:
    decision = decide(beyond((0,), h2d_bytes_per_s=1e5))

    assert decision.run == ("r0", "r1", "r2")
    assert decision.offloads
    assert set(decision.reasons.values()) == {Reason.TURN}


def test_who_shares_little_or_nothing_and_is_larger_than_the_pool_runs_alone() -> None:
    for shared in ((), (1,)):
        assert decide(beyond(shared, h2d_bytes_per_s=1e5)).run == ("r0",)


def test_before_steps_are_measured_one_that_is_larger_than_the_pool_runs_alone() -> None:
    assert decide(beyond((0,), costs=None)).run == ("r0",)
