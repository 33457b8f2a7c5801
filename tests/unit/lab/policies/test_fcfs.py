"""First come, first served: what is let in, what gives way, and how it comes back."""

from lab.policies import fcfs
from services.placement.run.papers.fcfs import PIECE_TOKENS, chunked, streams
from services.placement.run.resume import ResumeWay
from tests.unit.placement.run.snapshots import ask, make_engine, make_snapshot, parked, runs


def test_who_fits_comes_in_the_order_of_the_queue_and_the_first_who_does_not_ends_it() -> None:
    # A pool of 1,600 tokens.
    queue = [parked("p", 500), ask("a", 300), ask("b", 500), ask("c", 10)]
    snapshot = make_snapshot(runs("r", 500), *queue)

    for policy in (chunked, fcfs.recompute, fcfs.swap):
        assert policy(snapshot).run == ("r", "p", "a")
    assert streams(snapshot).run == ("r", "p", "a", "b", "c")


def test_when_the_batch_outgrows_the_pool_the_newest_gives_way_and_nobody_comes() -> None:
    batch = [runs("old", 800, age_s=30.0), runs("new", 800, age_s=5.0)]

    decision = fcfs.recompute(make_snapshot(*batch, ask("a", 10)))

    assert decision.park == {"new"}
    assert decision.run == ("old",)


def test_what_is_on_the_host_comes_back_as_the_name_says() -> None:
    snapshot = make_snapshot(parked("p", 100))

    assert fcfs.recompute(snapshot).allowed_ways == {ResumeWay.RECOMPUTE}
    assert fcfs.swap(snapshot).allowed_ways == {ResumeWay.LOAD}
    assert streams(snapshot).allowed_ways == set(ResumeWay)


def test_a_step_computes_one_piece_of_prompts() -> None:
    assert chunked(make_snapshot(ask("a", 2_000))).chunk_tokens == PIECE_TOKENS


def test_room_is_kept_for_a_share_of_every_answers_limit() -> None:
    # Each holds 400 tokens and may still become 400 longer.
    first = runs("r", 400, num_output_tokens=0, max_tokens=400)
    snapshot = make_snapshot(first, *(ask(name, 400, max_tokens=400) for name in "abc"))

    assert fcfs.sglang(snapshot, reserved_frac=0.0).run == ("r", "a", "b")
    assert fcfs.sglang(snapshot, reserved_frac=0.3).run == ("r", "a", "b")
    assert fcfs.sglang(snapshot, reserved_frac=0.7).run == ("r", "a")


def test_whoever_runs_stays_and_an_empty_engine_takes_the_first() -> None:
    engine = make_engine(num_blocks=80)
    members = make_snapshot(runs("r", 130), runs("s", 130), ask("a", 10), engine=engine)

    assert fcfs.sglang(members).run == ("r", "s")
    assert fcfs.sglang(make_snapshot(ask("a", 5_000), engine=engine)).run == ("a",)


def test_shortest_first_lets_who_runs_run_and_orders_those_that_wait_by_what_is_left() -> None:
    waiting = [ask("long", 10, max_tokens=90), parked("half", 10, max_tokens=40), ask("b", 10)]
    decision = fcfs.shortest_first(make_snapshot(runs("r", 10, max_tokens=500), *waiting))

    # 90, 40 - 8 and 100 tokens are left.
    assert decision.run == ("r", "half", "long", "b")
    assert decision.offloads
