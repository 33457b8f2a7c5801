"""Reading one protobuf message with every field checked and named in the error."""

import math
from typing import NoReturn

from google.protobuf.message import Message

from services.kit.errors import InvalidRequestError

MAX_INT32 = 2**31 - 1


class Fields:
    """The fields of one message. Every reader raises InvalidRequestError naming `path.name`."""

    def __init__(self, message: Message, path: str) -> None:
        self._message = message
        self._path = path

    def fail(self, name: str, problem: str) -> NoReturn:
        field = f"{self._path}.{name}"
        raise InvalidRequestError(f"{field}: {problem}", field=field)

    def text(self, name: str, *, max_length: int) -> str:
        """Return a non-empty string."""
        value: str = getattr(self._message, name)
        if not value:
            self.fail(name, "is required")
        if len(value) > max_length:
            self.fail(name, f"is longer than {max_length} characters")
        return value

    def integer(self, name: str, *, low: int = 0, high: int = MAX_INT32) -> int:
        """Return an integer in [low, high]."""
        value: int = getattr(self._message, name)
        if not low <= value <= high:
            self.fail(name, f"{value} is not in [{low}, {high}]")
        return value

    def number(self, name: str, *, high: float = math.inf) -> float:
        """Return a finite number in [0, high]."""
        value: float = getattr(self._message, name)
        if not (math.isfinite(value) and 0.0 <= value <= high):
            self.fail(name, f"{value} is not a finite number in [0, {high}]")
        return value

    def positive(self, name: str) -> float:
        """Return a finite number > 0."""
        value: float = getattr(self._message, name)
        if not (math.isfinite(value) and value > 0.0):
            self.fail(name, f"{value} is not a finite number > 0")
        return value

    def optional_number(self, name: str) -> float | None:
        """Return a finite number >= 0, None where unset."""
        return self.number(name) if self._message.HasField(name) else None

    def optional_positive(self, name: str) -> float | None:
        """Return a finite number > 0, None where unset."""
        return self.positive(name) if self._message.HasField(name) else None

    def integers(self, name: str, *, max_count: int, high: int = MAX_INT32) -> tuple[int, ...]:
        """Return at most `max_count` integers, each in [0, high]."""
        values: tuple[int, ...] = tuple(getattr(self._message, name))
        if len(values) > max_count:
            self.fail(name, f"has more than {max_count} entries")
        if any(not 0 <= value <= high for value in values):
            self.fail(name, f"holds a value that is not in [0, {high}]")
        return values
