"""One answer's text as content, reasoning and calls of functions, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
)
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls
from vllm.parser import Parser
from vllm.renderers.chat_utils import make_tool_call_id

from services.executor.types import Said
from services.generation.conversation import ToolCall, ToolCallPart


class AnswerParser:
    """Parses the steps of one answer, in order, with vLLM's streaming parser."""

    def __init__(
        self,
        parser: Parser,
        request: ChatCompletionRequest,
        prompt_token_ids: list[int],
        *,
        parses_reasoning: bool,
        reads_text: bool = True,
    ) -> None:
        """`reads_text`: whether a person reads the text of the answer."""
        self._parser = parser
        # Reasoning that is not told is read all the same, to be counted.
        self._request = request.model_copy(update={"include_reasoning": True})
        self._tells_reasoning = request.include_reasoning
        self._parses_reasoning = parses_reasoning
        self._reads_text = reads_text
        self.is_read = False  # whether a person reads the newest step
        self._prompt_token_ids = prompt_token_ids
        self._calls: dict[int, _Call] = {}
        self._num_reasoning_tokens = 0
        self._num_silent_tokens = 0  # since the last one that said something

    @property
    def chose_calls(self) -> bool:
        """Return whether the answer calls functions of the model's own choice."""
        is_named = isinstance(self._request.tool_choice, ChatCompletionNamedToolChoiceParam)
        return bool(self._calls) and not is_named

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Return the calls of functions so far."""
        return tuple(
            ToolCall(id=call.id, name=call.name, arguments="".join(call.arguments))
            for call in self._calls.values()
        )

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Return how many tokens the reasoning has so far, told or not, marks before it included;
        None where nothing tells reasoning from text.
        """
        return self._num_reasoning_tokens if self._parses_reasoning else None

    def parse(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> Said:
        """Return what a step adds: its tokens, and the text that they complete. Raises whatever
        the model's parser does.
        """
        delta = self._parser.parse_delta(
            text,
            list(token_ids),
            self._request,
            self._prompt_token_ids,
            finished=is_last,
        )
        said = Said() if delta is None else self._said(delta)
        self._count(said, len(token_ids))
        self._note_whether_read(said)
        return said if self._tells_reasoning else replace(said, reasoning="")

    def _said(self, delta: DeltaMessage) -> Said:
        delta = maybe_filter_parallel_tool_calls(delta, self._request)
        parts = tuple(self._part(call) for call in delta.tool_calls)
        return Said(delta.content or "", delta.reasoning or "", parts)

    def _count(self, said: Said, num_tokens: int) -> None:
        """Count a step's tokens: silent ones belong to what is said next."""
        self._num_silent_tokens += num_tokens
        if said.reasoning:
            self._num_reasoning_tokens += self._num_silent_tokens
        if said != Said():
            self._num_silent_tokens = 0

    def _note_whether_read(self, said: Said) -> None:
        """Note whether a step is read: text is, until a call begins. A silent one is of the kind
        of what is before it, as a mark after thoughts or the first bytes of a character.
        """
        if said.text:
            self.is_read = self._reads_text
        elif said.reasoning:
            self.is_read = False
        if self._calls:
            self.is_read = False

    def _part(self, call: Any) -> ToolCallPart:
        """Return a part with id and name the first time only, and with an id in any case."""
        known = self._calls.get(call.index)
        if known is None:
            known = self._calls[call.index] = _Call(call.id or make_tool_call_id())
            id = known.id
        else:
            id = ""
        function = call.function
        name = (function.name or "") if function is not None and not known.name else ""
        known.name = known.name or name
        arguments = (function.arguments or "") if function is not None else ""
        known.arguments.append(arguments)
        return ToolCallPart(call.index, id, name, arguments)


@dataclass(slots=True)
class _Call:
    id: str
    name: str = ""
    arguments: list[str] = field(default_factory=list)  # parts
