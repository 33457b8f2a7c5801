"""The objects of the Messages API: a message, and the blocks of its content."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.anthropic.blocks import SECONDS_BY_TTL
from services.gateway.anthropic.schemas import MessageUsage
from services.gateway.pieces import Piece, PieceKind
from services.gateway.types import Finish, RequestId
from services.generation.finish import FinishReason

# Clients drop thoughts without one. Nothing checks it: thoughts are taken back as they are.
SIGNATURE = "unsigned"
SHORT, LONG = "5m", "1h"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHead:
    """What a message is known by."""

    request_id: RequestId
    model: str
    uses_extension: bool = False  # and is told what it says beside the answer


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
    """Return the token counts; input tokens are those of the prompt that were neither cached nor
    are now.
    """
    num_new = finish.num_prompt_tokens - finish.num_cached_tokens
    created = _created(finish)
    counts: MessageUsage = {
        "input_tokens": num_new - sum(created.values()),
        "cache_read_input_tokens": finish.num_cached_tokens,
        "output_tokens": finish.num_output_tokens,
    }
    if finish.retained is not None:
        counts["cache_creation_input_tokens"] = sum(created.values())
        counts["cache_creation"] = {
            "ephemeral_5m_input_tokens": created[SHORT],
            "ephemeral_1h_input_tokens": created[LONG],
        }
    if finish.num_reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": finish.num_reasoning_tokens}
    return counts


def _created(finish: Finish) -> Counter[str]:
    """Return how many tokens of the prompt are kept that were not cached, by how long."""
    created: Counter[str] = Counter()
    before = finish.num_cached_tokens
    for span in finish.retained.spans if finish.retained is not None else ():
        end = min(span.end, finish.num_prompt_tokens)
        ttl = SHORT if span.retention_s <= SECONDS_BY_TTL[SHORT] else LONG
        created[ttl] += max(0, end - before)
        before = max(before, end)
    return created


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
