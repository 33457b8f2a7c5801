"""The demo model's chat template: the model's own, and tools whose calls can be read."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from demo.chat_template import CHAT_TEMPLATE, SYSTEM_PROMPT
from lab.chat_tokenizer import save_tokenizer, train_tokenizer
from services.executor.prompts.chat_parsers import ChatParsers
from services.generation.conversation import ChatMessage, ConversationOptions, Tool, ToolChoice
from services.generation.prompts import ChatPrompt
from tests.fuzz import examples

# Of the GGUF file, to the letter: what the model was trained with.
MODELS_OWN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = {"id": "c", "function": {"name": "weather", "arguments": {"u": "C"}}}
WRITTEN_CALL = '<tool_call>{"name": "weather", "arguments": {"u": "C"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": None}}

turns_of_any_kind = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=20)}
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(
        train_tokenizer(["text"], vocab_size=300),
        directory,
        max_model_len=100,
        chat_template=CHAT_TEMPLATE,
    )
    return PreTrainedTokenizerFast.from_pretrained(directory)


def render(tokenizer: Any, turns: list[dict[str, Any]], **options: Any) -> str:
    text: str = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    return text


@settings(max_examples=examples(15))
@given(turns=turns_of_any_kind, add_generation_prompt=st.booleans())
def test_conversations_without_tools_read_as_the_model_was_trained(
    tokenizer: Any, turns: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    asked = {"add_generation_prompt": add_generation_prompt}

    assert render(tokenizer, turns, **asked) == render(
        tokenizer, turns, chat_template=MODELS_OWN, **asked
    )


def test_a_conversation_opens_with_the_model_s_own_system_prompt(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": " Rain?\n"}]

    assert render(tokenizer, turns, add_generation_prompt=True) == (
        f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
        "<|im_start|>user\n Rain?\n<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("place", [0, 1])
def test_developer_is_another_name_for_system(tokenizer: Any, place: int) -> None:
    def turns(role: str) -> list[dict[str, Any]]:
        others = [{"role": "user", "content": "Rain?"}, {"role": "user", "content": "Well?"}]
        return [*others[:place], {"role": role, "content": "Be brief."}, *others[place:]]

    assert render(tokenizer, turns("developer")) == render(tokenizer, turns("system"))


def test_tools_calls_and_results_are_shown(tokenizer: Any) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "dry"},
    ]

    system, _, conversation = render(tokenizer, turns, tools=[TOOL]).partition("<|im_end|>\n")

    assert system.startswith("<|im_start|>system\nBe brief.\n")
    assert json.dumps(TOOL) in system.splitlines()
    assert conversation == (
        "<|im_start|>user\nRain?<|im_end|>\n"
        f"<|im_start|>assistant\n{WRITTEN_CALL}{WRITTEN_CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>dry</tool_response><|im_end|>\n"
    )


def test_what_is_said_beside_a_call_is_shown_before_it(tokenizer: Any) -> None:
    turns = [{"role": "assistant", "content": "I look.", "tool_calls": [CALL]}]

    said = f"<|im_start|>assistant\nI look.{WRITTEN_CALL}<|im_end|>\n"
    assert render(tokenizer, turns).endswith(said)


def test_vllm_s_hermes_parser_reads_calls_in_the_template_s_form(tokenizer: Any) -> None:
    config: Any = SimpleNamespace(model="m", hf_config=None, tokenizer_revision=None)
    parsers = ChatParsers(config, tokenizer, tool_calls="hermes", reasoning=None)
    options = ConversationOptions(tools=(Tool(name="weather"),), tool_choice=ToolChoice.AUTO)
    turns = (ChatMessage(role="user", content="Rain?"),)
    parsed = parsers.prepare(ChatPrompt(messages=turns, options=options), None)
    assert parsed is not None

    parser = parsed.answer_parser([1])
    ids = tokenizer.encode(WRITTEN_CALL, add_special_tokens=False)
    said = [
        parser.parse(tokenizer.decode([id]), [id], is_last=place == len(ids))
        for place, id in enumerate(ids, 1)
    ]
    parts = [part for step in said for part in step.tool_calls]

    assert parser.chose_calls
    assert [part.name for part in parts if part.name] == ["weather"]
    assert json.loads("".join(part.arguments for part in parts)) == {"u": "C"}
