"""The demo model's chat template: what a conversation becomes, and that its calls can be read."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from demo.chat_tokenizer import save_tokenizer, train_tokenizer
from demo.settings import read_settings
from services.executor.chat_parsers import ChatParsers
from services.executor.types import ChatInput
from services.kit.conversation import ChatMessage, ConversationOptions, Tool, ToolChoice

CALL = {"id": "c", "function": {"name": "weather", "arguments": {"u": "C"}}}
WRITTEN_CALL = '<tool_call>{"name": "weather", "arguments": {"u": "C"}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["text"], vocab_size=300), directory, max_model_len=100)
    return PreTrainedTokenizerFast.from_pretrained(directory)


def test_turns_are_marked_by_their_roles(tokenizer: Any) -> None:
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]

    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|begin|><|system|>Be brief.<|end|><|user|>Rain?<|end|><|assistant|>"
    )


def test_tools_calls_and_results_are_shown(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": None}}
    turns = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "dry"},
    ]

    begin, shown, *rest = tokenizer.apply_chat_template(turns, tools=[tool], tokenize=False).split(
        "<|system|>"
    )
    listed, _, conversation = shown.partition("<|end|>")
    assert (begin, rest) == ("<|begin|>", [])
    assert json.dumps(tool) in listed.splitlines()
    assert conversation == (
        f"<|user|>Rain?<|end|><|assistant|>{WRITTEN_CALL}<|end|>"
        "<|user|><tool_response>dry</tool_response><|end|>"
    )


def test_the_stack_reads_calls_in_the_template_s_form(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVENFLOW_MODEL", raising=False)
    name = read_settings().environment("m")["EVENFLOW_EXECUTOR_TOOL_CALL_PARSER"]
    config: Any = SimpleNamespace(model="m", hf_config=None, tokenizer_revision=None)
    parsers = ChatParsers(config, tokenizer, tool_calls=name, reasoning=None)
    options = ConversationOptions(tools=(Tool(name="weather"),), tool_choice=ToolChoice.AUTO)
    turns = (ChatMessage(role="user", content="Rain?"),)
    parsed = parsers.prepare(ChatInput(turns=turns, options=options), None)
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
