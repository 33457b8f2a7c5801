"""One input."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How an input goes to the gateway."""

    REQUEST = "HTTP request"  # whole, on a connection that is kept
    BYTES = "HTTP bytes"  # as they are, on a connection of their own
    GENERATE = "gRPC Generate"
    CHAT = "gRPC Chat"
    READER = "reader"  # of a stream, which stalls, leaves or comes back


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    kind: Kind
    content: bytes
    cuts: tuple[int, ...] = ()  # where it is cut into pieces that are sent one after the other
    pauses_s: tuple[float, ...] = ()  # of a reader, before each 4 KiB that it reads
