"""vLLM's own renderer, without an engine: off the event loop, and what it counts of prompts."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.renderers import BaseRenderer, renderer_from_config

from lab.models import exactness_model
from services.executor.engine.config import make_config
from services.executor.prompts.preparation import Preparation
from services.executor.prompts.prompt_renderer import PromptRenderer
from services.executor.settings import ExecutorSettings
from services.executor.types import PromptOverflow, RejectCode, RejectedError, Submission
from services.generation.conversation import ChatMessage
from services.generation.prompts import (
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenizeOptions,
    TokenPrompt,
)
from services.generation.sampling_params import SamplingParams
from tests.fake_executor import EVENT_TIMEOUT_S

pytestmark = pytest.mark.filterwarnings("default")

MAX_MODEL_LEN = 64
WORDS = "many words " * MAX_MODEL_LEN  # more tokens than fit, and not too many characters


def chat(text: str) -> ChatPrompt:
    return ChatPrompt((ChatMessage(role="user", content=text),))


@pytest.fixture
def vllm_renderer() -> BaseRenderer:
    settings = ExecutorSettings(model=str(exactness_model()), max_model_len=MAX_MODEL_LEN)
    return renderer_from_config(make_config(settings))


@pytest.fixture
def renderer(vllm_renderer: BaseRenderer) -> PromptRenderer:
    return PromptRenderer(vllm_renderer)


class LoopWatch:
    """Has each call of a tokenizer wait until the event loop turns."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.calls: list[str] = []

    def wait(self, call: str) -> None:
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        assert turned.wait(EVENT_TIMEOUT_S), f"{call} holds up the event loop"
        self.calls.append(call)


def watched(tokenizer: Any, watch: LoopWatch) -> None:
    """Have calls of `tokenizer` that take time wait for `watch`."""

    class Watched(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            watch.wait("tokenising")
            return super().__call__(*args, **kwargs)

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            watch.wait("rendering")
            return super().apply_chat_template(*args, **kwargs)

        def decode(self, *args: Any, **kwargs: Any) -> Any:
            watch.wait("decoding")
            return super().decode(*args, **kwargs)

    tokenizer.__class__ = Watched


@pytest.mark.parametrize(
    ("work", "calls"),
    [
        (lambda r: r.render(TextPrompt("Hi")), ["tokenising"]),
        (lambda r: r.render(chat("Hi")), ["rendering"]),  # and tokenising
        (lambda r: r.render(TokenPrompt((5, 6)), with_text=True), ["decoding"]),
        (lambda r: r.tokenize(TextPrompt("Hi"), TokenizeOptions()), ["tokenising"]),
        (lambda r: r.tokenize(chat("Hi"), TokenizeOptions()), ["rendering"]),
        (lambda r: r.detokenize((5, 6), fair_key=""), ["decoding"]),
    ],
)
async def test_the_event_loop_turns_while_a_prompt_is_rendered(
    vllm_renderer: BaseRenderer,
    renderer: PromptRenderer,
    work: Callable[[PromptRenderer], Coroutine[Any, Any, Any]],
    calls: list[str],
) -> None:
    watch = LoopWatch()
    watched(vllm_renderer.tokenizer, watch)

    await work(renderer)

    assert watch.calls == calls


async def overflow_of(renderer: PromptRenderer, prompt: Prompt) -> PromptOverflow | None:
    """Render a prompt that is too long, and not for its characters."""
    renderer.check_length(prompt)
    with pytest.raises(RejectedError) as caught:
        await renderer.render(prompt)
    assert caught.value.rejection.code is RejectCode.CONTEXT_LENGTH
    return caught.value.rejection.overflow


async def test_a_text_that_is_too_long_is_not_counted_to_its_end(renderer: PromptRenderer) -> None:
    overflow = await overflow_of(renderer, TextPrompt(WORDS))

    assert overflow == PromptOverflow(num_prompt_tokens=0, max_model_len=MAX_MODEL_LEN)


async def test_a_conversation_that_is_too_long_is_counted(renderer: PromptRenderer) -> None:
    overflow = await overflow_of(renderer, chat(WORDS))

    num_tokens = len(await renderer.tokenize(chat(WORDS), TokenizeOptions()))
    assert overflow == PromptOverflow(num_prompt_tokens=num_tokens, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("num_tokens", [MAX_MODEL_LEN + 1, MAX_MODEL_LEN + 2])
async def test_token_ids_that_are_too_many_are_counted(
    renderer: PromptRenderer, num_tokens: int
) -> None:
    overflow = await overflow_of(renderer, TokenPrompt((5,) * num_tokens))

    assert overflow == PromptOverflow(num_prompt_tokens=num_tokens, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize(("rendered_at_s", "year"), [(86_400.0 * 200, "1970"), (0.0, "20")])
async def test_a_conversation_that_moves_has_the_date_of_its_first_rendering(
    vllm_renderer: BaseRenderer, monkeypatch: pytest.MonkeyPatch, rendered_at_s: float, year: str
) -> None:
    """Where its template asks for the time."""
    tokenizer = vllm_renderer.get_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y') }} {{ messages[0].content }}"
    settings = ExecutorSettings(model=str(exactness_model()))
    llm: Any = SimpleNamespace(
        renderer=vllm_renderer,
        model_config=vllm_renderer.model_config,
        vllm_config=vllm_renderer.config,
    )
    preparation = Preparation(llm, PromptRenderer(vllm_renderer), settings)
    submission = Submission(
        request_id="r",
        generation=1,
        model="exactness",
        prompt=chat("Which year is it?"),
        sampling=SamplingParams(max_tokens=1),
        rendered_at_s=rendered_at_s,
    )
    seen = []

    async def process(_: Any, rendered: Any, *_args: Any) -> None:
        seen.append(tokenizer.decode(rendered["prompt_token_ids"]))
        raise EnoughSeenError

    monkeypatch.setattr(preparation, "_process", process)
    with pytest.raises(EnoughSeenError):
        await preparation.prepare([submission])
    await preparation.close()

    assert seen[0].startswith(year)
    assert seen[0].endswith("Which year is it?")


class EnoughSeenError(Exception):
    """No more need be prepared."""
