"""What an answer says, cut where it turns from reasoning to text or to a call. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from io import StringIO
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

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
        self._first: Piece | None = None  # part of the open piece
        self._text = StringIO()  # of it so far; parts would take several times the memory
        self._logprobs: list[TokenLogprobs] = []  # so far too

    def tokens(self, tokens: Sequence[Token], *, as_one: bool = False) -> bytes:
        """Return the events of tokens: an addition for each that says something, or for each
        piece that they form.
        """
        parts = pieces(tokens) if as_one else [part for t in tokens for part in _parts(t)]
        return b"".join(map(self._add, parts))

    def _add(self, part: Piece) -> bytes:
        begun = b""
        if self._first is None or part.place != self._first.place:
            begun = self._close_last(is_cut=False) + self._open(part)
            self._first = part
        self._text.write(part.text)
        self._logprobs += part.logprobs
        return begun + self._extend(part) if part.text else begun

    def _close_last(self, *, is_cut: bool) -> bytes:
        """Close the open piece, if any; `is_cut` where the answer ended in the middle of it."""
        first, text, logprobs = self._first, self._text.getvalue(), tuple(self._logprobs)
        if first is None:
            return b""
        self._first, self._text, self._logprobs = None, StringIO(), []
        return self._close(replace(first, text=text, logprobs=logprobs), is_cut=is_cut)

    @abstractmethod
    def _open(self, part: Piece) -> bytes:
        """Return the events that begin a piece, before those of its first part."""

    @abstractmethod
    def _extend(self, part: Piece) -> bytes:
        """Return the event of the next part of the open piece."""

    @abstractmethod
    def _close(self, whole: Piece, *, is_cut: bool) -> bytes:
        """Return the events that end a piece."""
