"""How answers tell the ids of tokens, in events and as a whole."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from services.gateway.openai.responses import (
    Answer,
    AnswerHead,
    AnswerKind,
    ChunkWriter,
    whole_answers,
)
from services.gateway.types import Finish, RequestId, Token
from services.generation.finish import FinishReason
from services.generation.logprobs import EchoedPrompt

TOKENS = (Token(0, 100, "a"), Token(1, 101, ""), Token(2, 102, "b"))  # one without text
PROMPT = EchoedPrompt("", token_ids=(7, 8))
FINISH = Finish(reason=FinishReason.STOP, num_prompt_tokens=2, num_output_tokens=3)


def make_head(kind: AnswerKind, **overrides: Any) -> AnswerHead:
    return AnswerHead(kind=kind, request_id=RequestId("r"), model="m", created_s=1, **overrides)


def stream_of(head: AnswerHead, prompt: EchoedPrompt | None, **writing: Any) -> list[Any]:
    """Return the chunks of an answer whose tokens come one at a time, or all in one event."""
    writer = ChunkWriter(head, 0, includes_usage=False)
    events = writer.prompt(prompt) if prompt else b""
    batches: Sequence[Sequence[Token]] = [TOKENS] if writing else [[token] for token in TOKENS]
    events += b"".join(writer.tokens(batch, **writing) for batch in batches)
    events += writer.ending(FINISH)
    return [json.loads(line[len("data: ") :]) for line in events.decode().split("\n\n") if line]


def test_a_chat_tells_the_prompt_s_ids_with_the_role_and_each_token_s_with_it() -> None:
    chunks = stream_of(make_head(AnswerKind.CHAT, has_token_ids=True), PROMPT)

    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[7, 8], None, None, None, None]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [[], [100], [101], [102], []]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"].get("content") for choice in choices[1:]] == ["a", "", "b", None]


def test_a_completion_tells_the_prompt_s_ids_before_all_else() -> None:
    chunks = stream_of(make_head(AnswerKind.COMPLETION, has_token_ids=True), PROMPT)

    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[7, 8], *[None] * 4]
    assert [choice["token_ids"] for choice in choices] == [[], [100], [101], [102], []]
    assert [choice["text"] for choice in choices] == ["", "a", "", "b", ""]
    assert not any("prompt_token_ids" in chunk for chunk in chunks)


@pytest.mark.parametrize("kind", AnswerKind)
def test_the_event_of_a_lagging_reader_has_the_ids_of_all_its_tokens(kind) -> None:
    chunks = stream_of(make_head(kind, has_token_ids=True), PROMPT, as_one=True)

    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[], [100, 101, 102], []]


def test_an_answer_whose_ids_are_not_told_may_have_those_of_its_prompt() -> None:
    chunks = stream_of(make_head(AnswerKind.CHAT), PROMPT)

    assert chunks[0]["prompt_token_ids"] == [7, 8]
    assert len(chunks) == 4  # the token without text has none
    assert not any("token_ids" in chunk["choices"][0] for chunk in chunks)


@pytest.mark.parametrize("kind", AnswerKind)
def test_nothing_tells_ids_that_were_not_asked_for(kind) -> None:
    answer = Answer(tokens=TOKENS, finish=FINISH, prompt=None)

    written = json.dumps(
        [stream_of(make_head(kind), None), whole_answers(make_head(kind), [answer])]
    )

    assert "token_ids" not in written


def test_a_whole_chat_has_the_ids_of_its_one_prompt_and_of_each_answer() -> None:
    head = make_head(AnswerKind.CHAT, has_token_ids=True, answers_per_prompt=2)
    answers = [Answer(tokens=t, finish=FINISH, prompt=PROMPT) for t in (TOKENS, TOKENS[:1])]

    whole = whole_answers(head, answers)

    assert list(whole["prompt_token_ids"]) == [7, 8]
    assert [choice["token_ids"] for choice in whole["choices"]] == [[100, 101, 102], [100]]
    assert not any("prompt_token_ids" in choice for choice in whole["choices"])


def test_whole_completions_have_the_ids_of_their_own_prompts_beside_an_echo() -> None:
    head = make_head(AnswerKind.COMPLETION, has_token_ids=True)
    prompts = [EchoedPrompt("x", token_ids=(7,)), EchoedPrompt("y", token_ids=(8, 9))]
    answers = [Answer(tokens=TOKENS, finish=FINISH, prompt=prompt) for prompt in prompts]

    whole = whole_answers(head, answers)

    assert [list(choice["prompt_token_ids"]) for choice in whole["choices"]] == [[7], [8, 9]]
    assert [choice["token_ids"] for choice in whole["choices"]] == [[100, 101, 102]] * 2
    assert [choice["text"] for choice in whole["choices"]] == ["xab", "yab"]
    assert "prompt_token_ids" not in whole
