"""The objects of the Responses API: a response, and the items that it puts out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.openai.logprobs import chat_logprobs
from services.gateway.openai.responses import told_extension
from services.gateway.pieces import Piece, PieceKind
from services.gateway.responses_api.bodies import FunctionTool, ResponsesBody
from services.gateway.responses_api.schemas import ResponseUsage
from services.gateway.types import Finish, GenerationRequest, RequestId
from services.generation.conversation import ToolChoice
from services.generation.finish import FinishReason
from services.generation.logprobs import TokenLogprobs

ID_PREFIX = "resp_"  # of a response, before its request's id
_PREFIX = {PieceKind.REASONING: "rs", PieceKind.TEXT: "msg", PieceKind.CALL: "fc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What a response is known by, and what it repeats of its request."""

    request_id: RequestId
    created_s: int  # since 1970
    asked: dict[str, Any]
    background: bool = False
    store: bool = False
    uses_extension: bool = False  # and is told what it says beside the answer

    def item_id(self, kind: PieceKind, index: int) -> str:
        """Return the id of the item at `index` of the output, which is a piece of `kind`."""
        return f"{_PREFIX[kind]}_{self.request_id}_{index}"


def response_head(
    body: ResponsesBody, request: GenerationRequest, *, created_s: int
) -> ResponseHead:
    """Return the head of the response to `body`, of which `request` was made."""
    stated_format = body.text.format.model_dump(by_alias=True, exclude_unset=True)
    asked = {
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"} | stated_format},
        "tool_choice": _choice(body),
        "tools": [_tool(function) for function in body.functions],
        "top_logprobs": body.top_logprobs,
        "top_p": request.sampling.top_p,
    }
    return ResponseHead(
        request_id=request.request_id,
        created_s=created_s,
        asked=asked,
        background=body.background,
        store=body.store,
        uses_extension=body.uses_extension,
    )


def _choice(body: ResponsesBody) -> str | dict[str, str]:
    chosen = body.tool_choice
    if chosen.choice is ToolChoice.NAMED:
        return {"type": "function", "name": chosen.named}
    return str(chosen.choice.value)


def _tool(function: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": function.name,
        "description": function.description or None,
        "parameters": function.parameters or None,
        "strict": function.strict,
    }


def response(
    head: ResponseHead, output: Sequence[dict[str, Any]] = (), finish: Finish | None = None
) -> dict[str, Any]:
    """Return a response with what it has put out; without `finish` it is in progress."""
    is_cut = finish is not None and finish.reason is FinishReason.LENGTH
    status = "in_progress" if finish is None else "incomplete" if is_cut else "completed"
    return {
        "id": f"{ID_PREFIX}{head.request_id}",
        "object": "response",
        "created_at": head.created_s,
        "status": status,
        "background": head.background,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        **head.asked,
        "output": list(output),
        "previous_response_id": None,
        "service_tier": "default",
        "store": head.store,
        "truncation": "disabled",
        "usage": None if finish is None else usage(finish),
        **told_extension([finish] if finish else [], is_asked=head.uses_extension),
    }


def usage(finish: Finish) -> ResponseUsage:
    return {
        "input_tokens": finish.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": finish.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": finish.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": finish.num_reasoning_tokens or 0},
        "total_tokens": finish.num_prompt_tokens + finish.num_output_tokens,
    }


def item(head: ResponseHead, index: int, piece: Piece, *, status: str) -> dict[str, Any]:
    """Return the item that a piece is."""
    begun = {"id": head.item_id(piece.kind, index), "status": status}
    match piece.kind:
        case PieceKind.REASONING:
            return begun | {"type": "reasoning", "summary": [], "content": [content(piece)]}
        case PieceKind.TEXT:
            return begun | {"type": "message", "role": "assistant", "content": [content(piece)]}
        case PieceKind.CALL:
            called = {"call_id": piece.call_id, "name": piece.name, "arguments": piece.text}
            return begun | {"type": "function_call", **called}


def content(piece: Piece) -> dict[str, Any]:
    """Return the only part of a message or of reasoning."""
    if piece.kind is PieceKind.REASONING:
        return {"type": "reasoning_text", "text": piece.text}
    return {
        "type": "output_text",
        "text": piece.text,
        "annotations": [],
        "logprobs": logprobs(piece.logprobs),
    }


def logprobs(tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return list(chat_logprobs(tokens)["content"])
