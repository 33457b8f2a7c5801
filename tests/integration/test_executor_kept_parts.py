"""Which tokens are kept: where marked turns end, and thoughts that no later prompt has."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
from vllm.renderers import BaseRenderer, renderer_from_config

from lab.models import exactness_model
from services.executor.engine.config import make_config
from services.executor.engine.kept_parts import KeptParts
from services.executor.prompts.prompt_renderer import PromptRenderer
from services.executor.request_tag import KeptTokens, ToolTurn, kept_of, tool_turn_of
from services.executor.settings import ExecutorSettings
from services.executor.types import PreparedRequest, Submission
from services.generation.conversation import ChatMessage, ConversationOptions, Tool
from services.generation.prompts import ChatPrompt, Prompt, TextPrompt
from services.generation.retention import RetentionHint, RetentionMark

pytestmark = pytest.mark.filterwarnings("default")

TURN = "<{{ m.role }}>{{ m.content }}{{ THOUGHTS }}"
PLAIN = "{% for m in messages %}" + TURN.replace("{{ THOUGHTS }}", "") + "{% endfor %}"
STRICT = "{% if messages[-1].role == 'system' %}{{ raise_exception('no user') }}{% endif %}" + PLAIN
KEEPS = "{% for m in messages %}" + TURN.replace("THOUGHTS", "m.reasoning or ''") + "{% endfor %}"
# Until a user's turn comes, as templates of many models do it.
KEEPS_OF_CALLS = KEEPS.replace("m.reasoning or ''", "m.reasoning if m.tool_calls else ''")
OPENS = "{% if add_generation_prompt %}<assistant>{% endif %}"
TURNS = (
    ("system", "Be brief."),
    ("user", "Rain in Oslo?"),
    ("assistant", "No."),
    ("user", "Bergen?"),
)
CONVERSATION = ChatPrompt(tuple(ChatMessage(role=role, content=said) for role, said in TURNS))
WITH_TOOLS = ChatPrompt(
    CONVERSATION.messages, ConversationOptions(tools=(Tool(name="look", parameters="{}"),))
)
SHORT, LONG = 300.0, 3_600.0


@pytest.fixture
def vllm_renderer() -> BaseRenderer:
    settings = ExecutorSettings(model=str(exactness_model()), max_model_len=512)
    return renderer_from_config(make_config(settings))


async def kept(
    vllm_renderer: BaseRenderer,
    template: str,
    *marks: RetentionMark,
    prompt: Prompt = CONVERSATION,
    thinks: bool = False,
) -> tuple[KeptTokens, list[int]]:
    """Return what is to be kept of a prompt, and the prompt's ids."""
    extra_args, ids = await asked(vllm_renderer, template, *marks, prompt=prompt, thinks=thinks)
    found = kept_of(extra_args)
    assert found is not None
    assert (found.account, found.session_id) == ("a", "s")
    return found, ids


async def asked(
    vllm_renderer: BaseRenderer,
    template: str,
    *marks: RetentionMark,
    prompt: Prompt,
    thinks: bool = False,
    keeps_tool_turns: bool = True,
) -> tuple[dict[str, Any], list[int]]:
    """Return what the scheduler is told of a prompt, and the prompt's ids."""
    tokenizer: Any = vllm_renderer.get_tokenizer()
    tokenizer.chat_template = template + OPENS
    renderer = PromptRenderer(vllm_renderer)
    ids = list((await renderer.render(prompt))["prompt_token_ids"])
    hint = RetentionHint(account="a", session_id="s", marks=marks)
    submission = Submission(request_id="r", generation=1, model="m", prompt=prompt, retention=hint)
    core = SimpleNamespace(prompt_token_ids=ids, sampling_params=SimpleNamespace(extra_args={}))
    parser = SimpleNamespace(num_reasoning_tokens=0) if thinks else None
    prepared = PreparedRequest(
        engine_id="r", num_prompt_tokens=len(ids), core_request=core, parser=parser
    )
    parts = KeptParts(renderer, keeps_tool_turns=keeps_tool_turns)
    await parts.ask(submission, [prepared])
    return core.sampling_params.extra_args, ids


