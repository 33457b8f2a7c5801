"""What an answer says, cut where it turns from reasoning to text or to a call. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import groupby

from msgspec import Struct

from services.gateway.types import Token
from services.generation.logprobs import TokenLogprobs


class PieceKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Piece(Struct, frozen=True, kw_only=True, gc=False):
    """A stretch of an answer in one place, or a part of one."""

    kind: PieceKind
    text: str  # of a call: characters of its arguments
    call_index: int = 0  # of a call in its answer, from 0
    call_id: str = ""  # of a call, in its first part
    name: str = ""  # of a call's function, in its first part
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens with text

    @property
    def place(self) -> tuple[PieceKind, int]:
        """Return where it is: what comes next in the same place is of the same piece."""
        return self.kind, self.call_index


def pieces(tokens: Sequence[Token]) -> list[Piece]:
    """Return the pieces that tokens form, in order."""
    parts = [part for token in tokens for part in _parts(token)]
    return [_joined(list(group)) for _, group in groupby(parts, key=lambda part: part.place)]


def _parts(token: Token) -> Iterator[Piece]:
    if token.reasoning:
        yield Piece(kind=PieceKind.REASONING, text=token.reasoning)
    if token.text:
        logprobs = (token.logprobs,) if token.logprobs is not None else ()
        yield Piece(kind=PieceKind.TEXT, text=token.text, logprobs=logprobs)
    for call in token.tool_calls:
        yield Piece(
            kind=PieceKind.CALL,
            text=call.arguments,
            call_index=call.index,
            call_id=call.id,
            name=call.name,
        )


def _joined(parts: list[Piece]) -> Piece:
    if len(parts) == 1:
        return parts[0]
    return Piece(
        kind=parts[0].kind,
        call_index=parts[0].call_index,
        text="".join(part.text for part in parts),
        call_id=next((part.call_id for part in parts if part.call_id), ""),
        name=next((part.name for part in parts if part.name), ""),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
    )


class PieceWriter(ABC):
    """Writes a streamed answer as pieces that open, grow and close one after the other."""

    def __init__(self) -> None:
        self._parts: list[Piece] = []  # of the open piece

    def tokens(self, tokens: Sequence[Token], *, as_one: bool = False) -> bytes:
        """Return the events of tokens: an addition for each that says something, or for each
        piece that they form.
        """
        groups = [tokens] if as_one else [[token] for token in tokens]
        return b"".join(self._add(part) for group in groups for part in pieces(group))

    def _add(self, part: Piece) -> bytes:
        before = b""
        if not self._parts or part.place != self._parts[0].place:
            before = self._close_last(is_cut=False) + self._open(part)
        self._parts.append(part)
        return before + self._extend(part) if part.text else before

    def _close_last(self, *, is_cut: bool) -> bytes:
        """Close the open piece, if any; `is_cut` where the answer ended in the middle of it."""
        if not self._parts:
            return b""
        whole, self._parts = _joined(self._parts), []
        return self._close(whole, is_cut=is_cut)

    @abstractmethod
    def _open(self, part: Piece) -> bytes:
        """Return the events that begin a piece, before those of its first part."""

    @abstractmethod
    def _extend(self, part: Piece) -> bytes:
        """Return the event of the next part of the open piece."""

    @abstractmethod
    def _close(self, whole: Piece, *, is_cut: bool) -> bytes:
        """Return the events that end a piece."""
