"""Where an answer goes on whose executor was lost, and when it does not."""

import pytest

from services.gateway.errors import (
    EngineFailedError,
    EngineStalledError,
    LeavingError,
    LinkBrokenError,
    LinkStalledError,
)
from services.gateway.executors.routing import Candidate
from services.gateway.live.failover.rules import (
    Closed,
    FailoverLimits,
    LostAnswer,
    MoveCause,
    Step,
    Trial,
    Verdict,
    cause_of_move,
    decide,
    how_continued,
)
from services.gateway.live.losses import Losses, life_of, may_live
from services.gateway.types import Continued
from services.generation.sampling_params import SamplingParams

LIMITS = FailoverLimits(timeout_s=60.0)
OFF = FailoverLimits(timeout_s=0.0)


def make_candidate(address: str = "other", *, fingerprint: str = "f", **overrides) -> Candidate:
    facts = {
        "address": address,
        "models": frozenset({"m"}),
        "max_model_len": 1_000,
        "num_inflight": 0,
        "fingerprints": {"m": fingerprint},
        "numerics": "n",
        "is_repeatable": True,
    }
    return Candidate(**facts | overrides)


HOME = make_candidate("home")
OTHER = make_candidate("other")


def make_answer(**overrides) -> LostAnswer:
    facts = {
        "model": "m",
        "is_whole": False,
        "num_tokens": 10,
        "is_complete": True,
        "num_prompt_tokens": 100,
        "max_tokens": 200,
        "home": HOME,
        "lost_at": "home",
    }
    return LostAnswer(**facts | overrides)


def step_of(answer: LostAnswer, *candidates: Candidate, limits=LIMITS, **closed) -> Step:
    return decide(answer, candidates, limits, closed=Closed(**closed)).step


def test_what_was_begun_goes_on_at_another_executor_of_its_fingerprint() -> None:
    unlike = make_candidate("unlike", fingerprint="g")
    assert decide(make_answer(), [unlike, OTHER], LIMITS) == Verdict(Step.CONTINUE, OTHER)
    assert step_of(make_answer(), unlike) is Step.WAIT


def test_the_one_with_the_fewest_requests_takes_it_and_the_lost_one_only_alone() -> None:
    full = make_candidate("full", num_inflight=9)
    assert decide(make_answer(), [full, OTHER], LIMITS).to is OTHER
    assert decide(make_answer(), [full, HOME], LIMITS).to is full
    assert decide(make_answer(), [HOME], LIMITS).to is HOME


def test_what_has_not_begun_begins_again_whatever_the_fingerprint() -> None:
    unlike = make_candidate("unlike", fingerprint="g")
    unstarted = make_answer(num_tokens=0)
    assert decide(unstarted, [unlike], LIMITS) == Verdict(Step.BEGIN_AGAIN, unlike)
    assert step_of(make_answer(num_tokens=0, home=None), unlike) is Step.BEGIN_AGAIN


def test_a_whole_answer_goes_on_where_it_can_and_else_begins_again() -> None:
    unlike = make_candidate("unlike", fingerprint="g")
    whole = make_answer(is_whole=True)
    assert decide(whole, [unlike, OTHER], LIMITS) == Verdict(Step.CONTINUE, OTHER)
    assert decide(whole, [unlike], LIMITS) == Verdict(Step.BEGIN_AGAIN, unlike)
    assert step_of(make_answer(is_whole=True, is_complete=False), OTHER) is Step.BEGIN_AGAIN


@pytest.mark.parametrize(("length", "step"), [(300, Step.CONTINUE), (299, Step.WAIT)])
def test_it_goes_only_where_prompt_and_answer_have_room(length, step) -> None:
    """100 tokens of prompt, and 200 of the answer at most."""
    assert step_of(make_answer(), make_candidate(max_model_len=length)) is step


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"is_complete": False}, "it has more than 131072 tokens"),
        ({"home": make_candidate("home", fingerprint="")}, "its executor does not say what"),
        ({"max_tokens": 0}, "its executor does not say how long"),
        ({"num_counts": 2}, "executors were lost, or gave up on it, twice"),
    ],
)
def test_what_can_go_on_nowhere_is_given_up_at_once(overrides, why) -> None:
    empty = make_candidate("other", fingerprint="")
    verdict = decide(make_answer(**overrides), [OTHER, empty], LIMITS)
    assert verdict.step is Step.GIVE_UP
    assert verdict.why.startswith(why)