@pytest.mark.parametrize(
    ("template", "num_messages", "last"),
    [(PLAIN, 1, "Be brief."), (PLAIN, 3, "No."), (STRICT, 1, "Rain in Oslo?")],
)
async def test_a_marked_turn_ends_where_the_template_ends_it(
    vllm_renderer: BaseRenderer, template: str, num_messages: int, last: str
) -> None:
    marks = (
        RetentionMark(retention_s=LONG, num_messages=num_messages),
        RetentionMark(retention_s=SHORT),
    )

    found, ids = await kept(vllm_renderer, template, *marks)

    (end, first_s), (whole, whole_s) = found.spans
    assert (first_s, whole, whole_s) == (LONG, 0, SHORT)
    text = vllm_renderer.get_tokenizer().decode(ids[:end])
    assert last[:-1] in text  # a token may hold its last character and what comes next
    assert "Bergen" not in text
    later = [said for _, said in TURNS[TURNS.index(next(t for t in TURNS if t[1] == last)) + 1 :]]
    assert not any(said in text for said in later)


async def test_of_a_text_all_is_kept(vllm_renderer: BaseRenderer) -> None:
    mark = RetentionMark(retention_s=SHORT, num_messages=1)

    found, _ = await kept(vllm_renderer, PLAIN, mark, prompt=TextPrompt("Hi"))

    assert found.spans == [(0, SHORT)]


@pytest.mark.parametrize(
    ("template", "prompt", "keeps_answer"),
    [
        (PLAIN, CONVERSATION, False),
        (KEEPS, CONVERSATION, True),
        (KEEPS_OF_CALLS, CONVERSATION, False),
        (KEEPS_OF_CALLS, WITH_TOOLS, True),
    ],
)
async def test_an_answer_that_begins_with_thoughts_is_kept_if_the_next_turn_has_them(
    vllm_renderer: BaseRenderer, template: str, prompt: ChatPrompt, keeps_answer: bool
) -> None:
    mark = RetentionMark(retention_s=SHORT)

    found, ids = await kept(vllm_renderer, template, mark, prompt=prompt, thinks=True)

    assert found.spans == [(0 if keeps_answer else len(ids), SHORT)]
    found, _ = await kept(vllm_renderer, template, mark, prompt=prompt)
    assert found.spans == [(0, SHORT)]  # an answer without thoughts is


@pytest.mark.parametrize(
    ("template", "prompt", "thinks", "keeps"),
    [
        (PLAIN, WITH_TOOLS, False, "all"),
        (PLAIN, WITH_TOOLS, True, "the prompt"),  # the next turn has no thoughts
        (KEEPS_OF_CALLS, WITH_TOOLS, True, "all"),
        (PLAIN, CONVERSATION, False, "nothing"),  # it calls no tools
    ],
)
async def test_without_a_hint_what_a_turn_with_a_tools_result_begins_with_is_told(
    vllm_renderer: BaseRenderer, template: str, prompt: ChatPrompt, thinks: bool, keeps: str
) -> None:
    extra_args, ids = await asked(vllm_renderer, template, prompt=prompt, thinks=thinks)

    ends = {"all": 0, "the prompt": len(ids)}
    turn = None if keeps == "nothing" else ToolTurn("a", "s", ends[keeps])
    assert tool_turn_of(extra_args) == turn
    assert kept_of(extra_args) is None


async def test_where_tool_turns_are_not_kept_nothing_is_told(vllm_renderer: BaseRenderer) -> None:
    assert await asked(vllm_renderer, PLAIN, prompt=WITH_TOOLS, keeps_tool_turns=False) == ({}, ANY)
