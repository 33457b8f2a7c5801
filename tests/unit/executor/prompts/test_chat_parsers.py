"""Answers read by vLLM's parsers: content, reasoning and calls, token by token."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from services.executor.prompts.chat_parsers import ChatParsers, ParsedChat
from services.executor.prompts.chat_template import (
    chat_params,
    check_variables,
    known_variables,
    messages_of,
)
from services.executor.types import RejectedError, Said
from services.generation.conversation import (
    RESERVED_VARIABLES,
    ChatMessage,
    ConversationOptions,
    Tool,
    ToolCall,
    ToolCallPart,
    ToolChoice,
)
from services.generation.prompts import ChatPrompt

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_TEMPLATE = "{{ messages }}{{ tools }}{{ enable_thinking }}{{ reasoning_effort }}"
TURNS = (ChatMessage(role="user", content="Hi"),)
SCHEMA = '{"type": "object", "properties": {"x": {"type": "integer"}}}'
TOOLS = (Tool(name="f", parameters=SCHEMA), Tool(name="g"))
PROMPT_IDS = [5, 6, 7]


def make_tokenizer(
    chat_template: str = CHAT_TEMPLATE, marks: Sequence[str] = MARKS
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes and the marks of calls and thoughts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: k for k, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(marks))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = chat_template
    return fast


TOKENIZER = make_tokenizer()
CONFIG: Any = SimpleNamespace(
    model="m",
    tokenizer="t",
    hf_config=SimpleNamespace(model_type="m"),
    tokenizer_revision=None,
    trust_remote_code=False,
)


def parsers(tool_calls: str | None = None, reasoning: str | None = None) -> ChatParsers:
    return ChatParsers(CONFIG, TOKENIZER, tool_calls=tool_calls, reasoning=reasoning)


def prepared(
    parsers: ChatParsers, form: StructuredOutputsParams | None = None, **options: Any
) -> ParsedChat:
    chat = ChatPrompt(messages=TURNS, options=ConversationOptions(**options))
    parsed = parsers.prepare(chat, form)
    assert parsed is not None
    return parsed


def steps_of(text: str) -> list[tuple[str, list[int]]]:
    """Return the steps in which an engine draws `text`: one token each, with what it completes."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    so_far = [TOKENIZER.decode(ids[:place]).rstrip("\ufffd") for place in range(len(ids) + 1)]
    return [(so_far[k + 1].removeprefix(so_far[k]), [id]) for k, id in enumerate(ids)]


def read(parsed: ParsedChat, text: str) -> tuple[Said, bool]:
    """Return all that `text` says when its tokens come one by one, and whether calls were chosen.

    The parts of each call are put together.
    """
    parser = parsed.answer_parser(PROMPT_IDS)
    steps = steps_of(text)
    said = [
        parser.parse(said, ids, is_last=place == len(steps))
        for place, (said, ids) in enumerate(steps, 1)
    ]
    calls: dict[int, ToolCallPart] = {}
    for part in (part for step in said for part in step.tool_calls):
        if part.index in calls:
            assert (part.id, part.name) == ("", "")  # told once
        first = calls.setdefault(part.index, ToolCallPart(part.index, part.id, part.name))
        assert first.id
        calls[part.index] = ToolCallPart(
            part.index, first.id, first.name, first.arguments + part.arguments
        )
    whole = Said(
        "".join(step.text for step in said),
        "".join(step.reasoning for step in said),
        tuple(calls.values()),
    )
    told = [(call.id, call.name, call.arguments) for call in whole.tool_calls]
    assert [(call.id, call.name, call.arguments) for call in parser.tool_calls] == told
    return whole, parser.chose_calls


def functions(said: Said) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in said.tool_calls]


