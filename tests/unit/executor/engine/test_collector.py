"""vLLM's outputs become deltas at once; nothing follows an ending."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.executor.engine.collector import (
    DEAD_END,
    NOT_KEPT,
    UNREADABLE,
    Reporting,
    StepCollector,
    to_delta,
)
from services.executor.request_tag import retained_to_params, to_transfer_params
from services.executor.types import Delta, Failure, Said, Token
from services.generation.conversation import ToolCall, ToolCallPart
from services.generation.finish import FinishReason
from services.generation.logprobs import Logprob, TokenLogprobs
from services.generation.retention import Retained, RetainedSpan, RetentionStatus
from services.pacing.cause import Cause, Delay

OF_THE_PROMPT = Retained(status=RetentionStatus.DEFERRED)
OF_ALL = Retained(status=RetentionStatus.ACCEPTED, spans=(RetainedSpan(end=64, retention_s=300.0),))


@dataclass
class FakeLogprob:
    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass
class FakeCompletion:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, FakeLogprob]] | None = None


@dataclass
class FakeOutput:
    outputs: list[FakeCompletion]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, FakeLogprob] | None] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


def make_output(*ids: int, text: str = "", finish_reason: str | None = None) -> FakeOutput:
    return FakeOutput([FakeCompletion(text, list(ids), finish_reason)])


def test_a_token_carries_the_text_of_its_step() -> None:
    assert to_delta(make_output(5, text="hi")) == Delta((Token(5, "hi"),))


@pytest.mark.parametrize(("told", "num_cached"), [(None, 0), (0, 0), (16, 16)])
def test_an_ending_tells_how_much_of_the_prompt_was_cached(
    told: int | None, num_cached: int
) -> None:
    first, last = make_output(5), make_output(6, finish_reason="length")
    first.num_cached_tokens = last.num_cached_tokens = told

    assert to_delta(first).num_cached_tokens == 0
    assert to_delta(last).num_cached_tokens == num_cached


@pytest.mark.parametrize(
    ("asks_to_keep", "first", "last", "told"),
    [
        (False, None, None, None),
        (True, None, None, NOT_KEPT),  # an engine that keeps nothing says nothing
        (True, OF_THE_PROMPT, None, OF_THE_PROMPT),  # it ended in the front
        (True, OF_THE_PROMPT, OF_ALL, OF_ALL),
    ],
)
def test_an_ending_tells_what_was_last_said_to_be_kept(
    asks_to_keep: bool, first: Retained | None, last: Retained | None, told: Retained | None
) -> None:
    deltas: list[Delta] = []
    collector = StepCollector("r", deltas.append, Reporting(asks_to_keep=asks_to_keep))
    outputs = [make_output(5), make_output(6), make_output(7, finish_reason="stop")]
    for output, retained in zip(outputs, (first, None, last), strict=True):
        output.kv_transfer_params = retained and retained_to_params(retained)
        collector.put(output)

    assert [delta.retained for delta in deltas] == [None, None, told]


@pytest.mark.parametrize(("came_to", "told"), [(None, ""), (7, ""), ("END", "END")])
def test_an_ending_tells_the_stop_string_that_it_came_to(
    came_to: int | str | None, told: str
) -> None:
    output = make_output(5, finish_reason="stop")
    output.outputs[0].stop_reason = came_to

    assert to_delta(output).stop_string == told


def test_the_text_of_several_tokens_of_a_step_is_the_last_ones() -> None:
    # Only the last token is known to have completed it.
    assert to_delta(make_output(5, 6, text="hi")).tokens == (Token(5, ""), Token(6, "hi"))


def test_the_first_token_of_a_step_has_its_delay() -> None:
    late, delay = make_output(5, 6, text="hi"), Delay(Cause.COPIES, 0.25)
    late.kv_transfer_params = to_transfer_params(delay)

    assert to_delta(late).tokens == (Token(5, "", delay=delay), Token(6, "hi"))
    late.outputs = [FakeCompletion(finish_reason="abort")]
    assert to_delta(late).tokens == ()


@pytest.mark.parametrize(
    ("reason", "ending"),
    [
        ("stop", FinishReason.STOP),
        ("repetition", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("abort", FinishReason.CANCELLED),
    ],
)
def test_finish_reasons_become_endings_also_without_a_token(
    reason: str, ending: FinishReason
) -> None:
    assert to_delta(make_output(finish_reason=reason)) == Delta((), ending)


def test_an_engine_error_of_one_request_may_be_retried() -> None:
    ending = to_delta(make_output(finish_reason="error")).ending
    assert isinstance(ending, Failure)
    assert ending.retryable


@pytest.mark.logs("request_failed")
def test_an_exception_becomes_a_retryable_failure() -> None:
    deltas: list[Delta] = []
    StepCollector("a", deltas.append).put(RuntimeError("secret path"))

    assert deltas == [Delta((), Failure(message="the engine failed", retryable=True))]


def test_nothing_follows_an_ending() -> None:
    deltas: list[Delta] = []
    collector = StepCollector("a", deltas.append)
    collector.put(make_output(1, finish_reason="stop"))
    collector.put(make_output(2))
    collector.put(RuntimeError())

    assert deltas == [Delta((Token(1, ""),), FinishReason.STOP)]


def test_steps_stay_apart_however_fast_they_come() -> None:
    deltas: list[Delta] = []
    collector = StepCollector("a", deltas.append)
    for id in range(3):
        collector.put(make_output(id, text=str(id)))

    assert [delta.tokens for delta in deltas] == [(Token(i, str(i)),) for i in range(3)]


def make_place(*entries: tuple[int, float, str]) -> dict[int, FakeLogprob]:
    """Return a place as vLLM gives it: the chosen token first, then the likeliest by rank."""
    return {id: FakeLogprob(logprob, 1, text) for id, logprob, text in entries}


def scored(id: int, logprob: float, text: str) -> Logprob:
    return Logprob(id, text, logprob)


def test_the_likeliest_tokens_come_in_order_without_a_chosen_one_that_is_none_of_them() -> None:
    output = make_output(5, 6, text="hi")
    output.outputs[0].logprobs = [
        make_place((5, -3.0, "a"), (1, -0.5, "b"), (2, -1.5, "c")),  # chosen beside the two asked
        make_place((6, -1.0, "d"), (3, -0.4, "e")),  # chosen as one of the two
    ]

    first, second = to_delta(output, Reporting(num_logprobs=2)).tokens

    assert first.logprobs == TokenLogprobs(
        scored(5, -3.0, "a"), (scored(1, -0.5, "b"), scored(2, -1.5, "c"))
    )
    assert second.logprobs == TokenLogprobs(
        scored(6, -1.0, "d"), (scored(3, -0.4, "e"), scored(6, -1.0, "d"))
    )


def test_what_cannot_be_has_a_finite_probability() -> None:
    output = make_output(5)
    output.outputs[0].logprobs = [make_place((5, float("-inf"), "a"))]

    (token,) = to_delta(output, Reporting(num_logprobs=0)).tokens

    assert token.logprobs == TokenLogprobs(scored(5, -9999.0, "a"), ())  # JSON has no infinity


def test_a_prompt_is_scored_from_its_second_token_on() -> None:
    output = make_output(5)
    output.prompt_token_ids = [7, 8]
    output.prompt_logprobs = [None, make_place((8, -2.0, "b"), (9, -1.0, "c"))]

    delta = to_delta(output, Reporting(num_logprobs=1, first_prompt_token="a"))

    assert delta.prompt_logprobs == (
        TokenLogprobs(Logprob(7, "a", None)),
        TokenLogprobs(scored(8, -2.0, "b"), (scored(9, -1.0, "c"),)),
    )


CALL = ToolCall(id="c", name="f", arguments="{}")


@dataclass
class FakeParser:
    """Reads a step as thoughts and a call of the model's choice, but not "?"."""

    chose_calls: bool = False
    num_reasoning_tokens: int = 0
    is_read: bool = False
    tool_calls = (CALL,)

    def parse(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> Said:
        if text == "?":
            raise ValueError(text)
        self.chose_calls = is_last
        self.num_reasoning_tokens += len(token_ids)
        return Said("", f"{text} {len(token_ids)}", (ToolCallPart(0, "c", "f"),) * is_last)


def test_what_a_parser_reads_belongs_to_the_last_token_of_its_step() -> None:
    reporting = Reporting(parser=FakeParser())
    first = to_delta(make_output(5, 6, text="a"), reporting)
    last = to_delta(make_output(7, text="b", finish_reason="stop"), reporting)

    thought = Token(6, "", reasoning="a 2", is_read=False)
    assert first == Delta((Token(5, "", is_read=False), thought))
    call = (ToolCallPart(0, "c", "f"),)
    assert last == Delta(
        (Token(7, "", reasoning="b 1", tool_calls=call, is_read=False),),
        FinishReason.TOOL_CALLS,
        num_reasoning_tokens=3,
        tool_calls=(CALL,),
    )


def test_an_answer_with_calls_that_is_cut_short_says_so() -> None:
    reporting = Reporting(parser=FakeParser(chose_calls=True))

    cut = to_delta(make_output(finish_reason="length"), reporting)

    assert (cut.ending, cut.tool_calls) == (FinishReason.LENGTH, ())


@pytest.mark.logs("answer_not_read")
def test_an_answer_that_its_parser_cannot_read_fails_alone() -> None:
    deltas: list[Delta] = []
    collector = StepCollector("r", deltas.append, Reporting(parser=FakeParser()))
    collector.put(make_output(5, text="a"))
    collector.put(make_output(6, text="?"))
    collector.put(make_output(7, text="b"))

    assert deltas[1:] == [Delta((), UNREADABLE)]
    assert not UNREADABLE.retryable


def test_a_form_that_allows_no_next_token_is_told_from_a_lost_state() -> None:
    held, free = Reporting(has_form=True), Reporting()
    drawn = make_output(5, text="x", finish_reason="error")
    lost = make_output(finish_reason="error")

    assert to_delta(drawn, held).ending == DEAD_END
    for output, reporting in ((lost, held), (drawn, free), (lost, free)):
        ending = to_delta(output, reporting).ending
        assert isinstance(ending, Failure)
        assert ending.retryable
    assert not DEAD_END.retryable


@pytest.mark.parametrize("scored", [[None], [None, make_place((8, -2.0, "b"))]])
def test_a_prompt_that_was_cut_off_before_the_first_token_is_not_read(
    scored: list[dict[int, FakeLogprob] | None],
) -> None:
    output = make_output(finish_reason="abort")
    output.prompt_token_ids = [7, 8, 9]
    output.prompt_logprobs = scored

    assert to_delta(output, Reporting(num_logprobs=1)) == Delta((), FinishReason.CANCELLED)


def test_an_output_that_cannot_be_read_ends_its_request_and_is_not_the_output_loop_s() -> None:
    deltas: list[Delta] = []
    collector = StepCollector("r", deltas.append)
    unequal = make_output(5, 6)
    unequal.outputs[0].logprobs = [make_place((5, -1.0, "a"))]
    collector.put(unequal)
    collector.put(make_output(7))

    assert deltas == [Delta((), UNREADABLE)]


@pytest.mark.parametrize("reads", [False, True])
def test_without_a_parser_all_of_an_answer_is_read_or_nothing_is(reads: bool) -> None:
    tokens = to_delta(make_output(5, 6, text="a"), Reporting(reads=reads)).tokens

    assert [token.is_read for token in tokens] == [reads, reads]


def test_what_a_parser_finds_to_be_read_is_marked() -> None:
    tokens = to_delta(
        make_output(5, 6, text="a"), Reporting(parser=FakeParser(is_read=True))
    ).tokens

    assert all(token.is_read for token in tokens)
