"""What tokens say, in the shape of chat messages: text, reasoning and calls of functions."""

from collections.abc import Iterable, Sequence
from typing import Any

from services.gateway.types import Token
from services.generation.conversation import ToolCallPart


def says_something(token: Token) -> bool:
    """Return whether a token completes anything that a client is told."""
    return bool(token.text or token.reasoning or token.tool_calls)


def is_plain(token: Token) -> bool:
    """Return whether a token has text alone, or nothing."""
    return not (token.reasoning or token.tool_calls)


def delta(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return what tokens add to a message, as a streamed `delta`."""
    added: dict[str, Any] = {}
    if reasoning := "".join(token.reasoning for token in tokens):
        added |= _thought(reasoning)
    if text := "".join(token.text for token in tokens):
        added["content"] = text
    if parts := merged(part for token in tokens for part in token.tool_calls):
        added["tool_calls"] = [_part(part) for part in parts]
    return added


def message(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return the message that all tokens of an answer form; without text, its content is null if
    it has calls or reasoning.
    """
    text = "".join(token.text for token in tokens)
    reasoning = "".join(token.reasoning for token in tokens)
    calls = merged(part for token in tokens for part in token.tool_calls)
    content = text if text or not (calls or reasoning) else None
    whole: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        whole |= _thought(reasoning)
    if calls:
        whole["tool_calls"] = [_call(call) for call in calls]
    return whole


def _thought(reasoning: str) -> dict[str, Any]:
    """Return reasoning under both names that clients know."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def merged(parts: Iterable[ToolCallPart]) -> list[ToolCallPart]:
    """Return one part for each call, in the order of their numbers."""
    by_index: dict[int, ToolCallPart] = {}
    for part in parts:
        first = by_index.get(part.index, ToolCallPart(part.index))
        by_index[part.index] = ToolCallPart(
            part.index,
            first.id or part.id,
            first.name or part.name,
            first.arguments + part.arguments,
        )
    return [by_index[index] for index in sorted(by_index)]


def _part(part: ToolCallPart) -> dict[str, Any]:
    if part.id:
        return {"index": part.index, **_call(part)}
    name = {"name": part.name} if part.name else {}
    return {"index": part.index, "function": {**name, "arguments": part.arguments}}


def _call(call: ToolCallPart) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