HERMES = (
    'Sure.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


def test_calls_that_the_model_chooses_are_read_in_its_own_form() -> None:
    parsed = prepared(parsers("hermes"), tools=TOOLS, tool_choice=ToolChoice.AUTO)
    said, chose_calls = read(parsed, HERMES)

    assert (said.text, said.reasoning) == ("Sure.", "")
    assert functions(said) == [("f", {"x": 1}), ("g", {})]
    assert len({call.id for call in said.tool_calls}) == 2
    assert chose_calls


def test_an_answer_without_calls_is_its_text() -> None:
    parsed = prepared(parsers("hermes"), tools=TOOLS, tool_choice=ToolChoice.AUTO)

    assert read(parsed, "a < b, {}") == (Said("a < b, {}"), False)


def test_where_one_call_is_allowed_there_is_one() -> None:
    parsed = prepared(
        parsers("hermes"), tools=TOOLS, tool_choice=ToolChoice.AUTO, forbids_parallel_calls=True
    )

    assert functions(read(parsed, HERMES)[0]) == [("f", {"x": 1})]


def test_no_calls_are_read_where_none_may_be() -> None:
    parsed = prepared(parsers("hermes"), tools=TOOLS)

    assert read(parsed, HERMES) == (Said(HERMES), False)


REQUIRED = '[{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}]'


def test_required_calls_need_no_parser_and_have_a_form() -> None:
    parsed = prepared(parsers(), tools=TOOLS, tool_choice=ToolChoice.REQUIRED)
    sampling = SamplingParams()
    parsed.apply(sampling)
    said, chose_calls = read(parsed, REQUIRED)

    assert functions(said) == [("f", {"x": 1}), ("g", {})]
    assert (said.text, chose_calls) == ("", True)
    assert parsed.has_form_of_tools
    assert sampling.structured_outputs is not None
    schema = sampling.structured_outputs.json
    assert isinstance(schema, dict)
    assert (schema["type"], schema["minItems"]) == ("array", 1)


def test_a_named_call_is_its_arguments_and_ends_as_an_answer_does() -> None:
    parsed = prepared(parsers(), tools=TOOLS, tool_choice=ToolChoice.NAMED, named_tool="f")
    sampling = SamplingParams()
    parsed.apply(sampling)
    said, chose_calls = read(parsed, '{"x": 2}')

    assert functions(said) == [("f", {"x": 2})]
    assert not chose_calls
    assert sampling.structured_outputs is not None
    assert sampling.structured_outputs.json == json.loads(SCHEMA)


def schemas_in(tag: Any) -> list[Any]:
    """Return all JSON schemas that a structural tag holds text to."""
    if isinstance(tag, list):
        return [schema for part in tag for schema in schemas_in(part)]
    if not isinstance(tag, dict):
        return []
    own = [tag["json_schema"]] if "json_schema" in tag else []
    return own + schemas_in(list(tag.values()))


def test_a_forced_call_in_the_model_s_own_form_is_held_to_it_by_a_grammar() -> None:
    parsed = prepared(parsers("hermes"), tools=TOOLS, tool_choice=ToolChoice.REQUIRED)
    sampling = SamplingParams()
    parsed.apply(sampling)

    assert sampling.structured_outputs is not None
    assert sampling.structured_outputs.structural_tag is not None
    schemas = schemas_in(json.loads(sampling.structured_outputs.structural_tag))
    assert json.loads(SCHEMA) in schemas
    assert all(schema["type"] == "object" for schema in schemas)
    assert not sampling.skip_special_tokens  # the marks may be special
    assert functions(read(parsed, HERMES)[0]) == [("f", {"x": 1}), ("g", {})]


def test_a_forced_call_takes_the_place_of_another_form() -> None:
    form = StructuredOutputsParams(regex="a+")
    forced = prepared(parsers(), form, tools=TOOLS, tool_choice=ToolChoice.REQUIRED)
    free = prepared(parsers("hermes"), form, tools=TOOLS)

    assert forced.request.structured_outputs is not None
    assert forced.request.structured_outputs.regex is None
    assert (free.request.structured_outputs, free.has_form_of_tools) == (form, False)


@pytest.mark.parametrize("text", ["<think>hm</think>Hi", "hm</think>Hi"])
def test_thoughts_are_apart_from_the_answer(text: str) -> None:
    said, _ = read(prepared(parsers(reasoning="deepseek_r1")), text)

    assert (said.reasoning, said.text) == ("hm", "Hi")


def test_thoughts_that_are_not_asked_for_are_not_told_by_probabilities_either() -> None:
    parsed = prepared(parsers(reasoning="deepseek_r1"), omits_reasoning=True)
    sampling = SamplingParams(logprobs=2)
    parsed.apply(sampling)

    assert read(parsed, "<think>hm</think>Hi")[0] == Said("Hi")
    assert sampling.logprobs is None


@pytest.mark.parametrize("omits_reasoning", [False, True])
def test_required_calls_follow_thoughts(omits_reasoning: bool) -> None:
    parsed = prepared(
        parsers(reasoning="deepseek_r1"),
        tools=TOOLS,
        tool_choice=ToolChoice.REQUIRED,
        omits_reasoning=omits_reasoning,
    )
    core: Any = SimpleNamespace(prompt_token_ids=PROMPT_IDS)
    parsed.apply_to_core(core)
    said, _ = read(parsed, f"<think>hm</think>{REQUIRED}")

    assert core.reasoning_ended is False  # the form begins after the thoughts
    assert said.reasoning == ("" if omits_reasoning else "hm")
    assert functions(said) == [("f", {"x": 1}), ("g", {})]


@pytest.mark.parametrize("omits_reasoning", [False, True])
@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [
        ("<think>hmm</think>Yes.", 4),  # the first mark too
        ("hmm</think>Yes.", 3),  # where the prompt has it
        ("</think>Yes.", 0),
        ("<think>é", 3),  # cut short; a character of two tokens
    ],
)
def test_tokens_of_the_reasoning_are_counted_told_or_not(
    text: str, num_tokens: int, omits_reasoning: bool
) -> None:
    parsed = prepared(parsers(reasoning="deepseek_r1"), omits_reasoning=omits_reasoning)
    parser = parsed.answer_parser(PROMPT_IDS)
    for said, ids in steps_of(text):
        parser.parse(said, ids, is_last=False)

    assert parser.num_reasoning_tokens == num_tokens


