"""What clients ask to be kept of a request's KV once the request has ended, and what they get."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import NoReturn

from services.kit.errors import InvalidRequestError
from services.kit.wire import at

MAX_RETENTION_S = 86_400.0
MAX_SESSION_ID_LENGTH = 256
MAX_MARKS = 4  # of one request, as Anthropic has it


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionMark:
    """A beginning of a request's tokens, and how long it is to be kept."""

    retention_s: float  # from the request's end, in (0, MAX_RETENTION_S]
    num_messages: int = 0  # of the conversation; 0: all of the request, its answer too


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionHint:
    """What a client asks for. It never changes a token."""

    account: str = ""  # the API key's name, which the budget is of; empty: without keys
    session_id: str = ""  # that may release it; empty: none may
    marks: tuple[RetentionMark, ...] = ()  # ascending; each lasts longer than those behind it
    next_prefix: bool = False  # what the next turn begins with is computed ahead of it


class RetentionStatus(Enum):
    """The answer to a hint."""

    ACCEPTED = "accepted"  # all of it is on the host
    CLIPPED = "clipped"  # the account's budget is for less
    DEFERRED = "deferred"  # all of it is kept from when it is on the host
    REJECTED = "rejected"


class RejectedRetention(Enum):
    """Why nothing is kept."""

    NO_HOST_CACHE = "no_host_cache"  # the executor keeps no prefixes on the host
    MODEL_KIND = "model_kind"  # nor can it, of such a part of a prompt, of this model
    KV_LOST = "kv_lost"  # what the request computed is not to be found by others


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedSpan:
    """Tokens that are kept, from the end of the span before, or from the beginning."""

    end: int  # position behind the last one, in tokens of the whole request
    retention_s: float  # from the request's end


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    """What a hint has come to."""

    status: RetentionStatus
    reason: RejectedRetention | None = None  # of a rejected one
    spans: tuple[RetainedSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].end if self.spans else 0

    @property
    def retention_s(self) -> float:
        """Return how long the last of these tokens is kept, from the request's end; 0: none is."""
        return self.spans[-1].retention_s if self.spans else 0.0


BEST_FIRST = (
    RetentionStatus.ACCEPTED,
    RetentionStatus.DEFERRED,
    RetentionStatus.CLIPPED,
    RetentionStatus.REJECTED,
)


def least_of(answers: Iterable[Retained | None]) -> Retained | None:
    """Return what a hint has come to in all answers to a request: the worst, with the fewest
    tokens; None if nothing was asked for.
    """
    told = [one for one in answers if one is not None]
    return max(told, key=lambda one: (BEST_FIRST.index(one.status), -one.num_tokens), default=None)


def without_needless(marks: Sequence[RetentionMark]) -> tuple[RetentionMark, ...]:
    """Return ascending marks without those that a later one, which is about more, outlasts."""
    kept: list[RetentionMark] = []
    for mark in reversed(marks):
        if mark.retention_s > (kept[-1].retention_s if kept else 0.0):
            kept.append(mark)
    return tuple(reversed(kept))


def check_hint(hint: RetentionHint, *, path: str = "retention") -> None:
    """Raise InvalidRequestError naming the field that is out of its range."""
    if len(hint.session_id) > MAX_SESSION_ID_LENGTH:
        _refuse(at(path, "session_id"), f"must have at most {MAX_SESSION_ID_LENGTH} characters")
    if len(hint.marks) > MAX_MARKS:
        _refuse(at(path, "marks"), f"must be at most {MAX_MARKS}")
    for mark in hint.marks:
        if not isfinite(mark.retention_s) or not 0 < mark.retention_s <= MAX_RETENTION_S:
            _refuse(at(path, "marks.retention_s"), f"must be in (0, {MAX_RETENTION_S:g}]")
        if mark.num_messages < 0:
            _refuse(at(path, "marks.num_messages"), "must be >= 0")


def _refuse(field: str, rule: str) -> NoReturn:
    raise InvalidRequestError(f"{field}: {rule}", field=field)
