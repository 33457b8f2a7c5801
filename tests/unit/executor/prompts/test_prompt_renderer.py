"""What is too long is refused unrendered, and what is large lets small prompts go beside it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.renderers.params import TokenizeParams

from services.executor.prompts.prompt_renderer import SMALL_PROMPT, PromptRenderer
from services.executor.types import PromptOverflow, RejectCode, RejectedError
from services.generation.conversation import ChatMessage, ConversationOptions, Tool, ToolCall
from services.generation.prompts import (
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenizeOptions,
    TokenPrompt,
)

MAX_MODEL_LEN = 10
MAX_CHARACTERS = 50  # five for each token at most


class HeldRenderer:
    """Stands for vLLM's: begins what it is given at once, and ends it when it may."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=MAX_MODEL_LEN)
        self.default_cmpl_tok_params = TokenizeParams(max_total_tokens=MAX_MODEL_LEN)
        self.tokenizer = SimpleNamespace(max_chars_per_token=5)
        self.begun: list[str] = []
        self.may_end = asyncio.Event()

    async def render_cmpl_async(self, prompts: list[Any], how: Any = None) -> list[Any]:
        self.begun.append(prompts[0].get("prompt", "ids")[:2])
        await self.may_end.wait()
        return [{"prompt_token_ids": [1]}]

    async def tokenize_prompt_async(self, prompt: Any, how: Any) -> Any:
        self.begun.append(f"d{prompt['prompt_token_ids'][0]}")
        await self.may_end.wait()
        return prompt | {"prompt": "text"}


@pytest.fixture
async def held() -> HeldRenderer:
    return HeldRenderer()


@pytest.fixture
def renderer(held: HeldRenderer) -> PromptRenderer:
    return PromptRenderer(held)  # type: ignore[arg-type]


def chat(*turns: ChatMessage, **options: Any) -> ChatPrompt:
    return ChatPrompt(turns, ConversationOptions(**options))


def turn(role: str, content: str, **more: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **more)


CALL = ToolCall(id="c", name="f", arguments="x" * 60)


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt("x" * MAX_CHARACTERS),
        chat(turn("user", "x" * MAX_CHARACTERS)),
        # Templates trim turns, and leave out what the model has thought, said and called.
        chat(turn("user", "x" * MAX_CHARACTERS + " " * 9)),
        chat(turn("user", "x"), turn("assistant", "x" * 60, reasoning="x" * 60), turn("user", "x")),
        chat(turn("user", "x"), turn("assistant", "", tool_calls=(CALL,))),
        chat(turn("user", "x"), tools=(Tool(name="f", parameters="x" * 60),)),
        TokenPrompt((1,) * 60),  # counted, not measured
    ],
)
def test_what_may_fit_is_not_refused_for_its_characters(
    renderer: PromptRenderer, prompt: Prompt
) -> None:
    renderer.check_length(prompt)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt("x" * (MAX_CHARACTERS + 1)), "prompt"),
        (chat(turn("user", "x" * (MAX_CHARACTERS + 1))), "messages"),
        (chat(turn("system", "x" * 25), turn("user", "x"), turn("tool", "x" * 25)), "messages"),
    ],
)
def test_what_cannot_fit_is_refused_unrendered_in_vllm_s_words(
    renderer: PromptRenderer, held: HeldRenderer, prompt: Prompt, field: str
) -> None:
    with pytest.raises(RejectedError) as caught:
        renderer.check_length(prompt)

    rejection = caught.value.rejection
    assert (rejection.code, rejection.field) == (RejectCode.CONTEXT_LENGTH, field)
    assert rejection.overflow == PromptOverflow(num_prompt_tokens=0, max_model_len=MAX_MODEL_LEN)
    assert "contains 51 characters (more than 50 characters" in rejection.message
    assert held.begun == []


async def begin(*works: Any) -> list[asyncio.Task[Any]]:
    tasks = []
    for work in works:
        tasks.append(asyncio.create_task(work))
        for _ in range(10):
            await asyncio.sleep(0)
    return tasks


async def test_small_prompts_go_beside_large_ones_which_clients_share(
    renderer: PromptRenderer, held: HeldRenderer
) -> None:
    def large(name: str) -> TextPrompt:
        return TextPrompt(name + "x" * (SMALL_PROMPT - 2))

    tasks = await begin(
        renderer.render(large("a1"), fair_key="a"),
        renderer.tokenize(large("a2"), TokenizeOptions(fair_key="a")),
        renderer.render(large("a3"), fair_key="a"),
        renderer.detokenize((4,) * SMALL_PROMPT, fair_key="a"),
        renderer.render(large("b1"), fair_key="b"),
        renderer.render(TextPrompt("s1" + "x" * (SMALL_PROMPT - 3)), fair_key="c"),
        renderer.tokenize(TextPrompt("s2"), TokenizeOptions()),
        renderer.detokenize((5,), fair_key="c"),
    )
    assert held.begun == ["a1", "s1"]  # nothing else is handed to vLLM, whose clock runs
    held.may_end.set()
    await asyncio.gather(*tasks)

    assert [name for name in held.begun if name in ("s1", "s2", "d5")] == ["s1", "s2", "d5"]
    large_ones = [name for name in held.begun if name in ("a1", "a2", "a3", "b1", "d4")]
    assert large_ones == ["a1", "a2", "b1", "a3", "d4"]


async def test_what_a_prompt_s_own_ids_say_is_part_of_its_turn(
    renderer: PromptRenderer, held: HeldRenderer
) -> None:
    (task,) = await begin(renderer.render(TokenPrompt((6,)), with_text=True, fair_key="a"))
    held.may_end.set()

    assert (await task)["prompt"] == "text"
