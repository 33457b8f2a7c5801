"""`evenflow`: each rule by a small case, and laws over random engines."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement.run.evenflow import decide
from services.placement.run.evenflow_rules import DEFAULT_RULES
from services.placement.run.newcomers import UNSTATED_TTFT_S, in_line
from services.placement.run.promise import Promise, reading_fracs, sure_ones
from services.placement.run.prompts import are_hidden
from services.placement.run.reason import Reason
from services.placement.run.types import RunDecision, RunPhase, RunRequest, RunSnapshot
from tests.unit.placement.run.snapshots import (
    BLOCK_BYTES,
    COSTS,
    SLOW,
    ask,
    make_engine,
    make_snapshot,
    parked,
    runs,
    snapshots,
)


def test_nobody_is_idle_and_nothing_is_asked_again_without_requests() -> None:
    assert decide(make_snapshot()).valid_for_s == math.inf


def test_nobody_overtakes_the_first_in_line() -> None:
    decision = decide(make_snapshot(runs("a", 1_000), ask("b", 800), ask("c", 100)))

    assert decision.run == ("a",)


def test_an_empty_engine_takes_the_first_whatever_is_measured() -> None:
    decision = decide(make_snapshot(ask("a", 1_500), costs=None, h2d_bytes_per_s=0.0))

    assert decision.run == ("a",)


@pytest.mark.parametrize(
    ("slack_s", "chunk_token_s", "comes"),
    [(0.07, 1e-4, True), (0.05, 1e-4, False), (9.0, 0.0, False)],
    ids=["covered", "not covered", "unknown"],
)
def test_beyond_the_pool_nobody_waits_for_a_newcomers_prompt(
    slack_s: float, chunk_token_s: float, comes: bool
) -> None:
    # His 600 tokens take 60 ms, if it is known what they take.
    batch = [runs(name, 600, rate_tps=5.0, slack_s=slack_s) for name in "ab"]
    costs = replace(COSTS, chunk_token_s=chunk_token_s)

    decision = decide(
        make_snapshot(*batch, ask("c", 600, rate_tps=5.0), h2d_bytes_per_s=3e7, costs=costs)
    )

    assert ("c" in decision.run) == comes


def test_a_newcomer_who_fits_comes_as_under_vllm_whatever_his_prompt_takes() -> None:
    reader = runs("a", 600, rate_tps=5.0, slack_s=0.0)

    assert decide(make_snapshot(reader, ask("b", 600, rate_tps=5.0))).run == ("a", "b")


def test_who_states_no_rate_waits_for_no_copies() -> None:
    batch = [runs(name, 600) for name in "ab"]

    assert decide(make_snapshot(*batch, ask("c", 600), h2d_bytes_per_s=1e5)).run == ("a", "b")


@pytest.mark.parametrize(("num_host_blocks", "is_room"), [(464, True), (463, False)])
def test_no_layer_leaves_where_the_host_has_no_room_for_all(
    num_host_blocks: int, is_room: bool
) -> None:
    # At 5 tokens/s three of 156, 156 and 152 blocks would hide their copies, in a pool of 400.
    batch = [runs(name, 600, rate_tps=5.0, slack_s=1.0) for name in "ab"]
    newcomer = ask("c", 600, rate_tps=5.0)
    engine = make_engine(num_host_blocks=num_host_blocks)

    decision = decide(
        make_snapshot(*batch, newcomer, engine=engine, h2d_bytes_per_s=3e7, mean_answer_tokens=1.0)
    )

    assert ("c" in decision.run) == decision.offloads == is_room


@pytest.mark.parametrize(("num_host_blocks", "comes"), [(384, True), (383, False)])
def test_who_may_have_to_be_computed_anew_comes_back_for_a_while_only(
    num_host_blocks: int, comes: bool
) -> None:
    # 180 and 204 of 400 blocks now, 408 in 48 tokens.
    batch, due = runs("a", 700), parked("due", 800, age_s=30.0)
    engine = make_engine(num_host_blocks=num_host_blocks)
    snapshot = make_snapshot(batch, due, engine=engine, mean_answer_tokens=1.0)

    assert ("due" in decide(snapshot).run) == comes


@pytest.mark.parametrize(("mean_answer_tokens", "keeps"), [(0.0, False), (50.0, True)])
def test_while_no_answer_has_ended_all_are_as_long_as_their_limits(
    mean_answer_tokens: float, keeps: bool
) -> None:
    # 400 and 100 tokens are 128 blocks, 400 and 50 are 116.
    request = ask("a", 400, max_tokens=100)
    engine = make_engine(num_host_blocks=127)
    snapshot = make_snapshot(request, engine=engine, mean_answer_tokens=mean_answer_tokens)

    assert Promise(snapshot).keeps([request]) == keeps


@pytest.mark.parametrize(
    ("tokens", "h2d_bytes_per_s", "comes"),
    [((760, 700), 2e6, False), ((620, 840), 3e6, False), ((760, 700), 2e7, True)],
)
def test_nobody_comes_back_who_would_leave_in_the_next_step(
    tokens: tuple[int, int], h2d_bytes_per_s: float, comes: bool
) -> None:
    # 48 tokens later the others exceed the pool too and one more costs little; now they fit.
    batch = [runs(str(number), number, rate_tps=5.0, slack_s=3.0) for number in tokens]
    due = parked("due", 900 - sum(tokens) // 2, rate_tps=5.0, slack_s=1.0, age_s=9.0)
    snapshot = make_snapshot(*batch, due, h2d_bytes_per_s=h2d_bytes_per_s)

    decision = decide(snapshot)
    after = decide(_next_step(snapshot, decision))

    assert ("due" in decision.run) == comes
    assert not after.park


def _next_step(snapshot: RunSnapshot, decision: RunDecision) -> RunSnapshot:
    """Return who runs with one token more, the others parked."""
    after = [
        replace(
            request,
            phase=RunPhase.RUNNING if request.request_id in decision.run else RunPhase.PARKED,
            num_output_tokens=request.num_output_tokens + (request.request_id in decision.run),
        )
        for request in snapshot.requests
    ]
    return replace(snapshot, requests=tuple(after))


def test_of_a_batch_that_outgrows_the_pool_the_newest_stand_by_leaves() -> None:
    old = runs("old", 800, age_s=30.0)
    new = runs("new", 800, age_s=5.0)

    decision = decide(make_snapshot(new, old, h2d_bytes_per_s=SLOW))

    assert decision.run == ("old",)
    assert decision.park == {"new"}


def test_of_those_of_one_age_the_last_in_the_batch_leaves() -> None:
    batch = [runs(name, 800, age_s=5.0) for name in ("first", "last")]

    assert decide(make_snapshot(*batch, h2d_bytes_per_s=SLOW)).run == ("first",)


@pytest.mark.parametrize(("slack_s", "expected"), [(0.5, 512), (0.062, 260), (0.0, 250)])
def test_a_prompt_gets_what_the_step_has_left(slack_s: float, expected: int) -> None:
    # At 20 tokens/s: 50 ms less 4 ms of safety and a step of 21 ms are 25 ms, 250 tokens, at least.
    reader = runs("a", 300, rate_tps=20.0, slack_s=slack_s)

    decision = decide(make_snapshot(reader, ask("b", 400)))

    assert decision.chunk_tokens == pytest.approx(expected, abs=120)
    assert decision.chunk_tokens >= 249


@pytest.mark.parametrize(
    ("rate_tps", "waits", "expected"),
    [(5.0, True, 2_048), (20.0, False, 2_048), (20.0, True, 512)],
    ids=["slow readers", "nobody waits", "fast readers, somebody waits"],
)
def test_pieces_are_short_only_for_fast_readers_while_somebody_waits(
    rate_tps: float, waits: bool, expected: int
) -> None:
    batch = [runs(f"r{n}", 200, rate_tps=rate_tps, slack_s=9.0) for n in range(6)]
    waiting = [ask("waits", 800)] if waits else []
    prompt = ask("comes", 200, phase=RunPhase.RUNNING, run_age_s=0.0)
    engine = make_engine(max_num_batched_tokens=2_048)

    decision = decide(make_snapshot(*batch, prompt, *waiting, engine=engine))

    assert len(decision.run) == 7
    assert decision.chunk_tokens == expected


@given(snapshots(rates=(5.0, 20.0), largest=300))
def test_where_nobody_waits_a_prompt_is_shorter_than_vllms_only_for_who_would_miss_it(
    snapshot: RunSnapshot,
) -> None:
    """No newcomer pays for readers who lack nothing."""
    decision, costs = decide(snapshot), snapshot.costs
    assert costs is not None
    batch = [r for r in snapshot.requests if r.request_id in decision.run]
    decoding = [r for r in batch if r.runs and r.has_begun]
    waits = any(r.phase is RunPhase.NEW and r not in batch for r in snapshot.requests)
    if not decoding or waits or decision.offloads:
        return
    step_s = costs.decode_s(len(decoding), sum(r.num_tokens for r in decoding))
    budget = snapshot.engine.max_num_batched_tokens
    least_s = 0.01 + step_s + costs.prompt_s(budget)
    if min(reader.spare_s for reader in decoding) > least_s:
        assert decision.chunk_tokens in (None, budget)


def moved(name: str, num_tokens: int, **overrides) -> RunRequest:
    """Return a request whose answer was begun elsewhere: nothing of it is here."""
    return parked(name, num_tokens, **({"num_host_tokens": 0, "rate_tps": 20.0} | overrides))


def test_what_a_moved_answer_has_to_compute_is_a_prompt() -> None:
    reader = runs("a", 300, rate_tps=20.0, slack_s=0.062)
    prompt = ask("b", 400, phase=RunPhase.RUNNING, run_age_s=0.0)
    here = moved("b", 392, phase=RunPhase.RUNNING, run_age_s=0.0, slack_s=-1.0)

    as_prompt, as_moved = (decide(make_snapshot(reader, one)) for one in (prompt, here))

    assert as_moved.chunk_tokens == as_prompt.chunk_tokens
    assert as_moved.chunk_tokens is not None
    assert (as_moved.valid_for_s, as_prompt.valid_for_s) == (0.0, 0.0)


@pytest.mark.parametrize(("slack_s", "is_hidden"), [(0.041, True), (0.039, False)])
def test_readers_with_tokens_to_read_hide_a_moved_answer_that_has_none(
    slack_s: float, is_hidden: bool
) -> None:
    here = moved("b", 392, phase=RunPhase.RUNNING, run_age_s=0.0, slack_s=-1.0)  # takes 39.9 ms
    batch = [runs("a", 300, rate_tps=20.0, slack_s=slack_s), here]

    assert are_hidden(make_snapshot(*batch), batch, [here]) is is_hidden


def test_the_way_back_of_a_moved_answer_is_what_it_has_to_compute() -> None:
    # 399 of 400 tokens at 0.1 ms; of a copy that lacks four blocks the rest goes with the decodes.
    snapshot = make_snapshot()

    assert snapshot.way_back_s(moved("a", 392)) == pytest.approx(0.0399)
    lacks_four = parked("a", 392, num_host_tokens=399 - 64)
    assert snapshot.way_back_s(lacks_four) == snapshot.load_s(lacks_four)
    lacks_more = parked("a", 392, num_host_tokens=399 - 65)
    assert snapshot.way_back_s(lacks_more) == pytest.approx(snapshot.load_s(lacks_more) + 0.0065)


def test_where_nothing_hides_a_prompt_it_is_computed_as_vllm_would() -> None:
    reader = runs("a", 400, rate_tps=45.0, slack_s=0.0)  # 22 ms, of which the step takes 21

    assert decide(make_snapshot(reader, ask("b", 400))).chunk_tokens is None


def test_where_few_fit_a_prompt_is_computed_as_vllm_would() -> None:
    reader = runs("a", 400, rate_tps=20.0, slack_s=0.5)  # the pool holds fewer than four such

    assert decide(make_snapshot(reader, ask("b", 400))).chunk_tokens is None


def test_a_step_that_nothing_is_known_of_hides_no_prompt() -> None:
    # What fills the pool to the last blocks would need a link, whose rate is not measured.
    reader = runs("a", 1_570, rate_tps=5.0, slack_s=1.0)

    assert decide(make_snapshot(reader, h2d_bytes_per_s=0.0)).chunk_tokens is None


def test_one_that_is_larger_than_the_pool_stands_beside_the_queue() -> None:
    large = ask("large", 2_000, age_s=50.0)

    beside = decide(make_snapshot(runs("a", 400), large, ask("b", 400)))
    alone = decide(make_snapshot(large))
    turn = decide(make_snapshot(runs("a", 400), ask("large", 2_000, age_s=61.0)))

    assert beside.run == ("a", "b")
    assert alone.run == ("large",)
    assert turn.run == ("large",)
    assert turn.park == {"a"}


def test_a_reader_needs_his_blocks_a_share_of_the_time_and_the_others_always() -> None:
    members = [runs("slow", 100, rate_tps=5.0), runs("fast", 100, rate_tps=1_000.0), runs("u", 100)]

    fracs = reading_fracs(make_snapshot(*members), members)

    assert fracs["slow"] == pytest.approx(5.0 * 0.023)
    assert fracs["fast"] == fracs["u"] == 1.0


@pytest.mark.parametrize(("slack_s", "num_parked"), [(30.0, 2), (2.0, 0)])
def test_as_many_readers_make_room_as_a_newcomer_needs(slack_s: float, num_parked: int) -> None:
    batch = [runs(f"r{n}", 230, rate_tps=5.0, slack_s=slack_s) for n in range(6)]

    decision = decide(make_snapshot(*batch, ask("large", 500, rate_tps=5.0)))

    assert len(decision.park) == num_parked
    assert ("large" in decision.run) == bool(num_parked)


def test_readers_make_room_for_two_prompts_at_a_time() -> None:
    batch = [runs(f"r{n}", 150, rate_tps=5.0, slack_s=60.0) for n in range(9)]
    queue = [ask(f"new{n}", 150, rate_tps=5.0) for n in range(4)]

    decision = decide(make_snapshot(*batch, *queue))

    assert [name for name in decision.run if name.startswith("new")] == ["new0", "new1"]
    assert decision.reasons["new2"] is Reason.PROMPTS


def test_who_makes_room_has_in_hand_what_the_link_needs_to_bring_all_back() -> None:
    # Each of seven is 60 blocks, which take 1.2 s at 50 kB/s: some 15 s for all on half the link.
    members = [runs(f"r{n}", 230, rate_tps=5.0, slack_s=60.0) for n in range(7)]
    promise = Promise(make_snapshot(*members, h2d_bytes_per_s=50_000.0, mean_answer_tokens=1.0))

    assert promise.holds(members)
    loads_s = 7 * 60 * BLOCK_BYTES / 50_000.0
    assert loads_s < promise.turn_s < 2.0 * loads_s
    slow = make_snapshot(*members, h2d_bytes_per_s=30_000.0, mean_answer_tokens=1.0)
    assert not Promise(slow).holds(members)


@pytest.mark.parametrize(
    ("states", "asks", "comes"),
    [(2.0, None, False), (2.0, 2.0, True), (None, None, True)],
    ids=["an agent beside people", "a person", "nobody states anything"],
)
def test_who_states_no_ttft_slo_leaves_room_for_those_who_do(
    states: float | None, asks: float | None, comes: bool
) -> None:
    # Six of 60 blocks each read, half of their time; the pool of 400 promises six more at most.
    batch = [
        runs(f"r{n}", 230, rate_tps=18.0, slack_s=60.0, slo_ttft_s=states, age_s=20.0)
        for n in range(6)
    ]
    out = [
        parked(f"p{n}", 230, rate_tps=18.0, slack_s=60.0, slo_ttft_s=states, age_s=20.0)
        for n in range(4)
    ]

    decision = decide(
        make_snapshot(
            *batch, *out, ask("new", 230, rate_tps=18.0, slo_ttft_s=asks), mean_answer_tokens=1.0
        )
    )

    assert ("new" in decision.run) == comes


@pytest.mark.parametrize(("slack_s", "comes"), [(20.0, True), (14.0, False)])
def test_nobody_makes_room_with_less_in_hand_than_the_link_needs(
    slack_s: float, comes: bool
) -> None:
    batch = [runs(f"r{n}", 230, rate_tps=5.0, slack_s=slack_s) for n in range(6)]
    newcomer = ask("new", 230, rate_tps=5.0)

    decision = decide(
        make_snapshot(*batch, newcomer, h2d_bytes_per_s=50_000.0, mean_answer_tokens=1.0)
    )

    assert ("new" in decision.run) == comes


# -- laws ------------------------------------------------------------------------------------------


@given(snapshots())
def test_a_resident_batch_fits_the_pool(snapshot: RunSnapshot) -> None:
    decision = decide(snapshot)
    batch = [r for r in snapshot.requests if r.request_id in decision.run]

    if not decision.offloads and len(batch) > 1:
        num_blocks = sum(snapshot.num_blocks(request, growth=1) for request in batch)
        assert num_blocks <= snapshot.engine.num_blocks


RUN = {Reason.STAYS, Reason.FITS, Reason.PROMISED, Reason.DUE, Reason.BACK, Reason.ALONE}
LEAVE = {Reason.OUTGROWN, Reason.GAVE_PLACE}
WAIT = {Reason.IN_HAND, Reason.NO_ROOM, Reason.BEHIND, Reason.PROMPTS}
BESIDE = {Reason.TURN, Reason.OTHERS_TURN, Reason.TOO_LARGE}  # of one larger than the pool


@given(snapshots())
def test_the_reason_of_each_request_is_one_for_what_becomes_of_it(snapshot: RunSnapshot) -> None:
    decision = decide(snapshot)

    for request in snapshot.requests:
        reason = decision.reasons[request.request_id]
        if reason in BESIDE:
            assert (reason is Reason.TURN) == (request.request_id in decision.run)
        elif request.request_id in decision.park:
            assert reason in LEAVE
        else:
            assert reason in (RUN if request.request_id in decision.run else WAIT)


def test_requests_that_wait_are_told_what_they_wait_for() -> None:
    decision = decide(make_snapshot(runs("a", 1_000), ask("b", 800), ask("c", 100)))

    assert decision.reasons == {
        "a": Reason.STAYS,
        "b": Reason.NO_ROOM,
        "c": Reason.BEHIND,
    }


@given(snapshots())
def test_nobody_new_overtakes_somebody_new(snapshot: RunSnapshot) -> None:
    """Without TTFT SLOs the bypass bound is zero; only one larger than the pool stands aside."""
    decision = decide(snapshot)
    new = [
        request.request_id in decision.run
        for request in snapshot.requests
        if request.phase is RunPhase.NEW
        and snapshot.num_blocks(request, growth=2) <= snapshot.engine.num_blocks
    ]

    assert new == sorted(new, reverse=True)


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.sampled_from([None, 1.0, 5.0, 60.0]))))
def test_nobody_is_passed_but_by_those_whose_first_token_is_due_sooner(
    asked: list[tuple[float, float | None]],
) -> None:
    """So the bypass bound is the difference of two SLOs, and at most `UNSTATED_TTFT_S`."""
    in_order = sorted(asked, key=lambda one: -one[0])
    queue = [
        ask(f"r{n}", 10, age_s=age_s, slo_ttft_s=slo_s) for n, (age_s, slo_s) in enumerate(in_order)
    ]
    line = in_line(queue)

    assert len(line) == len(queue)
    for place, request in enumerate(line):
        for one in queue[: queue.index(request)]:
            if one not in line[:place]:  # it came sooner, and is passed
                assert request.slo_ttft_s is not None
                assert one.arrival_age_s - request.arrival_age_s <= UNSTATED_TTFT_S
                assert _due_s(one) >= _due_s(request)


def _due_s(request: RunRequest) -> float:
    slo_s = UNSTATED_TTFT_S if request.slo_ttft_s is None else request.slo_ttft_s
    return slo_s - request.arrival_age_s


def test_people_who_wait_for_a_first_token_pass_agents_for_a_minute() -> None:
    agents = [ask("late agent", 10, age_s=61.0), ask("agent", 10, age_s=30.0)]
    person = ask("person", 10, age_s=0.0, slo_ttft_s=2.0)

    line = [request.request_id for request in in_line([*agents, person])]

    assert line == ["late agent", "person", "agent"]


@given(snapshots(rates=(5.0, 20.0), largest=300))
def test_who_is_sure_is_parked_only_with_his_way_back_in_hand(snapshot: RunSnapshot) -> None:
    """Unless the batch has outgrown the pool."""
    batch = [r for r in snapshot.requests if r.phase in (RunPhase.RUNNING, RunPhase.RETURNING)]
    num_blocks = sum(snapshot.num_blocks(request, growth=1) for request in batch)
    if num_blocks > snapshot.engine.num_blocks:
        return
    members = [r for r in snapshot.requests if r.phase is not RunPhase.NEW]
    sure, decision = sure_ones(snapshot, members), decide(snapshot)

    for request in snapshot.requests:
        if request.request_id in decision.park & sure:
            assert request.spare_s >= snapshot.load_s(request) + DEFAULT_RULES.margin_s


@given(snapshots(rates=(0.0,)))
def test_without_rates_nobody_is_parked_for_anybody(snapshot: RunSnapshot) -> None:
    """As under vLLM: a request leaves only when the batch has outgrown the pool, the newest."""
    batch = [r for r in snapshot.requests if r.phase in (RunPhase.RUNNING, RunPhase.RETURNING)]
    num_blocks = sum(snapshot.num_blocks(request, growth=1) for request in batch)
    members = [r for r in snapshot.requests if r.phase is not RunPhase.NEW]
    if num_blocks <= snapshot.engine.num_blocks:
        assert not decide(snapshot).park & sure_ones(snapshot, members)


@given(snapshots())
def test_what_is_promised_stays_within_the_pool(snapshot: RunSnapshot) -> None:
    members = list(snapshot.requests)
    fracs = reading_fracs(snapshot, members)

    if Promise(snapshot).holds(members):
        used = sum(fracs[r.request_id] * snapshot.num_blocks(r, growth=1) for r in members)
        assert used <= snapshot.engine.num_blocks
    assert all(0.0 < frac <= 1.0 for frac in fracs.values())


def test_a_way_back_is_as_long_as_its_bytes() -> None:
    request = parked("a", 152, num_host_tokens=160)

    assert make_snapshot().load_s(request) == pytest.approx(10 * 4 * BLOCK_BYTES / 1e6)
    # A window of 32 tokens in 3 blocks of 16, a state, and four open blocks at most.
    with_sides = make_snapshot(engine=make_engine(side_windows=(32, 0), max_in_flight_tokens=512))
    assert with_sides.load_s(request) == pytest.approx((10 * 4 + 3 + 1 + 4) * BLOCK_BYTES / 1e6)
    assert with_sides.load_s(parked("b", 152, num_host_tokens=0)) == 0.0


def test_groups_that_never_leave_count_by_what_is_in_flight() -> None:
    """A window of 32 tokens and two in flight lie in 4 blocks of 16; a prompt's chunk in 35."""
    engine = make_engine(side_windows=(32, 0), max_in_flight_tokens=512)
    decodes, comes = runs("a", 1_592, num_computed_tokens=1_600), ask("b", 1_600)
    snapshot = make_snapshot(decodes, comes, engine=engine)
    own = 4 * 101  # of 1,601 tokens

    assert snapshot.num_blocks(decodes, growth=1) == own + 4 + 1
    assert snapshot.num_blocks(comes, growth=1) == own + 35 + 1
    assert snapshot.num_blocks_of([decodes, comes], growth=1) == 2 * own + 4 + 35 + 2


