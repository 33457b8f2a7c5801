"""Which callers are let in, and the key that the current call has shown."""

import hashlib
import re
import tomllib
from collections.abc import Sequence
from contextvars import ContextVar

import structlog
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from services.gateway.access.terms import DefaultRate, SloFloors
from services.gateway.errors import AdminKeyNeededError
from services.kit.errors import InvalidRequestError, UnauthenticatedError, UnavailableError

SCHEME = "bearer"
HASHED = "sha256:"  # before the hash of a key that is not written down itself
_HASH = re.compile(rf"{HASHED}[0-9a-f]{{64}}")
MAX_PRIORITY = 2**31 - 1


def hashed(key: str) -> str:
    """Return what may stand in the document instead of `key`, which cannot be had from it."""
    return HASHED + _digest(key).hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class ApiKey(SloFloors):
    """One entry of the document. Compared by name only: a key whose limits change stays itself."""

    name: str = Field(min_length=1)
    key: SecretStr = Field(min_length=16)  # itself, or `hashed`
    max_live_requests: int | None = Field(default=None, ge=1)  # None: half of the gateway's
    tokens_per_minute: int | None = Field(default=None, ge=1)  # prompt and output; None: any number

    admin: bool = False  # may see what all keys' requests do

    # At which its answers are read where a request states no pace; None: the model's.
    default_reading_rate_tps: DefaultRate | None = None

    # The least and the greatest that its requests may have; lower is served first.
    priorities: tuple[int, int] = (0, MAX_PRIORITY)
    # Of requests that state none; None: 0, or what of `priorities` is nearest.
    default_priority: int | None = None
    # Whether its requests may state among which ids a pool is shared; else all are its own.
    may_state_fairness_ids: bool = True

    @field_validator("key")
    @classmethod
    def _check_hash(cls, key: SecretStr) -> SecretStr:
        secret = key.get_secret_value()
        if secret.startswith(HASHED) and not _HASH.fullmatch(secret):
            raise ValueError(f"{HASHED} is not followed by 64 hexadecimal digits")
        return key

    @field_validator("priorities")
    @classmethod
    def _check_priorities(cls, range_: tuple[int, int]) -> tuple[int, int]:
        if not -MAX_PRIORITY <= range_[0] <= range_[1] <= MAX_PRIORITY:
            raise ValueError("is not the least and the greatest priority")
        return range_

    @model_validator(mode="after")
    def _check_default_priority(self) -> "ApiKey":
        least, greatest = self.priorities
        if self.default_priority is not None and not least <= self.default_priority <= greatest:
            raise ValueError("default_priority is not one of its priorities")
        return self

    @property
    def digest(self) -> bytes:
        """Return the key's SHA-256."""
        secret = self.key.get_secret_value()
        if secret.startswith(HASHED):
            return bytes.fromhex(secret.removeprefix(HASHED))
        return _digest(secret)

    def priority(self, stated: int | None, name: str = "priority") -> int:
        """Return a request's priority. Raises InvalidRequestError, naming the field, for one that
        it may not state.
        """
        least, greatest = self.priorities
        if stated is None:
            default = self.default_priority
            return min(greatest, max(least, 0)) if default is None else default
        if not least <= stated <= greatest:
            rule = f"this API key may state {least} to {greatest}"
            raise InvalidRequestError(f"{name}: {rule}", field=name)
        return stated

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
    if len({key.digest for key in keys}) < len(keys):
        raise ValueError("two names have the same key")
    return keys


class ApiKeys:
    """Tells callers apart. Without any key every caller is let in, nameless."""

    def __init__(self, keys: Sequence[ApiKey] | None = ()) -> None:
        """`None`: keys are asked for, and not known yet."""
        self._by_digest: dict[bytes, ApiKey] | None = None
        if keys is not None:
            self.replace(keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Know these keys from now on, and no others; calls that are in go on."""
        # By digest: how long a look-up takes says nothing about a key.
        self._by_digest = {key.digest: key for key in keys}

    def caller(self, *authorizations: str) -> ApiKey | None:
        """Return the first good key that `Authorization` headers show; None if no keys are asked
        for. A client may send a key for another server beside ours.

        Raises UnauthenticatedError, UnavailableError before the keys are known.
        """
        if self._by_digest is None:
            raise UnavailableError("the API keys have not been read yet")
        if not self._by_digest:
            return None
        shown = [key for authorization in authorizations if (key := _shown(authorization))]
        for key in shown:
            if (known := self._by_digest.get(_digest(key))) is not None:
                return known
        if shown:
            raise UnauthenticatedError("the API key is not known")
        raise UnauthenticatedError("an API key is needed: `Authorization: Bearer KEY`")


def _shown(authorization: str) -> str:
    """Return the key that an `Authorization` header shows; empty for none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == SCHEME else ""


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


_address: ContextVar[str] = ContextVar("address", default="")


def bind_address(host: str) -> None:
    """Make the rest of this task's work that of a client at `host`; empty: not known."""
    _address.set(host)


def check_admin() -> None:
    """Raise AdminKeyNeededError if this task's work is a caller's that may not see others'; without
    keys every caller may.
    """
    caller = current_caller()
    if caller is not None and not caller.admin:
        raise AdminKeyNeededError


def current_account() -> str:
    """Return whose account this task's work is on: the caller's name; empty without keys."""
    caller = current_caller()
    return caller.name if caller else ""


def fair_key() -> str:
    """Return among which clients this task's work is shared: the caller's name where keys are asked
    for, else the client's address; empty: not known.
    """
    return current_account() or _address.get()