def test_without_a_parser_of_reasoning_nobody_counts_it() -> None:
    parsed = prepared(parsers("hermes"), tools=TOOLS)
    parser = parsed.answer_parser(PROMPT_IDS)
    parser.parse("a", [1], is_last=True)

    assert parser.num_reasoning_tokens is None


def test_a_plain_conversation_is_not_parsed_where_no_parser_is_named() -> None:
    assert not parsers().concern(ConversationOptions())
    assert parsers("hermes").concern(ConversationOptions())
    options = ConversationOptions(tools=TOOLS)
    assert parsers().prepare(ChatPrompt(messages=TURNS, options=options), None) is None


def test_calls_of_the_model_s_choice_need_a_parser() -> None:
    with pytest.raises(RejectedError) as refused:
        prepared(parsers(), tools=TOOLS, tool_choice=ToolChoice.AUTO)

    assert refused.value.rejection.field == "tool_choice"


@pytest.mark.parametrize("names", [{"tool_calls": "no-such"}, {"reasoning": "no-such"}])
def test_an_unknown_parser_is_refused_at_once(names: dict[str, str]) -> None:
    with pytest.raises(TypeError, match="no-such"):
        parsers(**names)


def test_a_parser_that_does_not_go_with_the_tokenizer_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="deepseek_r1"):
        ChatParsers(CONFIG, make_tokenizer(marks=()), tool_calls=None, reasoning="deepseek_r1")


@pytest.mark.parametrize(
    ("options", "template", "field"),
    [
        ({"reasoning_effort": "low"}, "{{ messages }}", "reasoning_effort"),
        ({"reasoning_effort": "low"}, "{{ reasoning_effort }}", ""),
        ({"reasoning_effort": "low"}, "{{ enable_thinking }}", ""),
        ({"template_variables": '{"x": 1}'}, "{{ messages }}", "chat_template_kwargs"),
        ({"template_variables": '{"x": 1}'}, "{{ x }}", ""),
    ],
)
def test_what_a_template_does_not_know_is_refused(
    options: dict[str, str], template: str, field: str
) -> None:
    refused = ""
    try:
        check_variables(
            ConversationOptions(tools=TOOLS, **options), CONFIG, make_tokenizer(template)
        )
    except RejectedError as error:
        refused = error.rejection.field
    assert refused == field


@pytest.mark.parametrize(
    ("template", "known"),
    [
        ("{{ messages }}", {"messages"}),
        ("{{ messages }}{{ x }}{% set y = x %}{{ y }}", {"messages", "x"}),
        ("{{ reasoning_effort }}", {"reasoning_effort"}),
        ("{{ x }}{{ tokenize }}{{ chat_template }}", {"x"}),
        ({"default": "{{ x }}{{ y }}", "tool_use": "{{ y }}{{ z }}"}, {"y"}),
    ],
)
def test_variables_are_told_that_would_not_be_refused(template: Any, known: set[str]) -> None:
    tokenizer = make_tokenizer(template)
    asked = {"x", "y", "z", "messages", "reasoning_effort", "tokenize", "chat_template"}

    told = known_variables(CONFIG, tokenizer)

    assert asked.intersection(told) == known | {"messages"}
    for name in known - RESERVED_VARIABLES:
        for tools in ((), TOOLS):
            options = ConversationOptions(tools=tools, template_variables=f'{{"{name}": 1}}')
            check_variables(options, CONFIG, tokenizer)