def test_drafts_have_room_behind_a_requests_tokens() -> None:
    request = runs("a", 20)  # and 8 more: 3 ahead fill the second block, 5 open a third
    for max_ahead_tokens, num_rows in ((0, 2), (3, 2), (5, 3)):
        snapshot = make_snapshot(request, engine=make_engine(max_ahead_tokens=max_ahead_tokens))

        assert snapshot.num_blocks(request, growth=1) == 4 * num_rows
        assert snapshot.num_blocks_of([request], growth=1) == 4 * num_rows


SIDES = make_engine(side_windows=(32,), max_in_flight_tokens=512)


def unsaved(name: str, num_tokens: int, **overrides) -> RunRequest:
    """Return one that decodes, of which nothing is kept on the host."""
    given = {"num_host_tokens": 0, "num_computed_tokens": num_tokens + 8}
    return runs(name, num_tokens, **(given | overrides))


def test_nobody_is_sent_away_whose_prompt_would_be_computed_again() -> None:
    """By their readers all could wait; the newcomer has no room beside them."""
    rich = {"rate_tps": 5.0, "slack_s": 60.0}
    new = ask("new", 200, rate_tps=5.0)
    unkept = [unsaved(name, 330, **rich) for name in "abcd"]

    decision = decide(make_snapshot(*unkept, new, engine=SIDES))

    assert decision.park == frozenset()
    assert set("abcd") <= set(decision.run)
    saved = [runs(name, 330, **rich) for name in "abcd"]
    assert decide(make_snapshot(*saved, new, engine=SIDES)).park == {"d"}


