"""Who may call: keys from a file, and whose key the current call has shown."""

import hashlib
import tomllib
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from services.kit.errors import UnauthenticatedError

SCHEME = "bearer"


class ApiKey(BaseModel):
    """One entry of the file. Compared and shown by name only."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(min_length=1)
    key: SecretStr = Field(min_length=16)
    max_live_requests: int | None = Field(default=None, ge=1)  # None: as many as the gateway takes
    tokens_per_minute: int | None = Field(default=None, ge=1)  # prompt and output; None: any number


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    keys: tuple[ApiKey, ...] = Field(min_length=1)


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read the entries of a TOML file with one table `[[keys]]` per key.

    Raises ValueError, whose text names the place but not what stands there.
    """
    try:
        keys = _KeyFile.model_validate(tomllib.loads(path.read_text())).keys
    except tomllib.TOMLDecodeError:
        raise ValueError("the file is not valid TOML") from None
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

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        # By digest: how long a look-up takes says nothing about a key.
        self._by_digest = {_digest(key.key.get_secret_value()): key for key in keys}

    def caller(self, authorization: str) -> ApiKey | None:
        """Return whose key an `Authorization` header shows; None if no keys are asked for.

        Raises UnauthenticatedError.
        """
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
    """Make the rest of this task's work that of `key`."""
    _caller.set(key)


def current_caller() -> ApiKey | None:
    """Return whose work this task does; None where no keys are asked for."""
    return _caller.get()
