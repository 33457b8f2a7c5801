"""The objects of the Messages API: a message, and the blocks of its content."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.anthropic.schemas import MessageUsage
from services.gateway.pieces import Piece, PieceKind
from services.gateway.types import Finish, RequestId
from services.generation.finish import FinishReason

# Clients drop thoughts without one. Nothing checks it: thoughts are taken back as they are.
SIGNATURE = "unsigned"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHead:
    """What a message is known by."""

    request_id: RequestId
    model: str
    tells_moves: bool = False  # between executors, if there were any


def message(
    head: MessageHead, content: Sequence[dict[str, Any]], ending: dict[str, Any]
) -> dict[str, Any]:
    """Return a message with its content and how it ended."""
    return {
        "id": f"msg_{head.request_id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": list(content),
        **ending,
    }


def ending(finish: Finish, *, has_calls: bool) -> dict[str, Any]:
    """Return how an answer ended, in Anthropic's names."""
    if finish.reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif finish.stop_string:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if has_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": finish.stop_string or None}


def usage(finish: Finish) -> MessageUsage:
    """Return the token counts; input tokens are those of the prompt that were not cached."""
    counts: MessageUsage = {
        "input_tokens": finish.num_prompt_tokens - finish.num_cached_tokens,
        "cache_read_input_tokens": finish.num_cached_tokens,
        "output_tokens": finish.num_output_tokens,
    }
    if finish.num_reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": finish.num_reasoning_tokens}
    return counts


def block(piece: Piece) -> dict[str, Any]:
    """Return the block that a piece is. Arguments cut short are no object, and left out."""
    match piece.kind:
        case PieceKind.REASONING:
            return {"type": "thinking", "thinking": piece.text, "signature": SIGNATURE}
        case PieceKind.TEXT:
            return {"type": "text", "text": piece.text}
        case PieceKind.CALL:
            called = {"id": piece.call_id, "name": piece.name, "input": _object(piece.text)}
            return {"type": "tool_use", **called}


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
