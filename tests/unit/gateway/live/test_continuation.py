"""What is kept of an answer for another executor to go on with it."""

from collections.abc import Sequence

import pytest
from prometheus_client import REGISTRY

from services.gateway.errors import GenerationFailedError
from services.gateway.live.continuation import Continuation
from services.gateway.types import Continued, Token
from services.pacing.cause import Cause, Delay


def make_tokens(ids: Sequence[int]) -> list[Token]:
    return [Token(index, id, "x") for index, id in enumerate(ids)]


def resume_of(continuation: Continuation):
    return continuation.resume(num_delivered=1, last_due_age_s=-2.0, arrived_age_s=3.0)


def test_an_answer_is_handed_over_with_all_its_tokens() -> None:
    continuation = Continuation(max_kept_tokens=3)
    continuation.max_tokens, continuation.prompt_digest = 9, 1 << 63
    assert resume_of(continuation) is None
    continuation.add(make_tokens([7, 5]), 0.0)
    continuation.add(make_tokens([7]), 0.0)

    resume = resume_of(continuation)

    assert continuation.is_complete
    assert resume is not None
    assert list(resume.output_ids) == [7, 5, 7]
    assert (resume.max_tokens, resume.prompt_digest) == (9, 1 << 63)
    assert (resume.num_delivered_tokens, resume.last_due_age_s) == (1, -2.0)
    assert resume.arrived_age_s == 3.0


@pytest.mark.parametrize(("num_tokens", "kept", "again"), [(2, 1, [2, 3]), (9, 1, [2, 3])])
def test_the_last_tokens_are_compared_with_those_that_come_again(num_tokens, kept, again) -> None:
    continuation = Continuation(max_kept_tokens=9)
    continuation.add(make_tokens([1, 2, 3]), 0.0)
    continuation.overlap(num_tokens)

    resume = continuation.resume(num_delivered=3, last_due_age_s=0.0, arrived_age_s=0.0)

    assert resume is not None
    assert (list(resume.output_ids), resume.num_delivered_tokens) == ([1], kept)
    assert continuation.without_overlap(make_tokens(again[:1])) == []
    assert continuation.overlaps
    tokens = continuation.without_overlap(make_tokens([again[1], 5]))
    assert [token.id for token in tokens] == [5]
    assert not continuation.overlaps


def test_a_token_that_comes_again_as_another_is_an_error() -> None:
    continuation = Continuation(max_kept_tokens=9)
    continuation.add(make_tokens([1, 2, 3]), 0.0)
    continuation.overlap(2)
    with pytest.raises(GenerationFailedError, match="came to token 4 where it has 3"):
        continuation.without_overlap(make_tokens([2, 4]))


@pytest.mark.parametrize("ids", [[], [1]])
def test_an_answer_of_one_token_is_not_compared(ids) -> None:
    continuation = Continuation(max_kept_tokens=9)
    continuation.add(make_tokens(ids), 0.0)
    continuation.overlap(4)
    assert not continuation.overlaps


def test_an_answer_that_begins_again_is_not_compared() -> None:
    continuation = Continuation(max_kept_tokens=9)
    continuation.add(make_tokens([1, 2]), 0.0)
    continuation.overlap(1)
    continuation.forget()
    assert not continuation.overlaps


def test_above_the_bound_no_ids_are_kept() -> None:
    continuation = Continuation(max_kept_tokens=3)
    continuation.add(make_tokens([1, 2, 3]), 0.0)
    assert continuation.is_complete
    continuation.add(make_tokens([4]), 0.0)
    assert not continuation.is_complete
    continuation.add(make_tokens([5]), 0.0)
    assert not continuation.is_complete
    assert len(continuation._ids) == 0


def test_an_answer_that_begins_again_has_nothing() -> None:
    continuation = Continuation(max_kept_tokens=3)
    continuation.add(make_tokens([1, 2, 3, 4]), 0.0)
    continuation.forget()
    assert resume_of(continuation) is None
    continuation.add(make_tokens([8]), 0.0)
    assert continuation.is_complete
    resume = resume_of(continuation)
    assert resume is not None
    assert list(resume.output_ids) == [8]


def test_one_move_that_is_only_valid_makes_the_answer_so() -> None:
    continuation = Continuation(max_kept_tokens=3)
    continuation.moved(Continued.IDENTICAL)
    assert continuation.continued is Continued.IDENTICAL
    continuation.moved(Continued.VALID)
    continuation.moved(Continued.IDENTICAL)
    assert (continuation.moves, continuation.continued) == (3, Continued.VALID)


@pytest.mark.parametrize(
    ("dry_s", "num_hidden"),
    [(14.0, 1), (13.996, 1), (13.99, 0), (float("inf"), 0), (float("-inf"), 0)],
)
def test_a_gap_is_hidden_if_its_reader_had_something_until_its_end(dry_s, num_hidden) -> None:
    """Lost at 10 s, the next tokens come at 14 s; 5 ms are no delay."""
    continuation = Continuation(max_kept_tokens=3)
    continuation.gap_since_s = 10.0
    hidden = "evenflow_gateway_moves_hidden_total"
    before = REGISTRY.get_sample_value(hidden) or 0.0

    first, second = continuation.end_gap(make_tokens([1, 2]), 14.0, dry_s)

    assert first.delay == Delay(Cause.FAILOVER, 4.0)
    assert second.delay is None
    assert continuation.gap_since_s is None
    assert (REGISTRY.get_sample_value(hidden) or 0.0) - before == num_hidden
