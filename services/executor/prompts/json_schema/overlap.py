"""Whether an answer can have two schemas at once. Pure."""

from collections.abc import Iterable
from typing import Any

from services.executor.prompts.json_schema.walk import Schema, target

Types = frozenset[str]

# "number" is one that is no integer here.
TYPES: dict[str, Types] = {
    **{name: frozenset((name,)) for name in ("null", "boolean", "object", "array", "string")},
    "integer": frozenset(("integer",)),
    "number": frozenset(("integer", "number")),
}
NO_TYPE: Types = frozenset()
ALL_TYPES = NO_TYPE.union(*TYPES.values())
OBJECT_HINTS = ("properties", "additionalProperties", "unevaluatedProperties")
ARRAY_HINTS = ("items", "prefixItems", "unevaluatedItems")
# What xgrammar reads alone, the first of them first.
ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
MAX_COMPARISONS = 20_000  # of two schemas, for one root


def declared_types(schema: Schema) -> Types:
    """Return the types that `type` allows; all without one."""
    declared = schema.get("type", list(TYPES))
    names = declared if isinstance(declared, list) else [declared]
    return NO_TYPE.union(*(TYPES.get(name, ALL_TYPES) for name in names if isinstance(name, str)))


def type_of(value: object) -> Types:
    """Return the type of a value, as a set of one."""
    match value:
        case None:
            return TYPES["null"]
        case bool():
            return TYPES["boolean"]
        case int() | float():
            is_integer = isinstance(value, int) or value.is_integer()
            return TYPES["integer"] if is_integer else TYPES["number"] - TYPES["integer"]
        case str():
            return TYPES["string"]
        case list():
            return TYPES["array"]
        case _:
            return TYPES["object"]


class Overlaps:
    """Compares schemas below one root. Where it cannot tell, they may overlap."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._types: dict[int, Types] = {}  # by id of the schema
        self._num_left = MAX_COMPARISONS

    def types(self, schema: object) -> Types:
        """Return the types that answers to a schema can have, as xgrammar reads it."""
        if not isinstance(schema, dict):
            return NO_TYPE if schema is False else ALL_TYPES
        if id(schema) not in self._types:
            self._types[id(schema)] = ALL_TYPES  # of one that refers to itself
            types = declared_types(schema) & self.types_alone(schema)
            self._types[id(schema)] = types
        return self._types[id(schema)]

    def types_alone(self, schema: Schema) -> Types:
        """Return the types of answers to what xgrammar reads of a schema beside its `type`."""
        alone = next((keyword for keyword in ALONE if keyword in schema), None)
        match alone:
            case "$ref":
                return self.types(target(self._root, schema["$ref"]))
            case "const" | "enum":
                return NO_TYPE.union(*map(type_of, values_of(schema)))
            case str():
                return NO_TYPE.union(*map(self.types, _listed(schema[alone])))
        if "type" in schema:
            return ALL_TYPES
        if not schema.keys().isdisjoint(OBJECT_HINTS):
            return TYPES["object"]
        return ALL_TYPES if schema.keys().isdisjoint(ARRAY_HINTS) else TYPES["array"]

    def are_disjoint(self, schemas: Iterable[object]) -> bool:
        """Return whether no answer can have two of the schemas."""
        seen = list[object]()
        for schema in schemas:
            if not all(self._excludes(schema, other) for other in seen):
                return False
            seen.append(schema)
        return True

    def _excludes(self, one: object, other: object) -> bool:
        self._num_left -= 1
        if self._num_left < 0:
            return False
        one, other = self._resolved(one), self._resolved(other)
        shared = self.types(one) & self.types(other)
        if not shared:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        for first, second in ((one, other), (other, one)):
            for keyword in ("anyOf", "oneOf", "allOf"):
                if keyword in first:
                    return all(self._excludes(part, second) for part in _listed(first[keyword]))
        if _is_finite(one) and _is_finite(other):
            return not _keys(one) & _keys(other)
        return shared == TYPES["object"] and self._differ_in_a_property(one, other)

    def _differ_in_a_property(self, one: Schema, other: Schema) -> bool:
        needed = dict.fromkeys([*required_of(one), *required_of(other)])
        return any(self._excludes(_property(one, name), _property(other, name)) for name in needed)

    def _resolved(self, schema: object) -> object:
        for _ in range(len(ALONE)):  # chains are short; a ring has no end
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = target(self._root, schema["$ref"])
        return schema


def values_of(schema: Schema) -> list[Any]:
    """Return the values that `const` or `enum` lists."""
    return [schema["const"]] if "const" in schema else _listed(schema["enum"])


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_finite(schema: Schema) -> bool:
    if "$ref" in schema or not ("const" in schema or "enum" in schema):
        return False
    return not any(isinstance(value, dict | list) for value in values_of(schema))


def _keys(schema: Schema) -> set[tuple[Types, Any]]:
    """Return the values so that 1 is 1.0 and not true."""
    return {(type_of(value), value) for value in values_of(schema)}


def required_of(schema: Schema) -> list[str]:
    """Return the names that `required` lists."""
    return [name for name in _listed(schema.get("required")) if isinstance(name, str)]


def _property(schema: Schema, name: str) -> object:
    """Return what a schema says of a property; True for nothing."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return not is_closed