def test_what_is_on_the_host_takes_its_windows_alone_of_the_pool() -> None:
    """Four blocks of a window, not the 35 of a prompt's chunk, though the engine says that nothing
    of it has been computed.
    """
    away, lost = parked("a", 1_592), parked("b", 1_592, num_host_tokens=0)
    snapshot = make_snapshot(away, lost, engine=SIDES)

    assert snapshot.num_blocks(away, growth=1) == 4 * 101 + 4
    assert snapshot.num_blocks(lost, growth=1) == 4 * 101 + 35
    assert snapshot.num_blocks_of([away, lost], growth=1) == 2 * 4 * 101 + 4 + 35
    assert snapshot.num_blocks(lost, growth=1, is_computed=True) == 4 * 101 + 4


def test_one_larger_than_the_pool_has_its_turn_to_its_end_where_leaving_is_computed_again() -> None:
    waiting, keeps_none = ask("large", 2_000, age_s=61.0), make_engine(num_host_blocks=0)
    turn = decide(make_snapshot(unsaved("a", 400), waiting, engine=keeps_none))
    assert (turn.run, turn.park) == (("large",), {"a"})

    now = unsaved("large", 2_000, run_age_s=1_000.0)
    rest = decide(make_snapshot(now, ask("a", 400, age_s=500.0), engine=keeps_none))
    assert rest.run == ("large",)
    saved = decide(make_snapshot(runs("large", 2_000, run_age_s=1_000.0), ask("a", 400)))
    assert saved.park == {"large"}


