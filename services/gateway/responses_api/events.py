"""Answers of the Responses API, whole and as the events of a stream."""

from collections.abc import Sequence
from typing import Any

from services.gateway.openai import errors as openai_errors
from services.gateway.openai.responses import Answer, encode_json
from services.gateway.pieces import Piece, PieceKind, PieceWriter, pieces
from services.gateway.responses_api.objects import ResponseHead, content, item, logprobs, response
from services.gateway.types import Finish
from services.generation.finish import FinishReason
from services.generation.logprobs import EchoedPrompt

_DELTA = {
    PieceKind.REASONING: "response.reasoning_text.delta",
    PieceKind.TEXT: "response.output_text.delta",
    PieceKind.CALL: "response.function_call_arguments.delta",
}


class ResponseForm:
    """One response, in the form that its client asked for."""

    limit_name = "max_output_tokens"

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._writer = ResponseWriter(head)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        said = pieces(answer.tokens)
        items = [
            item(self._head, k, piece, status=_status(answer.finish, is_last=k == len(said) - 1))
            for k, piece in enumerate(said)
        ]
        return response(self._head, items, answer.finish)

    def writer(self, index: int, num_prompt_tokens: int) -> "ResponseWriter":
        self._writer = ResponseWriter(self._head)
        return self._writer

    def last_events(self, finishes: Sequence[Finish]) -> bytes:
        return b""

    def failure(self, error: Exception) -> bytes:
        return self._writer.failure(error)


def _status(finish: Finish, *, is_last: bool) -> str:
    return "incomplete" if is_last and finish.reason is FinishReason.LENGTH else "completed"


class ResponseWriter(PieceWriter):
    """Formats one streamed response: each piece is an item of its output."""

    def __init__(self, head: ResponseHead) -> None:
        super().__init__()
        self._head = head
        self._num_events = 0
        self._items: list[dict[str, Any]] = []  # closed
        self._before_delta = ""  # of the open piece; what does not change from token to token

    def beginning(self) -> bytes:
        """Return the events before all others."""
        begun = {"response": response(self._head)}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def prompt(self, prompt: EchoedPrompt) -> bytes:
        """Return nothing: no response gives its prompt back."""
        return b""

    def ending(self, finish: Finish) -> bytes:
        """Return the events up to the last, which has the whole response."""
        is_cut = finish.reason is FinishReason.LENGTH
        closed = self._close_last(is_cut=is_cut)
        name = "response.incomplete" if is_cut else "response.completed"
        return closed + self._event(name, {"response": response(self._head, self._items, finish)})

    def failure(self, error: Exception) -> bytes:
        """Return the last event of a response that failed."""
        fault = openai_errors.body_of(error)["error"]
        told = {name: fault[name] for name in ("code", "message", "param")}
        return self._event("error", told | {"error": fault})

    def _open(self, part: Piece) -> bytes:
        begun = item(self._head, len(self._items), _emptied(part), status="in_progress")
        parts = begun.pop("content", [])
        if parts:
            begun["content"] = []
        added = self._event("response.output_item.added", self._at() | {"item": begun})
        place = self._place(part.kind)
        head = {"type": _DELTA[part.kind], **place}
        self._before_delta = f"event: {_DELTA[part.kind]}\ndata: {encode_json(head)[:-1]}"
        for empty in parts:
            added += self._event("response.content_part.added", place | {"part": empty})
        return added

    def _extend(self, part: Piece) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        text, likely = encode_json(part.text), ""
        if part.kind is PieceKind.TEXT:
            told = encode_json(logprobs(part.logprobs)) if part.logprobs else "[]"
            likely = f',"logprobs":{told}'
        return (
            f'{self._before_delta},"sequence_number":{number}{likely},"delta":{text}}}\n\n'
        ).encode()

    def _close(self, whole: Piece, *, is_cut: bool) -> bytes:
        place = self._place(whole.kind)
        match whole.kind:
            case PieceKind.REASONING:
                done = self._event("response.reasoning_text.done", place | {"text": whole.text})
            case PieceKind.TEXT:
                said = {"text": whole.text, "logprobs": logprobs(whole.logprobs)}
                done = self._event("response.output_text.done", place | said)
            case PieceKind.CALL:
                called = {"name": whole.name, "arguments": whole.text}
                done = self._event("response.function_call_arguments.done", place | called)
        if whole.kind is not PieceKind.CALL:
            done += self._event("response.content_part.done", place | {"part": content(whole)})
        status = "incomplete" if is_cut else "completed"
        finished = item(self._head, len(self._items), whole, status=status)
        done += self._event("response.output_item.done", self._at() | {"item": finished})
        self._items.append(finished)
        return done

    def _at(self) -> dict[str, Any]:
        return {"output_index": len(self._items)}

    def _place(self, kind: PieceKind) -> dict[str, Any]:
        place = {"item_id": self._head.item_id(kind, len(self._items)), **self._at()}
        return place if kind is PieceKind.CALL else place | {"content_index": 0}

    def _event(self, name: str, members: dict[str, Any]) -> bytes:
        """Return one event. The number goes up by one from each to the next."""
        numbered = {"type": name, "sequence_number": self._num_events, **members}
        self._num_events += 1
        return f"event: {name}\ndata: {encode_json(numbered)}\n\n".encode()


def _emptied(part: Piece) -> Piece:
    return Piece(kind=part.kind, text="", call_id=part.call_id, name=part.name)
