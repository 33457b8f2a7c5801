"""What parsing and grammars rely on inside vLLM. An upgrade of vLLM fails here first."""

import dataclasses
import inspect
import re
from typing import Any

import xgrammar
from vllm.config import StructuredOutputsConfig
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.parser import Parser, ParserManager
from vllm.parser.abstract_parser import DelegatingParser
from vllm.renderers.hf import resolve_chat_template, resolve_chat_template_kwargs
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from services.generation.conversation import REASONING_EFFORTS


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(function: Any) -> str:
    return inspect.getsource(function)


def test_parsers_are_found_by_name_and_read_an_answer_step_by_step() -> None:
    assert {
        "tool_parser_name", "reasoning_parser_name", "enable_auto_tools", "model_name", "tokenizer",
    } <= set(parameters(ParserManager.get_parser))  # fmt: skip
    assert parameters(DelegatingParser.parse_delta) == [
        "self", "delta_text", "delta_token_ids", "request", "prompt_token_ids", "finished",
    ]  # fmt: skip
    assert parameters(DelegatingParser.adjust_request) == ["self", "request"]
    assert {"tool_parser_cls", "reasoning_parser_cls", "always_adjust_request"} <= set(vars(Parser))


def test_a_parser_is_made_as_vllms_server_makes_it() -> None:
    body = source(OpenAIServingChat._make_parser)
    for argument in ("tokenizer,", "request.tools,", "chat_template_kwargs=", "model_config="):
        assert argument in body


def test_requests_are_adjusted_when_vllms_server_adjusts_them() -> None:
    body = source(OnlineRenderer)
    for condition in (
        "parser.always_adjust_request",
        "parser.reasoning_parser_cls is not None",
        'tool_choice != "none"',
    ):
        assert condition in body


def test_the_plain_tool_parser_reads_forced_calls_from_json() -> None:
    assert ToolParser.supports_required_and_named
    assert ToolParser.structural_tag_model is None
    assert "get_json_schema_from_tools(" in source(ToolParser.adjust_request)


def test_a_request_has_what_parsers_read_and_change() -> None:
    assert {
        "messages", "tools", "tool_choice", "parallel_tool_calls", "include_reasoning",
        "reasoning_effort", "chat_template_kwargs", "structured_outputs", "skip_special_tokens",
    } <= set(ChatCompletionRequest.model_fields)  # fmt: skip
    assert parameters(ChatCompletionRequest.resolve_reasoning_ended) == [
        "self", "parser", "prompt_token_ids",
    ]  # fmt: skip
    for effort in REASONING_EFFORTS:
        request = ChatCompletionRequest(messages=[], reasoning_effort=effort)
        assert request.reasoning_effort == effort


def test_deltas_have_the_fields_that_are_read() -> None:
    assert {"content", "reasoning", "tool_calls"} <= set(DeltaMessage.model_fields)
    assert {"index", "id", "function"} <= set(DeltaToolCall.model_fields)
    assert {"name", "arguments"} <= set(DeltaFunctionCall.model_fields)


def test_the_engine_is_told_when_reasoning_has_ended() -> None:
    fields = set(EngineCoreRequest.__struct_fields__)
    assert {"reasoning_ended", "reasoning_parser_kwargs", "prompt_token_ids"} <= fields
    body = source(OpenAIServingChat._engine_reasoning_kwargs)
    assert "request.resolve_reasoning_ended(" in body
    assert '"chat_template_kwargs"' in body


def test_template_variables_are_looked_up_as_they_are_rendered() -> None:
    assert parameters(resolve_chat_template) == [
        "tokenizer", "chat_template", "tools", "model_config",
    ]  # fmt: skip
    assert parameters(resolve_chat_template_kwargs)[:3] == [
        "tokenizer", "chat_template", "chat_template_kwargs",
    ]  # fmt: skip


def test_the_engine_compiles_with_one_library_and_fails_late() -> None:
    names = {field.name for field in dataclasses.fields(StructuredOutputsConfig)}
    assert {"backend", "reasoning_parser"} <= names
    assert "if self.backend is None:" in source(StructuredOutputManager.grammar_init)
    made = source(XgrammarBackend.__post_init__)
    if hasattr(XgrammarBackend, "_create_compiler"):  # two of them, one with special tokens
        assert "self.compiler = self._create_compiler(" in made
        assert "self.full_vocab_compiler = (" in made
        made = source(XgrammarBackend._create_compiler)
    assert "xgr.GrammarCompiler(" in made


def test_each_kind_of_grammar_is_compiled_by_the_call_that_vllm_makes() -> None:
    compile = source(XgrammarBackend.compile_grammar)
    for call in (
        "compile_json_schema",
        "compile_regex",
        "compile_grammar",
        "compile_structural_tag",
    ):
        assert re.search(rf"self\.(full_vocab_)?compiler\.{call}", compile)
        assert hasattr(xgrammar.GrammarCompiler, call)
    kinds = {kind.name for kind in StructuredOutputOptions}
    assert kinds == {"JSON", "JSON_OBJECT", "REGEX", "GRAMMAR", "CHOICE", "STRUCTURAL_TAG"}
