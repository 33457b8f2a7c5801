"""The request bodies of the OpenAI API that the gateway takes.

A parameter that is not listed here is left out, and its name told, or refused by name where an
answer would depend on it; a null is the same as an absent one.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from services.gateway import types
from services.gateway.checks import checked_conversation
from services.gateway.left_out.members import LenientBody, StrictBody, ignored, note
from services.gateway.openai import rules
from services.gateway.openai.fields import (
    AllowedTokenIds,
    BadWords,
    MaxTokens,
    MaxTokensOrNone,
    NumLogprobs,
    Prompts,
    ResponseFormat,
    Stop,
    StreamOptions,
    StructuredOutputsBody,
    TemplateVariables,
    Text,
    TokenId,
    json_text,
)
from services.gateway.openai.sampled import CompletionLevelBody, SampledBody
from services.gateway.openai.tools import (
    ChosenTool,
    Message,
    ReasoningEffort,
    Tools,
    tool_options,
)
from services.generation.conversation import (
    DEFAULT_OPTIONS,
    ConversationOptions,
    ToolChoice,
    check_options,
)
from services.generation.prompts import ChatPrompt, Prompt, TextPrompt
from services.kit.errors import InvalidRequestError

# What an answer would depend on: what it must be, what is asked of the model, and what is to be
# told beside it.
REFUSED = frozenset(
    {
        "add_special_tokens",
        "audio",
        "best_of",
        "chat_template",
        "documents",
        "ebnf",
        "function_call",
        "functions",
        "grammar",
        "guided_choice",
        "guided_decoding_backend",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "guided_whitespace_pattern",
        "input_embeds",
        "json_schema",
        "kv_transfer_params",
        "logits_processors",
        "logprob_token_ids",
        "modalities",
        "prompt_embeds",
        "prompt_logprobs",
        "regex",
        "repetition_detection",
        "stop_regex",
        "suffix",
        "thinking_token_budget",
        "truncate_prompt_tokens",
        "use_beam_search",
        "vllm_xargs",
        "web_search_options",
    }
)
NEUTRAL_VALUES: Mapping[str, Any] = MappingProxyType(
    {
        "best_of": 1,
        "use_beam_search": False,
    }
)


class RequestBody(LenientBody, SampledBody):
    """What chat and plain completions have in common."""

    refused = REFUSED
    neutral = NEUTRAL_VALUES

    max_tokens: MaxTokens | None = None
    n: int = Field(default=1, ge=1, le=types.MAX_ANSWERS)
    stop: Stop = Field(default_factory=tuple)
    bad_words: BadWords = Field(default_factory=list)
    allowed_token_ids: AllowedTokenIds | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    stream_options: StreamOptions | None = None
    evenflow: CompletionLevelBody = CompletionLevelBody()

    @field_validator("stream_options")
    @classmethod
    def _leave_out(cls, options: StreamOptions | None, info: ValidationInfo) -> object:
        """Name options of no stream: they have no effect."""
        if options is not None and not info.data.get("stream"):
            names = ignored(info)
            if names is None:
                raise ValueError("only allowed with stream")
            note(names, "", "stream_options")
        return options

    @property
    def includes_usage(self) -> bool:
        """Say whether the stream shall tell token counts before it ends."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_each_event(self) -> bool:
        """Say whether each event of the stream shall tell an answer's token counts so far."""
        options = self.stream_options
        return self.includes_usage and options is not None and options.continuous_usage_stats

    @property
    def gives_prompt_back(self) -> bool:
        return False

    @property
    def wants_no_answer(self) -> bool:
        """Say whether the client wants the prompt back and nothing else."""
        return False

    @property
    def tells_token_ids(self) -> bool:
        """Say whether the answer's token ids are told; the prompt's are if they are asked for."""
        return self.return_token_ids

    @property
    def answers_a_conversation(self) -> bool:
        return False

    @property
    def limit_name(self) -> str:
        """Return what the client calls the limit of an answer's tokens."""
        return "max_tokens"

    def max_output_tokens(self) -> int | None:
        """Return the stated limit. Raises InvalidRequestError if two limits are stated."""
        return self.max_tokens

    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Return how many likely tokens are reported per token; None: no probabilities at all."""

    @abstractmethod
    def prompts(self) -> tuple[Prompt, ...]:
        """Return what to continue. Raises InvalidRequestError naming the parameter at fault."""


class ChatCompletionBody(RequestBody):
    """Body of `POST /v1/chat/completions`."""

    refused = REFUSED | {"prompt"}
    neutral: ClassVar = {
        **NEUTRAL_VALUES,
        "add_special_tokens": False,
        "documents": [],
        "echo": False,
        "function_call": "none",
        "functions": [],
        "modalities": ["text"],
        "tools": [],
    }

    model_config = ConfigDict(
        json_schema_extra=rules.together(
            rules.not_both("max_tokens", "max_completion_tokens"),
            rules.only_with("tool_choice", "tools", unless=["none", "auto"]),
            rules.if_is(
                "continue_final_message", True, then=rules.has("add_generation_prompt", False)
            ),
            rules.if_is(
                "logprobs",
                True,
                then={},
                otherwise={"properties": {"top_logprobs": {"enum": [0, None]}}},
            ),
        )
    )

    messages: list[Message] = Field(min_length=1, max_length=types.MAX_MESSAGES)
    tools: Tools | None = None
    tool_choice: ChosenTool = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None

    @property
    def answers_a_conversation(self) -> bool:
        return True

    @property
    def tells_token_ids(self) -> bool:
        return self.return_token_ids and self.include_reasoning  # reasoning could be read off them

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def max_output_tokens(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequestError(
                "max_tokens: not allowed together with max_completion_tokens", field="max_tokens"
            )
        return self.max_tokens or self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs: only allowed with logprobs", field="top_logprobs"
            )
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self) -> tuple[Prompt, ...]:
        return (conversation(self.messages, self._options()),)

    def _options(self) -> ConversationOptions:
        offered = tool_options(self.tools)
        choice, named_tool = self.tool_choice or (offered.tool_choice, "")
        if choice is ToolChoice.AUTO and not self.tools:
            choice = ToolChoice.NONE
        options = replace(
            offered,
            tool_choice=choice,
            named_tool=named_tool,
            forbids_parallel_calls=bool(self.tools) and not self.parallel_tool_calls,
            omits_reasoning=not self.include_reasoning,
            reasoning_effort=self.reasoning_effort or "",
            template_variables=json_text(self.chat_template_kwargs, "chat_template_kwargs"),
            omits_generation_prompt=not self.add_generation_prompt,
            continues_final_message=self.continue_final_message,
        )
        check_options(options)
        return options


class CompletionBody(RequestBody):
    """Body of `POST /v1/completions`."""

    refused = REFUSED | {
        "max_completion_tokens",
        "messages",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
    neutral: ClassVar = {**NEUTRAL_VALUES, "add_special_tokens": True, "suffix": ""}

    model_config = ConfigDict(
        json_schema_extra=rules.together(
            rules.not_both("response_format", "structured_outputs"),
            rules.if_is("max_tokens", 0, then=rules.has("echo", True)),
        )
    )

    prompt: Prompts
    max_tokens: MaxTokensOrNone | None = None
    logprobs: NumLogprobs | None = None
    echo: bool = False

    @property
    def gives_prompt_back(self) -> bool:
        return self.echo

    @property
    def wants_no_answer(self) -> bool:
        return self.max_tokens == 0

    def max_output_tokens(self) -> int | None:
        if self.wants_no_answer and not self.echo:
            raise InvalidRequestError("max_tokens: must be >= 1 without echo", field="max_tokens")
        return 1 if self.wants_no_answer else self.max_tokens  # no less can be generated

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> tuple[Prompt, ...]:
        prompts: tuple[Prompt, ...] = self.prompt
        return prompts


class TokenizeBody(StrictBody):
    """Body of `POST /tokenize`."""

    model_config = ConfigDict(
        json_schema_extra=rules.together(
            rules.either("prompt", "messages"), rules.only_with("tools", "messages")
        )
    )

    model: str = Field(min_length=1)
    prompt: Text | None = None
    messages: list[Message] | None = Field(
        default=None, min_length=1, max_length=types.MAX_MESSAGES
    )
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    def checked_prompt(self) -> TextPrompt | ChatPrompt:
        """Return what to tokenise. Raises InvalidRequestError unless there is one thing."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("prompt: give it or messages, one of both", field="prompt")
        if self.messages is not None:
            options = tool_options(self.tools)
            check_options(options)
            return conversation(self.messages, options)
        if self.tools is not None:
            raise InvalidRequestError("tools: only allowed with messages", field="tools")
        return TextPrompt(self.prompt or "")


class DetokenizeBody(StrictBody):
    """Body of `POST /detokenize`."""

    model: str = Field(min_length=1)
    tokens: list[TokenId]


def conversation(
    messages: list[Message], options: ConversationOptions = DEFAULT_OPTIONS
) -> ChatPrompt:
    """Return a checked conversation. Raises InvalidRequestError naming the message at fault."""
    return checked_conversation([message.to_turn() for message in messages], options)