def test_templates_get_turns_tools_and_variables() -> None:
    call = ToolCall(id="c", name="f", arguments="{}")
    chat = ChatPrompt(
        messages=(
            ChatMessage(role="assistant", content="", tool_calls=(call,), reasoning="hm"),
            ChatMessage(role="tool", content="1", tool_call_id="c"),
        ),
        options=ConversationOptions(
            tools=(TOOLS[1],), reasoning_effort="none", template_variables='{"x": 1}'
        ),
    )

    function = {"name": "f", "arguments": "{}"}
    assert messages_of(chat) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
            "reasoning": "hm",
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    assert chat_params(chat.options).chat_template_kwargs == {
        "add_generation_prompt": True,
        "x": 1,
        "reasoning_effort": "none",
        "enable_thinking": False,
        "tools": [{"type": "function", "function": {"name": "g", "parameters": None}}],
    }


TURNS_TEMPLATE = (
    "{% for m in messages %}<{{ m.name or m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("options", "rendered"),
    [
        ({}, "<ada>Hi</><assistant>Ye</><assistant>"),
        ({"omits_generation_prompt": True}, "<ada>Hi</><assistant>Ye</>"),
        (
            {"omits_generation_prompt": True, "continues_final_message": True},
            "<ada>Hi</><assistant>Ye",
        ),
    ],
)
def test_a_template_is_told_of_names_and_of_how_the_prompt_ends(
    options: dict[str, Any], rendered: str
) -> None:
    turns = (
        ChatMessage(role="user", content="Hi", name="ada"),
        ChatMessage(role="assistant", content="Ye"),
    )
    chat = ChatPrompt(messages=turns, options=ConversationOptions(**options))
    variables = chat_params(chat.options).chat_template_kwargs

    text = make_tokenizer(TURNS_TEMPLATE).apply_chat_template(
        messages_of(chat), tokenize=False, **variables
    )

    assert text == rendered


def what_is_read(parsed: ParsedChat, text: str) -> str:
    """Return the text of the tokens that a person reads, silent ones as dots."""
    parser = parsed.answer_parser(PROMPT_IDS)
    found = ""
    for said, ids in steps_of(text):
        parser.parse(said, ids, is_last=False)
        found += (said or ".") if parser.is_read else ""
    return found


@pytest.mark.parametrize("omits_reasoning", [False, True])
@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("<think>hmm</think>Yes.", "Yes."),
        ("hmm</think>aé.", "a.é."),  # of a character's two tokens the first is silent
        ("<think>é", ""),
    ],
)
def test_thoughts_are_not_read_told_or_not(text: str, read: str, omits_reasoning: bool) -> None:
    parsed = prepared(parsers(reasoning="deepseek_r1"), omits_reasoning=omits_reasoning)

    assert what_is_read(parsed, text) == read


def test_from_a_call_on_nothing_is_read() -> None:
    parsed = prepared(parsers("hermes"), tools=TOOLS, tool_choice=ToolChoice.AUTO)

    assert what_is_read(parsed, f"{HERMES} And so on.").startswith("Sure.")
    assert "so on" not in what_is_read(parsed, f"{HERMES} And so on.")


@pytest.mark.parametrize(
    "how",
    [
        {"form": StructuredOutputsParams(json_object=True)},
        {"tools": TOOLS, "tool_choice": ToolChoice.REQUIRED},
        {"tools": TOOLS, "tool_choice": ToolChoice.NAMED, "named_tool": "f"},
    ],
)
def test_neither_a_form_nor_a_call_that_must_be_made_is_read(how: dict[str, Any]) -> None:
    assert not prepared(parsers("hermes", "deepseek_r1"), **how).is_read
    assert what_is_read(prepared(parsers("hermes", "deepseek_r1"), **how), "hm</think>{}") == ""
