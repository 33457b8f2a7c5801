"""Who may call, and whose key the current call has shown."""

import hashlib
import tomllib
from collections.abc import Sequence
from contextvars import ContextVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from services.kit.errors import UnauthenticatedError, UnavailableError

SCHEME = "bearer"


class ApiKey(BaseModel):
    """One entry of the document. Compared by name only: a key whose limits change stays itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(min_length=1)
    key: SecretStr = Field(min_length=16)
    max_live_requests: int | None = Field(default=None, ge=1)  # None: half of the gateway's
    tokens_per_minute: int | None = Field(default=None, ge=1)  # prompt and output; None: any number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApiKey) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class _KeyDocument(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    keys: tuple[ApiKey, ...] = Field(min_length=1)


def parse_api_keys(document: str) -> tuple[ApiKey, ...]:
    """Return the entries of a TOML document with one table `[[keys]]` per key.

    Raises ValueError, whose text names the place but not what stands there.
    """
    try:
        keys = _KeyDocument.model_validate(tomllib.loads(document)).keys
    except (tomllib.TOMLDecodeError, RecursionError):
        raise ValueError("the keys are not valid TOML") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}") from None
    if len({key.name for key in keys}) < len(keys):
        raise ValueError("two keys have the same name")
    if len({key.key.get_secret_value() for key in keys}) < len(keys):
        raise ValueError("two names have the same key")
    return keys


class ApiKeys:
    """Tells callers apart. Without any key everybody may call, as nobody."""

    def __init__(self, keys: Sequence[ApiKey] | None = ()) -> None:
        """`None`: keys are asked for, and not known yet."""
        self._by_digest: dict[bytes, ApiKey] | None = None
        if keys is not None:
            self.replace(keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Know these keys from now on, and no others; calls that are in go on."""
        # By digest: how long a look-up takes says nothing about a key.
        self._by_digest = {_digest(key.key.get_secret_value()): key for key in keys}

    def caller(self, authorization: str) -> ApiKey | None:
        """Return whose key an `Authorization` header shows; None if no keys are asked for.

        Raises UnauthenticatedError, UnavailableError before the keys are known.
        """
        if self._by_digest is None:
            raise UnavailableError("the API keys have not been read yet")
        if not self._by_digest:
            return None
        scheme, _, shown = authorization.partition(" ")
        if scheme.lower() != SCHEME or not shown.strip():
            raise UnauthenticatedError("an API key is needed: `Authorization: Bearer KEY`")
        key = self._by_digest.get(_digest(shown.strip()))
        if key is None:
            raise UnauthenticatedError("the API key is not known")
        return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


_caller: ContextVar[ApiKey | None] = ContextVar("caller", default=None)


def bind_caller(key: ApiKey | None) -> None:
    """Make the rest of this task's work, and its log lines, that of `key`."""
    _caller.set(key)
    if key is None:
        structlog.contextvars.unbind_contextvars("api_key")
    else:
        structlog.contextvars.bind_contextvars(api_key=key.name)


def current_caller() -> ApiKey | None:
    """Return whose work this task does; None where no keys are asked for."""
    return _caller.get()
