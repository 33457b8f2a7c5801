"""Dataclasses to protobuf messages and back, field by field: both use the same names.

A field without a value on the wire has the dataclass' default. An enum's member is the message's
value of that name behind the enum's prefix: `RequestPhase.PREFILL` is `REQUEST_PHASE_PREFILL`.
What a field may hold stands beside its type, as an annotation of the shape of `Rule` or `AtMost`.
What is made for each token is written by hand: this costs some microseconds per message.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NewType,
    NoReturn,
    Protocol,
    TypeAlias,
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
class Rule(Protocol):
    """What a value must be; its text says it behind "is not"."""

    def holds(self, value: Any) -> bool: ...


@runtime_checkable
class AtMost(Protocol):
    """So many entries or characters at most; no text is empty then."""

    length: int


NONE: frozenset[str] = frozenset()

T = TypeVar("T")
EnumT = TypeVar("EnumT", bound=Enum)
MessageT = TypeVar("MessageT", bound=Message)

# Takes a message and its path; returns the field's value.
Reader: TypeAlias = Callable[[Message, str], Any]
# Takes a message, a field and its value, which is not None.
Writer: TypeAlias = Callable[[Any, str, Any], Any]


def at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def fail(path: str, problem: str) -> NoReturn:
    raise InvalidRequestError(f"{path}: {problem}", field=path)


# -- writing -------------------------------------------------------------------------------------


def write(value: Any, kind: type[MessageT], **given: Any) -> MessageT:
    """Return a message of the attributes that have its fields' names.

    `given` fields stand for attributes, as the message's constructor takes them; what is in a
    oneof must be given. What is None, or is the dataclass' default of a field that may be absent,
    is left out.
    """
    message = kind(**given)
    _fill(message, value, frozenset(given))
    return message


def _fill(message: Any, value: Any, given: frozenset[str] = NONE) -> None:
    kind: Any = type(value)
    for name, write_one in _writers(kind, message.DESCRIPTOR, given):
        attribute = getattr(value, name)
        if attribute is not None:
            write_one(message, name, attribute)


@cache
def _writers(
    cls: Any, descriptor: Descriptor, given: frozenset[str]
) -> tuple[tuple[str, Writer], ...]:
    own = fields(cls) if is_dataclass(cls) else ()
    defaults = {field.name: default() for field in own if (default := _default(field))}
    return tuple(
        (field.name, _writer_but_of(defaults.get(field.name), field))
        for field in descriptor.fields
        if field.name not in given and not _is_choice(field)
    )


def _is_choice(field: FieldDescriptor) -> bool:
    return field.containing_oneof is not None and len(field.containing_oneof.fields) > 1


def _writer_but_of(default: Any, field: FieldDescriptor) -> Writer:
    """Return what writes a field; not the default, if the field can be absent instead."""
    write_one = _writer(field)
    if default is None or not field.has_presence:
        return write_one
    return lambda message, name, value: value == default or write_one(message, name, value)


def _writer(field: Any) -> Writer:
    if _is_map(field):
        return lambda message, name, value: getattr(message, name).update(value)
    if field.is_repeated:
        return _write_many if field.message_type is None else _write_parts
    if field.message_type is not None:
        return lambda message, name, value: _fill(_present(getattr(message, name)), value)
    if field.enum_type is not None:
        kind = field.enum_type
        return lambda message, name, member: setattr(message, name, _number_of(kind, member))
    return setattr


def _write_many(message: Any, name: str, values: Sequence[Any]) -> None:
    getattr(message, name).extend(values)


def _write_parts(message: Any, name: str, parts: Sequence[Any]) -> None:
    entries = getattr(message, name)
    for part in parts:
        _fill(entries.add(), part)


def _present(message: Message) -> Message:
    """Return a part of a message, set even if it stays empty."""
    message.SetInParent()
    return message


def numbers(members: Iterable[EnumT], wire: Any) -> Mapping[EnumT, Any]:
    """Return the value on the wire of each member; `wire` is the generated enum."""
    return MappingProxyType({member: _number_of(wire.DESCRIPTOR, member) for member in members})


@cache
def _number_of(kind: EnumDescriptor, member: Enum) -> int:
    number: int = kind.values_by_name[f"{_prefix_of(kind)}{member.name}"].number
    return number


def _prefix_of(kind: EnumDescriptor) -> str:
    return str(kind.values_by_number[0].name).removesuffix("UNSPECIFIED")


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


# -- reading -------------------------------------------------------------------------------------


def read(cls: type[T], message: Message, path: str = "", **given: Any) -> T:
    """Return a message as a dataclass. Raises InvalidRequestError naming `path.field`.

    An empty path names the field alone. `given` fields are taken as they are. A field that the
    message lacks has its default; a part that has none is read from the message itself.
    """
    kind: Any = cls
    read_values = _reader_of_values(kind, message.DESCRIPTOR, frozenset(given))
    return cls(**given, **read_values(message, path))


def read_part(cls: type[T], message: Message, name: str) -> T:
    """Return the part of that name. Raises InvalidRequestError if it is absent, and as `read`."""
    if not message.HasField(name):
        fail(name, "is required")
    return read(cls, getattr(message, name), name)


@cache
def _reader_of_values(cls: Any, descriptor: Descriptor, given: frozenset[str] = NONE) -> Reader:
    hints = get_type_hints(cls, include_extras=True)
    wire = descriptor.fields_by_name
    readers = tuple(
        (field.name, _reader(field, hints[field.name], descriptor))
        for field in fields(cls)
        if field.name not in given and (field.name in wire or _default(field) is None)
    )
    return lambda message, path: {name: reader(message, path) for name, reader in readers}


def _reader(field: Field[Any], hint: Any, descriptor: Descriptor) -> Reader:
    kind, rules = _kind_and_rules(hint)
    wire = descriptor.fields_by_name.get(field.name)
    if wire is None:
        read_inlined = _reader_of_values(kind, descriptor)
        return lambda message, path: kind(**read_inlined(message, path))
    name, default = field.name, _default(field)
    if _is_map(wire):
        return lambda message, path: MappingProxyType(dict(getattr(message, name)))
    if wire.is_repeated:
        return _reader_of_many(name, kind, rules, wire)
    if wire.message_type is not None:
        read_value: Reader = _reader_of_part(name, kind, wire)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        read_value = _reader_of_enum(field, kind, wire.enum_type)
    else:
        read_value = _reader_of_scalar(name, rules)
    if not wire.has_presence:
        return read_value

    def read_present(message: Message, path: str) -> Any:
        if message.HasField(name):
            return read_value(message, path)
        return fail(at(path, name), "is required") if default is None else default()

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


def _reader_of_many(name: str, kind: Any, rules: Sequence[Any], wire: FieldDescriptor) -> Reader:
    most = next((rule.length for rule in rules if isinstance(rule, AtMost)), None)
    each = next((rule for rule in rules if isinstance(rule, Rule)), None)
    read_values = _reader_of_values(kind, wire.message_type) if wire.message_type else None

    def read_many(message: Message, path: str) -> tuple[Any, ...]:
        entries = getattr(message, name)
        if most is not None and len(entries) > most:
            fail(at(path, name), f"has more than {most} entries")
        if read_values is not None:
            place = at(path, name)
            parts = enumerate(entries)
            return tuple([kind(**read_values(part, f"{place}[{i}]")) for i, part in parts])
        values = tuple(entries)
        if each is not None and not all(map(each.holds, values)):
            fail(at(path, name), f"holds a value that is not {each}")
        return values

    return read_many


def _reader_of_part(name: str, kind: Any, wire: FieldDescriptor) -> Reader:
    read_values = _reader_of_values(kind, wire.message_type)
    return lambda message, path: kind(**read_values(getattr(message, name), at(path, name)))


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
            fail(at(path, name), f"unknown value {number}")
        return members[number]

    return read_enum


def _reader_of_scalar(name: str, rules: Sequence[Any]) -> Reader:
    if not rules:
        return lambda message, path: getattr(message, name)
    (rule,) = rules
    if isinstance(rule, AtMost):
        return _reader_of_text(name, rule.length)

    def read_value(message: Message, path: str) -> Any:
        value = getattr(message, name)
        if not rule.holds(value):
            fail(at(path, name), f"{value!r} is not {rule}")
        return value

    return read_value


def _reader_of_text(name: str, max_length: int) -> Reader:
    def read_text(message: Message, path: str) -> str:
        value: str = getattr(message, name)
        if not value:
            fail(at(path, name), "is required")
        if len(value) > max_length:
            fail(at(path, name), f"is longer than {max_length} characters")
        return value

    return read_text