def test_where_drafts_are_accepted_readers_need_so_much_less_of_the_pool() -> None:
    """Readers of 40 tokens/s, steps of 22 ms: with one token each none has time to spare."""

    def newcomers(tokens_per_step: float) -> int:
        given = {"rate_tps": 40.0, "tokens_per_step": tokens_per_step}
        batch = [runs(f"r{n}", 230, slack_s=60.0, **given) for n in range(6)]
        queue = [ask(f"new{n}", 230, age_s=5.0 - n, **given) for n in range(6)]
        return sum(name.startswith("new") for name in decide(make_snapshot(*batch, *queue)).run)

    assert newcomers(1.0) == 0
    assert newcomers(3.0) > 0


def test_a_step_may_take_as_long_as_its_tokens_are_read() -> None:
    """Layers leave for a third reader where a step brings each enough."""
    batch = [runs(name, 600, rate_tps=45.0, slack_s=1.0) for name in "ab"]
    newcomer = ask("c", 600, rate_tps=45.0)

    def run(tokens_per_step: float) -> tuple[str, ...]:
        requests = [replace(r, tokens_per_step=tokens_per_step) for r in (*batch, newcomer)]
        return decide(make_snapshot(*requests, h2d_bytes_per_s=3e7)).run

    assert run(1.0) == ("a", "b")
    assert run(3.0) == ("a", "b", "c")
