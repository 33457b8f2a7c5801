"""How many tokens a request may generate, by hand."""

import pytest

from services.executor.prompts.context_length import check_num_answers, resolve_max_tokens
from services.executor.types import PromptOverflow, RejectCode, RejectedError
from services.generation.conversation import ChatMessage
from services.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt

CHAT = ChatPrompt(messages=(ChatMessage(role="user", content="hi"),))
TEXT = TextPrompt(text="hi")
IDS = TokenPrompt(token_ids=(1,))


@pytest.mark.parametrize(
    ("requested", "prompt", "num_prompt_tokens", "expected"),
    [
        (None, CHAT, 10, 90),  # all that the context leaves
        (None, CHAT, 99, 1),
        (None, TEXT, 10, 16),  # OpenAI's default
        (None, IDS, 10, 16),
        (None, TEXT, 84, 16),  # 100 - 84 = 16 still fits
        (None, TEXT, 85, 15),  # 100 - 85 = 15: less than the default
        (5, CHAT, 10, 5),
        (90, TEXT, 10, 90),  # 10 + 90 = 100 fits exactly
        (91, TEXT, 10, 90),  # 101 > 100
        (2**31 - 1, CHAT, 99, 1),
    ],
)
def test_max_tokens(
    requested: int | None, prompt: Prompt, num_prompt_tokens: int, expected: int
) -> None:
    assert (
        resolve_max_tokens(
            requested, prompt=prompt, num_prompt_tokens=num_prompt_tokens, max_model_len=100
        )
        == expected
    )


@pytest.mark.parametrize(
    ("requested", "prompt", "num_prompt_tokens", "field"),
    [
        (1, TEXT, 100, "prompt"),  # the prompt alone fills the context
        (None, IDS, 100, "prompt"),
        (None, CHAT, 120, "messages"),
    ],
)
def test_what_does_not_fit_is_refused_naming_the_field(
    requested: int | None, prompt: Prompt, num_prompt_tokens: int, field: str
) -> None:
    with pytest.raises(RejectedError) as caught:
        resolve_max_tokens(
            requested, prompt=prompt, num_prompt_tokens=num_prompt_tokens, max_model_len=100
        )
    assert caught.value.rejection.code is RejectCode.CONTEXT_LENGTH
    assert caught.value.rejection.field == field
    assert caught.value.rejection.overflow == PromptOverflow(
        num_prompt_tokens=num_prompt_tokens, max_model_len=100
    )


@pytest.mark.parametrize(("num_prompt_tokens", "most"), [(1, 2**20), (8_192, 128), (8_193, 127)])
def test_the_prompts_of_all_answers_have_a_million_tokens_at_most(
    num_prompt_tokens: int, most: int
) -> None:
    check_num_answers(most, num_prompt_tokens)
    with pytest.raises(RejectedError) as caught:
        check_num_answers(most + 1, num_prompt_tokens)

    assert caught.value.rejection.code is RejectCode.INVALID_ARGUMENT
    assert caught.value.rejection.field == "n"


def test_a_prompt_of_any_length_has_one_answer() -> None:
    check_num_answers(1, 2**21)
