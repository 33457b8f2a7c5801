"""Dataclasses to protobuf messages and back, field by field: both use the same names.

A field without a value on the wire has the dataclass' default. An enum's member is the message's
value of that name behind the enum's prefix: `RequestPhase.PREFILL` is `REQUEST_PHASE_PREFILL`.
What a field may hold stands beside its type, as an annotation of the shape of `Within` or `AtMost`.
"""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NewType,
    NoReturn,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from services.kit.errors import InvalidRequestError


@runtime_checkable
class Within(Protocol):
    """A range of numbers; its text says which."""

    def holds(self, value: float) -> bool: ...


@runtime_checkable
class AtMost(Protocol):
    """So many entries or characters at most; no text is empty then."""

    length: int


T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)

# Takes a message and its path; returns the field's value.
Reader = Callable[[Message, str], Any]
# Takes a message, a field and its value, which is not None.
Writer = Callable[[Any, str, Any], Any]


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def fail(path: str, problem: str) -> NoReturn:
    raise InvalidRequestError(f"{path}: {problem}", field=path)


# -- writing -------------------------------------------------------------------------------------


def write(value: Any, message: MessageT) -> MessageT:
    """Fill a message from the attributes that have its fields' names, and return it."""
    for name, write_one in _writers(message.DESCRIPTOR):
        attribute = getattr(value, name)
        if attribute is not None:
            write_one(message, name, attribute)
    return message


@cache
def _writers(descriptor: Descriptor) -> tuple[tuple[str, Writer], ...]:
    return tuple((field.name, _writer(field)) for field in descriptor.fields)


def _writer(field: Any) -> Writer:
    if field.is_repeated:
        return _write_many if field.message_type is None else _write_parts
    if field.message_type is not None:
        return lambda message, name, value: write(value, _present(getattr(message, name)))
    if field.enum_type is not None:
        kind = field.enum_type
        return lambda message, name, member: setattr(message, name, _number_of(kind, member))
    return setattr


def _write_many(message: Any, name: str, values: Sequence[Any]) -> None:
    getattr(message, name).extend(values)


def _write_parts(message: Any, name: str, parts: Sequence[Any]) -> None:
    entries = getattr(message, name)
    for part in parts:
        write(part, entries.add())


def _present(message: Message) -> Message:
    """Return a part of a message, set even if it stays empty."""
    message.SetInParent()
    return message


@cache
def _number_of(kind: EnumDescriptor, member: Enum) -> int:
    number: int = kind.values_by_name[f"{_prefix_of(kind)}{member.name}"].number
    return number


def _prefix_of(kind: EnumDescriptor) -> str:
    return str(kind.values_by_number[0].name).removesuffix("UNSPECIFIED")


# -- reading -------------------------------------------------------------------------------------


def read(cls: type[T], message: Message, path: str) -> T:
    """Return a message as a dataclass. Raises InvalidRequestError naming `path.field`.

    An empty path names the field alone.
    """
    kind: Any = cls
    readers = _readers(kind, message.DESCRIPTOR)
    return cls(**{name: reader(message, path) for name, reader in readers})


@cache
def _readers(cls: Any, descriptor: Descriptor) -> tuple[tuple[str, Reader], ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        (field.name, _reader(field, hints[field.name], descriptor.fields_by_name[field.name]))
        for field in fields(cls)
    )


def _reader(field: Field[Any], hint: Any, wire: FieldDescriptor) -> Reader:
    kind, rules = _kind_and_rules(hint)
    if wire.is_repeated:
        return _reader_of_many(field.name, kind, rules)
    if is_dataclass(kind):
        read_value: Reader = _reader_of_part(field.name, kind)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        read_value = _reader_of_enum(field, kind, wire.enum_type)
    else:
        read_value = _reader_of_scalar(field, rules)
    if not wire.has_presence:
        return read_value
    name, default = field.name, _default(field)

    def read_present(message: Message, path: str) -> Any:
        if message.HasField(name):
            return read_value(message, path)
        return fail(_at(path, name), "is required") if default is None else default()

    return read_present


def _kind_and_rules(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a field's type without None, or that of a tuple's entries, and what it may hold."""
    rules: tuple[Any, ...] = ()
    while True:
        if get_origin(hint) is Annotated:
            hint, *found = get_args(hint)
            rules += tuple(found)
        elif get_origin(hint) in (Union, UnionType):
            (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
        elif get_origin(hint) is tuple:
            hint = get_args(hint)[0]
        elif isinstance(hint, NewType):
            hint = hint.__supertype__
        else:
            return hint, rules


def _default(field: Field[Any]) -> Callable[[], Any] | None:
    if field.default_factory is not MISSING:
        return field.default_factory
    return None if field.default is MISSING else lambda: field.default


def _reader_of_many(name: str, kind: Any, rules: Sequence[Any]) -> Reader:
    most = next((rule.length for rule in rules if isinstance(rule, AtMost)), None)
    within = next((rule for rule in rules if isinstance(rule, Within)), None)
    is_part = is_dataclass(kind)

    def read_many(message: Message, path: str) -> tuple[Any, ...]:
        entries = getattr(message, name)
        if most is not None and len(entries) > most:
            fail(_at(path, name), f"has more than {most} entries")
        if is_part:
            place = _at(path, name)
            return tuple(read(kind, part, f"{place}[{i}]") for i, part in enumerate(entries))
        values = tuple(entries)
        if within is not None and not all(within.holds(value) for value in values):
            fail(_at(path, name), f"holds a value that is not in {within}")
        return values

    return read_many


def _reader_of_part(name: str, kind: Any) -> Reader:
    return lambda message, path: read(kind, getattr(message, name), _at(path, name))


def _reader_of_enum(field: Field[Any], kind: type[Enum], wire: Any) -> Reader:
    name, prefix = field.name, _prefix_of(wire)
    members = {
        value.number: kind[value.name.removeprefix(prefix)] for value in wire.values if value.number
    }
    default = _default(field)
    if default is not None:
        members[0] = default()

    def read_enum(message: Message, path: str) -> Enum:
        number = getattr(message, name)
        if number not in members:
            fail(_at(path, name), f"unknown value {number}")
        return members[number]

    return read_enum


def _reader_of_scalar(field: Field[Any], rules: Sequence[Any]) -> Reader:
    name = field.name
    if not rules:
        return lambda message, path: getattr(message, name)
    (rule,) = rules
    if isinstance(rule, AtMost):
        return _reader_of_text(name, rule.length)

    def read_number(message: Message, path: str) -> Any:
        value = getattr(message, name)
        if not rule.holds(value):
            fail(_at(path, name), f"{value} is not in {rule}")
        return value

    return read_number


def _reader_of_text(name: str, max_length: int) -> Reader:
    def read_text(message: Message, path: str) -> str:
        value: str = getattr(message, name)
        if not value:
            fail(_at(path, name), "is required")
        if len(value) > max_length:
            fail(_at(path, name), f"is longer than {max_length} characters")
        return value

    return read_text
