"""vLLM's outputs become deltas at once; nothing follows an ending."""

from dataclasses import dataclass, field

import pytest

from services.executor.collector import StepCollector, to_delta
from services.executor.types import Delta, Failure, FinishReason, Token


@dataclass
class FakeCompletion:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class FakeOutput:
    outputs: list[FakeCompletion]


def make_output(*ids: int, text: str = "", finish_reason: str | None = None) -> FakeOutput:
    return FakeOutput([FakeCompletion(text, list(ids), finish_reason)])


def test_a_token_carries_the_text_of_its_step() -> None:
    assert to_delta(make_output(5, text="hi")) == Delta((Token(5, "hi"),))


def test_the_text_of_several_tokens_of_a_step_is_the_last_ones() -> None:
    # Only the last token is known to have completed it.
    assert to_delta(make_output(5, 6, text="hi")).tokens == (Token(5, ""), Token(6, "hi"))


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
