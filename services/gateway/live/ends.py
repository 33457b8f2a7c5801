"""The two ends of a live request: what holds it, and where its tokens go."""

from collections.abc import Sequence
from typing import Protocol

from services.gateway.types import Token
from services.kit.errors import ServiceError


class Holder(Protocol):
    """Where a request is: hears how its reader comes along, and what becomes of it there."""

    def taken(self) -> None:
        """Take in that the executor has taken the request."""

    def lost(self, error: ServiceError) -> ServiceError | None:
        """Take in that the executor has not got the request, or not any more. Returns what ends
        it; None: it will go on, here or elsewhere.
        """

    def progressed(self, num_delivered: int) -> None:
        """Take in how many tokens the reader has."""

    def lags(self, hold: bool) -> None:
        """Take in that generation should be held, or go on again."""


class Outlet(Protocol):
    """Where one request's tokens go."""

    @property
    def is_open(self) -> bool:
        """Say whether it takes tokens now."""

    async def opened(self) -> None:
        """Wait until it takes tokens."""

    def write(self, tokens: Sequence[Token], *, as_one: bool) -> None:
        """Take the next tokens; `as_one` if its reader lags, and need not hear of each."""


class Nobody:
    """Hears nothing."""

    def taken(self) -> None:
        """Do nothing."""

    def lost(self, error: ServiceError) -> ServiceError:
        """Return the error: nothing goes on."""
        return error

    def progressed(self, num_delivered: int) -> None:
        """Do nothing."""

    def lags(self, hold: bool) -> None:
        """Do nothing."""


NOBODY = Nobody()