def test_nothing_is_blamed_while_an_executor_may_be_found_alive() -> None:
    assert step_of(make_answer(num_counts=2.0, is_sure=False), OTHER) is Step.WAIT
    assert step_of(make_answer(num_counts=2.0), OTHER) is Step.GIVE_UP


@pytest.mark.parametrize(
    ("error", "is_alive"),
    [
        (LinkBrokenError(), True),
        (LinkStalledError(), True),
        (EngineStalledError(), False),
        (EngineFailedError(), False),
    ],
)
def test_an_executor_whose_link_was_lost_may_be_found_alive(error, is_alive) -> None:
    home, again = make_candidate("home", epoch=7), make_candidate("home", epoch=8)
    losses = Losses()
    losses.add(1.0, may_live(error, home))
    assert losses.total == 1.0
    for other in (again, make_candidate("other", epoch=7)):
        losses.found_alive(life_of(other))
    assert losses.total == 1.0
    losses.found_alive(life_of(home))
    assert losses.total == (0.0 if is_alive else 1.0)


def test_an_executor_that_does_not_say_which_start_it_is_of_is_never_found_alive() -> None:
    assert may_live(LinkBrokenError(), HOME) is None
    assert may_live(LinkBrokenError(), None) is None


def test_one_loss_on_trial_is_forgiven() -> None:
    assert step_of(make_answer(num_counts=1), OTHER) is Step.CONTINUE


def test_without_a_timeout_nothing_that_was_begun_moves_and_nothing_waits() -> None:
    assert step_of(make_answer(), OTHER, limits=OFF) is Step.GIVE_UP
    assert step_of(make_answer(is_whole=True), OTHER, limits=OFF) is Step.GIVE_UP
    assert step_of(make_answer(num_tokens=0), OTHER, limits=OFF) is Step.BEGIN_AGAIN
    assert step_of(make_answer(num_tokens=0), limits=OFF) is Step.GIVE_UP


@pytest.mark.parametrize(("waited_s", "step"), [(59.9, Step.WAIT), (60.0, Step.GIVE_UP)])
def test_an_executor_is_waited_for_until_the_timeout(waited_s, step) -> None:
    assert step_of(make_answer(waited_s=waited_s)) is step


def test_the_newest_refusal_is_the_reason() -> None:
    late = make_answer(waited_s=60.0, refusal="the queue is full")
    verdict = decide(late, [OTHER], LIMITS, closed=Closed(not_now={"other"}))
    assert verdict == Verdict(Step.GIVE_UP, why="the queue is full")


def test_when_all_that_could_go_on_have_refused_for_good_nothing_is_waited_for() -> None:
    refused = make_answer(refusal="another prompt")
    third = make_candidate("third")
    assert step_of(refused, OTHER, never={"other"}) is Step.GIVE_UP
    assert decide(refused, [OTHER, third], LIMITS, closed=Closed(never={"other"})).to is third
    assert step_of(refused, OTHER, third, never={"other"}, not_now={"third"}) is Step.WAIT


def test_a_turn_at_an_executor_where_another_is_tried_comes_however_late() -> None:
    late = make_answer(num_counts=1, waited_s=600.0)
    assert step_of(late, OTHER, tries={"other"}) is Step.WAIT
    assert decide(late, [OTHER, HOME], LIMITS, closed=Closed(tries={"other"})).to is HOME


def test_unequal_numerics_are_for_the_operator_to_allow() -> None:
    other = make_candidate(numerics="another")
    strict = FailoverLimits(timeout_s=60.0, across_numerics=False)
    assert step_of(make_answer(), other) is Step.CONTINUE
    assert step_of(make_answer(), other, limits=strict) is Step.WAIT


