"""Answers of the Messages API, whole and as the events of a stream."""

from collections.abc import Sequence
from typing import Any

from services.gateway.anthropic.errors import body_of
from services.gateway.anthropic.objects import (
    SIGNATURE,
    MessageHead,
    block,
    ending,
    message,
    usage,
)
from services.gateway.openai.responses import Answer, encode_json, told_extension
from services.gateway.pieces import Piece, PieceKind, PieceWriter, pieces
from services.gateway.types import Finish
from services.generation.logprobs import EchoedPrompt

_DELTA = {
    PieceKind.REASONING: ("thinking_delta", "thinking"),
    PieceKind.TEXT: ("text_delta", "text"),
    PieceKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageForm:
    """One message, in the form that its client asked for."""

    limit_name = "max_tokens"

    def __init__(self, head: MessageHead) -> None:
        self._head = head

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        said = pieces(answer.tokens)
        has_calls = any(piece.kind is PieceKind.CALL for piece in said)
        more = told_extension([answer.finish], is_asked=self._head.uses_extension)
        ended = ending(answer.finish, has_calls=has_calls) | {"usage": usage(answer.finish)} | more
        return message(self._head, [block(piece) for piece in said], ended)

    def writer(self, index: int, num_prompt_tokens: int) -> "MessageWriter":
        return MessageWriter(self._head, num_prompt_tokens)

    def last_events(self, finishes: Sequence[Finish]) -> bytes:
        return _event("message_stop", {})

    def failure(self, error: Exception) -> bytes:
        return _event("error", body_of(error, self._head.request_id))


class MessageWriter(PieceWriter):
    """Formats one streamed message: each piece is a block of its content."""

    def __init__(self, head: MessageHead, num_prompt_tokens: int) -> None:
        super().__init__()
        self._head = head
        self._num_prompt_tokens = num_prompt_tokens
        self._index = -1  # of the open block, or of the last one
        self._has_calls = False
        self._before_text = self._after_text = ""  # of a delta: the same from token to token

    def beginning(self) -> bytes:
        """Return the event before all others."""
        counts = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        unended = {"stop_reason": None, "stop_sequence": None, "usage": counts}
        return _event("message_start", {"message": message(self._head, [], unended)})

    def prompt(self, prompt: EchoedPrompt) -> bytes:
        """Return nothing: no message gives its prompt back."""
        return b""

    def ending(self, finish: Finish) -> bytes:
        """Return the events up to how the message ended."""
        ended = {"delta": ending(finish, has_calls=self._has_calls), "usage": usage(finish)}
        ended |= told_extension([finish], is_asked=self._head.uses_extension)
        return self._close_last(is_cut=False) + _event("message_delta", ended)

    def _open(self, part: Piece) -> bytes:
        self._index += 1
        self._has_calls = self._has_calls or part.kind is PieceKind.CALL
        kind, member = _DELTA[part.kind]
        delta = self._block_event("content_block_delta", delta={"type": kind, member: "\0"})
        self._before_text, _, self._after_text = delta.decode().partition(encode_json("\0"))
        begun = block(Piece(kind=part.kind, text="", call_id=part.call_id, name=part.name))
        if part.kind is PieceKind.REASONING:
            begun["signature"] = ""
        return self._block_event("content_block_start", content_block=begun)

    def _extend(self, part: Piece) -> bytes:
        return f"{self._before_text}{encode_json(part.text)}{self._after_text}".encode()

    def _close(self, whole: Piece, *, is_cut: bool) -> bytes:
        signed = b""
        if whole.kind is PieceKind.REASONING:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = self._block_event("content_block_delta", delta=delta)
        return signed + self._block_event("content_block_stop")

    def _block_event(self, name: str, **members: Any) -> bytes:
        return _event(name, {"index": self._index, **members})


def _event(name: str, members: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {encode_json({'type': name, **members})}\n\n".encode()
