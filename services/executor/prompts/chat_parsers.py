"""vLLM's parsers of a model's answers: which ones a conversation needs, and what they ask for."""

import json
from dataclasses import dataclass
from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import Parser, ParserManager
from vllm.parser.abstract_parser import DelegatingParser
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers import ToolParser

from services.executor.prompts.answer_parser import AnswerParser
from services.executor.prompts.chat_template import messages_of, template_variables, tools_of
from services.executor.types import RejectCode, RejectedError, Rejection
from services.generation.conversation import DEFAULT_OPTIONS, ConversationOptions, ToolChoice
from services.generation.prompts import ChatPrompt

NO_PARSER = (
    "this executor has no parser of the calls that the model makes by itself;"
    " ask for none, required or one function"
)

NO_ARGUMENTS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedChat:
    """What parsing a conversation's answer asks of the request to the engine."""

    parser_class: type[Parser]
    parser_arguments: dict[str, Any]
    request: ChatCompletionRequest  # in vLLM's form, as the parsers want it
    parses_reasoning: bool
    is_read: bool  # a person reads its text: it has no form, and no call must be made
    has_form_of_tools: bool  # the answer's form is not what the client asked for, but that of calls

    def apply(self, sampling: VllmSamplingParams) -> None:
        """Have the engine keep to the calls' form, and give the parsers the text they need."""
        sampling.structured_outputs = self.request.structured_outputs
        sampling.skip_special_tokens = self.request.skip_special_tokens
        if not self.request.include_reasoning:
            sampling.logprobs = None  # they would tell the tokens

    def apply_to_core(self, core_request: Any) -> None:
        """Have the engine keep to a form only after the reasoning."""
        parser = self._make_parser()
        prompt_ids = core_request.prompt_token_ids
        # vLLM lets the form begin at once where reasoning is not told, and reads it as reasoning.
        told = self.request.model_copy(update={"include_reasoning": True})
        core_request.reasoning_ended = told.resolve_reasoning_ended(parser, prompt_ids)
        if parser.reasoning_parser is not None:
            variables = self.parser_arguments["chat_template_kwargs"]
            core_request.reasoning_parser_kwargs = {"chat_template_kwargs": variables}

    def answer_parser(self, prompt_token_ids: list[int]) -> AnswerParser:
        """Return a parser for one answer."""
        return AnswerParser(
            self._make_parser(),
            self.request,
            prompt_token_ids,
            parses_reasoning=self.parses_reasoning,
            reads_text=self.is_read,
        )

    def _make_parser(self) -> Parser:
        return self.parser_class(**self.parser_arguments)


class ChatParsers:
    """The parsers that the executor's settings name, made for one model."""

    def __init__(
        self, config: ModelConfig, tokenizer: Any, *, tool_calls: str | None, reasoning: str | None
    ) -> None:
        """Take vLLM's names of parsers. TypeError for an unknown one, or one that does not go with
        the tokeniser.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._parses_calls = tool_calls is not None
        self._parses_reasoning = reasoning is not None
        self._class: type[Parser] | None = ParserManager.get_parser(
            tool_parser_name=tool_calls,
            reasoning_parser_name=reasoning,
            enable_auto_tools=tool_calls is not None,
            model_name=config.model,
            tokenizer=tokenizer,
        )

    def concern(self, options: ConversationOptions) -> bool:
        """Return whether a conversation with these options has anything to prepare or to check."""
        return self._class is not None or options != DEFAULT_OPTIONS

    def prepare(self, chat: ChatPrompt, form: StructuredOutputsParams | None) -> ParsedChat | None:
        """Return how the answer to `chat` is parsed, which is to have `form`; None for not at all.

        Raises RejectedError naming the parameter that cannot be followed.
        """
        options = chat.options
        if options.tool_choice is ToolChoice.AUTO and not self._parses_calls:
            code = RejectCode.INVALID_ARGUMENT
            message = f"tool_choice: {NO_PARSER}"
            raise RejectedError(Rejection(code=code, field="tool_choice", message=message))
        parser_class = self._class_for(options)
        if parser_class is None:
            return None
        own_form = None if options.tool_choice.is_forced else form
        request = _vllm_request(chat, own_form)
        arguments = {
            "tokenizer": self._tokenizer,
            "tools": request.tools,
            "model_config": self._config,
            "chat_template_kwargs": template_variables(options),
        }
        if self._adjusts(parser_class, options):
            request = parser_class(**arguments).adjust_request(request)
        return ParsedChat(
            parser_class=parser_class,
            parser_arguments=arguments,
            request=request,
            parses_reasoning=self._parses_reasoning,
            is_read=form is None and not options.tool_choice.is_forced,
            has_form_of_tools=request.structured_outputs not in (None, own_form),
        )

    def _class_for(self, options: ConversationOptions) -> type[Parser] | None:
        if self._parses_calls or not options.tool_choice.is_forced:
            return self._class
        return _with_json_calls(self._class)

    @staticmethod
    def _adjusts(parser_class: type[Parser], options: ConversationOptions) -> bool:
        """Return whether the parsers may change a request, as vLLM's own server decides it."""
        return (
            options.tool_choice is not ToolChoice.NONE
            or parser_class.always_adjust_request
            or parser_class.reasoning_parser_cls is not None
        )


def _with_json_calls(parser_class: type[Parser] | None) -> type[Parser]:
    """Return a class that also parses calls which the engine was made to write as JSON."""
    base = parser_class or DelegatingParser
    if not issubclass(base, DelegatingParser):
        code = RejectCode.INVALID_ARGUMENT
        message = f"tool_choice: {NO_PARSER.partition(';')[0]}"
        raise RejectedError(Rejection(code=code, field="tool_choice", message=message))
    return type("JsonCallsParser", (base,), {"tool_parser_cls": ToolParser})


def _tools(options: ConversationOptions) -> list[dict[str, Any]] | None:
    """Return the tools as parsers take them: arguments of a forced call keep to their schema."""
    tools = tools_of(options)
    for tool in tools or ():
        if options.tool_choice.is_forced:
            function = tool["function"]
            function |= {"strict": True, "parameters": function["parameters"] or NO_ARGUMENTS}
    return tools


def _vllm_request(chat: ChatPrompt, form: StructuredOutputsParams | None) -> ChatCompletionRequest:
    options = chat.options
    choice: Any = options.tool_choice.value
    if options.tool_choice is ToolChoice.NAMED:
        choice = {"type": "function", "function": {"name": options.named_tool}}
    variables = json.loads(options.template_variables) if options.template_variables else None
    return ChatCompletionRequest.model_validate(
        {
            "messages": messages_of(chat),
            "tools": _tools(options),
            "tool_choice": choice,
            "parallel_tool_calls": not options.forbids_parallel_calls,
            "include_reasoning": not options.omits_reasoning,
            "reasoning_effort": options.reasoning_effort or None,
            "chat_template_kwargs": variables,
            "structured_outputs": form,
        }
    )