@pytest.mark.parametrize(
    ("overrides", "continued"),
    [
        ({}, Continued.IDENTICAL),
        ({"numerics": "another"}, Continued.VALID),
        ({"is_repeatable": False}, Continued.VALID),
        ({"fingerprints": {"m": "another"}}, Continued.VALID),  # it began again there
    ],
)
def test_identical_is_said_only_where_it_holds_at_both(overrides, continued) -> None:
    other = make_candidate(**overrides)
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=0)):
        assert how_continued(HOME, other, "m", sampling) is continued
        assert how_continued(other, HOME, "m", sampling) is continued
    unseeded = SamplingParams(temperature=1.0)
    assert how_continued(HOME, other, "m", unseeded) is Continued.VALID


def test_a_seed_says_not_what_is_drawn_where_drafts_are_made() -> None:
    drafting = make_candidate(makes_drafts=True)
    seeded, greedy = SamplingParams(temperature=1.0, seed=7), SamplingParams(temperature=0.0)

    assert how_continued(HOME, OTHER, "m", seeded) is Continued.IDENTICAL
    assert how_continued(HOME, drafting, "m", seeded) is Continued.VALID
    assert how_continued(drafting, HOME, "m", seeded) is Continued.VALID
    assert how_continued(drafting, drafting, "m", greedy) is Continued.IDENTICAL


@pytest.mark.parametrize(
    ("num_tokens", "since_taken_s", "since_token_s", "count", "is_on"),
    [
        (0, 0.0, 0.0, 1.0, True),
        (0, 1.9, 0.0, 1.0, True),
        (0, 2.0, 0.0, 0.5, True),  # it may have waited in the queue all the time
        (0, 9.9, 0.0, 0.5, True),
        (0, 10.0, 0.0, 0.5, False),
        (1, 600.0, 1.9, 1.0, True),  # it has only just begun
        (31, 600.0, 1.9, 1.0, True),
        (32, 1.0, 0.5, 0.0, False),
        (1, 3.0, 2.0, 0.0, False),
    ],
)
def test_a_trial_lasts_32_tokens_or_two_seconds_from_the_first_one(
    num_tokens, since_taken_s, since_token_s, count, is_on
) -> None:
    trial = Trial(num_tokens=num_tokens, since_taken_s=since_taken_s, since_token_s=since_token_s)
    assert (trial.count, trial.is_on) == (count, is_on)


@pytest.mark.parametrize(
    ("since_taken_s", "count", "is_on"),
    [(2.7, 1.0, True), (9.9, 1.0, True), (10.0, 0.5, False)],
)
def test_a_suspect_without_a_token_counts_whole_while_it_is_alone(
    since_taken_s, count, is_on
) -> None:
    trial = Trial(num_tokens=0, since_taken_s=since_taken_s, since_token_s=0.0, is_suspect=True)
    assert (trial.count, trial.is_on) == (count, is_on)


@pytest.mark.parametrize(
    ("num_again", "is_suspect", "expected"),
    [(0, False, 32), (20, False, 32), (0, True, 4), (20, True, 24), (30, True, 32)],
)
def test_a_suspect_proves_well_with_some_tokens_more_than_it_had(
    num_again: int, is_suspect: bool, expected: int
) -> None:
    trials = [
        Trial(
            num_tokens=n,
            since_taken_s=1.0,
            since_token_s=0.5,
            is_suspect=is_suspect,
            num_again=num_again,
        )
        for n in (expected - 1, expected)
    ]
    assert [(trial.count, trial.is_on) for trial in trials] == [(1.0, True), (0.0, False)]


def test_causes_are_told_by_what_ended_the_request() -> None:
    assert cause_of_move(LinkBrokenError()) is MoveCause.LINK
    assert cause_of_move(LinkStalledError()) is MoveCause.STALL
    assert cause_of_move(EngineFailedError()) is MoveCause.ENGINE
    assert cause_of_move(LeavingError()) is MoveCause.LEAVING
