"""Objects in bodies: which members they take, leave out and refuse."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

VALID_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a member that is told to be left out
OTHER = "other"  # what is left out, by any other name
MAX_NAMES = 32  # told of one body


class StrictBody(BaseModel):
    """An object with no members but the listed ones; a null is the same as an absent one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    neutral: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # by member: what asks for nothing

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, dict):
            return value
        stated = {name: member for name, member in value.items() if member is not None}
        if ignored(info) is not None:
            for name, nothing in cls.neutral.items():
                if name in stated and _is_same(stated[name], nothing):
                    del stated[name]
        return stated


class LenientBody(StrictBody):
    """An object whose members beside the listed ones are left out.

    Validated with a set as context, it puts their names there; without, it refuses them.
    """

    place: ClassVar[str] = ""  # where it is in a request
    refused: ClassVar[frozenset[str]] = frozenset()  # members that an answer would depend on

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown(cls, value: object, info: ValidationInfo) -> object:
        names = ignored(info)
        if not isinstance(value, dict) or names is None:
            return value
        known = cls.model_fields.keys() | cls.neutral.keys() | cls.refused
        for name in value.keys() - known:
            if value[name] is not None:
                note(names, cls.place, name)
        return {name: member for name, member in value.items() if name in known}


class Part(StrictBody):
    """An object within a conversation. What else it has is for programs that keep conversations."""

    model_config = ConfigDict(extra="ignore")


def ignored(info: ValidationInfo) -> set[str] | None:
    """Return the names of what is left out, to add to; None: nothing is, it is at fault."""
    return info.context if isinstance(info.context, set) else None


def note(names: set[str], place: str, name: str) -> None:
    """Add what is left out to the names that the client is told; it is `OTHER` if no header may
    have it.
    """
    if len(names) < MAX_NAMES:
        names.add(place + (name if VALID_NAME.fullmatch(name) else OTHER))


def _is_same(value: object, other: object) -> bool:
    """Compare as JSON does, where true is not 1."""
    return type(value) is type(other) and value == other
