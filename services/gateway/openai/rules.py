"""What holds between the members of a body, as JSON Schema, for `/openapi.json`.

Bodies check it themselves; here it is said to programs that make bodies from the schema.
"""

from collections.abc import Iterable
from typing import Any

Rule = dict[str, Any]


def together(*rules: Rule) -> Rule:
    """All of them hold."""
    return {"allOf": list(rules)}


def either(first: str, second: str) -> Rule:
    """One of two members is there, and not the other."""
    return {
        "if": {"required": [first]},
        "then": {"not": {"required": [second]}},
        "else": {"required": [second]},
    }


def not_both(first: str, second: str) -> Rule:
    """At most one of two members is stated."""
    return {"if": {"required": [first]}, "then": absent(second)}


def only_with(name: str, other: str, *, unless: Iterable[Any] = ()) -> Rule:
    """A member is there only beside another, but for values that ask for nothing."""
    asks = {"properties": {name: {"not": {"enum": [None, *unless]}}}, "required": [name]}
    return {"if": asks, "then": {"required": [other]}}


def if_is(name: str, value: Any, *, then: Rule, otherwise: Rule | None = None) -> Rule:
    """A rule for bodies in which a member has this value, and one for all others."""
    said = {"properties": {name: {"const": value}}, "required": [name]}
    rule = {"if": said, "then": then}
    return rule if otherwise is None else rule | {"else": otherwise}


def has(name: str, value: Any) -> Rule:
    """A member is there, with this value."""
    return {"properties": {name: {"const": value}}, "required": [name]}


def absent(*names: str) -> Rule:
    """Members are not there, or empty."""
    empty: Rule = {"enum": [None, "", []]}
    return {"properties": dict.fromkeys(names, empty)}
