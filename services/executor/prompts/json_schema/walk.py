"""The schemas that a JSON schema consists of. Pure."""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

# Keywords that hold a schema, a list of schemas, and schemas by name.
ONE = (
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "items",
    "unevaluatedItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties", "dependentSchemas")

# The values of `format` that xgrammar keeps to.
KNOWN_FORMATS = frozenset(
    (
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "json-pointer",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    )
)


def reached(root: object) -> Iterator[tuple[str, Schema]]:
    """Yield (place, schema) for each object that holds an answer, references followed, once each.

    A place has names and positions with dots between them; the root's is empty. What is defined
    and referred to nowhere is left out, and so is what is only called like a keyword.
    """
    seen = set[int]()
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        place, schema = waiting.pop()
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            yield place, schema
            waiting.extend(reversed([*_parts(schema, place, root)]))


def _parts(schema: Schema, place: str, root: object) -> Iterator[tuple[str, object]]:
    for keyword, value in schema.items():
        if keyword == "$ref":
            yield str(value).strip("#/").replace("/", "."), target(root, value)
        elif keyword in ONE:
            yield join(place, keyword), value
        elif keyword in LIST and isinstance(value, list):
            yield from ((join(place, keyword, n), part) for n, part in enumerate(value))
        elif keyword in NAMED and isinstance(value, dict):
            yield from ((join(place, keyword, name), part) for name, part in value.items())


def join(*names: object) -> str:
    """Return a place from names, of which the first may be empty."""
    return ".".join(str(name) for name in names if name != "")


def is_local(reference: object) -> bool:
    """Return whether xgrammar looks for a reference, and for what it says."""
    return reference == "#" or (isinstance(reference, str) and reference.startswith("#/"))


def target(root: object, reference: object) -> object:
    """Return what a `$ref` refers to, read as xgrammar reads it; None for nothing."""
    if not is_local(reference):
        return None
    found: object = root
    for name in filter(None, str(reference)[1:].split("/")):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def simplify(root: object) -> None:
    """Rewrite a schema in place to one that forbids the same, and that xgrammar keeps more of.

    `format` is an annotation: it is kept only where xgrammar knows it and it takes no other rule's
    place. The names of properties are texts, whether or not the schema says it.
    """
    for _, schema in reached(root):
        is_alone = schema.keys().isdisjoint(("pattern", "minLength", "maxLength"))
        if not is_alone or str(schema.get("format")) not in KNOWN_FORMATS:
            schema.pop("format", None)
        names = schema.get("propertyNames")
        if isinstance(names, dict):
            names.setdefault("type", "string")
