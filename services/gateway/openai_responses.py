"""The response shapes of the OpenAI API: whole answers, and chunks cheap enough for every token."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from services.gateway.types import Finish, ModelInfo, RequestId, Token

DONE_EVENT = b"data: [DONE]\n\n"
_END_OF_EVENT = "\n\n"
# Legal inside a JSON string, but taken for line ends by some readers of event streams.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class AnswerKind(Enum):
    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What all chunks of an answer, and the whole answer, begin with."""

    kind: AnswerKind
    request_id: RequestId
    model: str
    created_s: int  # since 1970

    @property
    def answer_id(self) -> str:
        prefix = "chatcmpl" if self.kind is AnswerKind.CHAT else "cmpl"
        return f"{prefix}-{self.request_id}"


def encode_json(value: Any) -> str:
    """Encode compactly, in UTF-8 rather than escapes, on one line by any definition of a line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else text.translate(_LINE_ENDS)


def event(value: Any) -> bytes:
    """Return one server-sent event."""
    return f"data: {encode_json(value)}{_END_OF_EVENT}".encode()


def usage(finish: Finish) -> dict[str, int]:
    return {
        "prompt_tokens": finish.num_prompt_tokens,
        "completion_tokens": finish.num_output_tokens,
        "total_tokens": finish.num_prompt_tokens + finish.num_output_tokens,
    }


class ChunkWriter:
    """Formats one streamed answer. What does not change from token to token is made once."""

    def __init__(self, head: AnswerHead, *, includes_usage: bool) -> None:
        self._is_chat = head.kind is AnswerKind.CHAT
        self._includes_usage = includes_usage
        self._head: dict[str, Any] = {
            "id": head.answer_id,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": head.created_s,
            "model": head.model,
        }
        self._is_begun = False
        # The text goes between the two halves of a chunk made with a placeholder.
        before, _, after = encode_json(self._chunk("\0")).partition(json.dumps("\0"))
        self._before_text = f"data: {before}"
        self._after_text = f"{after}{_END_OF_EVENT}"

    def tokens(self, tokens: Sequence[Token]) -> bytes:
        """Return an event per token with text; the first ones follow the chunk with the role."""
        events = [
            f"{self._before_text}{encode_json(token.text)}{self._after_text}"
            for token in tokens
            if token.text
        ]
        return (self._begin() + "".join(events).encode()) if events else b""

    def ending(self, finish: Finish) -> bytes:
        """Return the events from the finish reason to `[DONE]`."""
        choice = self._choice({} if self._is_chat else "", finish.reason.value)
        final = event(self._with_choices([choice]))
        if self._includes_usage:
            final += event(self._head | {"choices": [], "usage": usage(finish)})
        return self._begin() + final + DONE_EVENT

    def _begin(self) -> bytes:
        if self._is_begun or not self._is_chat:
            return b""
        self._is_begun = True
        choice = self._choice({"role": "assistant", "content": ""}, None)
        return event(self._with_choices([choice]))

    def _chunk(self, text: str) -> dict[str, Any]:
        return self._with_choices(
            [self._choice({"content": text} if self._is_chat else text, None)]
        )

    def _choice(self, content: dict[str, str] | str, reason: str | None) -> dict[str, Any]:
        name = "delta" if self._is_chat else "text"
        return {"index": 0, name: content, "logprobs": None, "finish_reason": reason}

    def _with_choices(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head | {"choices": choices}
        return chunk | {"usage": None} if self._includes_usage else chunk


def whole_answer(head: AnswerHead, text: str, finish: Finish) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    choice: dict[str, Any] = {"index": 0}
    if head.kind is AnswerKind.CHAT:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    choice |= {"logprobs": None, "finish_reason": finish.reason.value}
    return {
        "id": head.answer_id,
        "object": "chat.completion" if head.kind is AnswerKind.CHAT else "text_completion",
        "created": head.created_s,
        "model": head.model,
        "choices": [choice],
        "usage": usage(finish),
    }


def model_entry(model: ModelInfo, created_s: int) -> dict[str, Any]:
    return {
        "id": model.model,
        "object": "model",
        "created": created_s,
        "owned_by": "evenflow",
        "max_model_len": model.max_model_len,
    }
