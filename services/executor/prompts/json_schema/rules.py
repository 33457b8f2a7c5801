"""Names what a schema asks for and xgrammar does not keep to. Pure.

xgrammar leaves it out without a word. Each rule is proved by a test that has xgrammar take what a
schema forbids: one that a later xgrammar keeps to fails there, and goes.
"""

import re
from collections.abc import Iterator
from itertools import combinations

from services.executor.prompts.json_schema.overlap import (
    ALL_TYPES,
    ALONE,
    TYPES,
    Overlaps,
    Types,
    declared_types,
    required_of,
)
from services.executor.prompts.json_schema.walk import Schema, is_local, join, reached

Fault = tuple[str, str]  # keyword, what is wrong with it

NOT_KEPT = "is not kept to"
NEVER_KEPT = (
    "not",
    "$dynamicRef",
    "$recursiveRef",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# What says something of an answer, by the type that it is about.
OF_STRINGS = ("pattern", "minLength", "maxLength")
OF_NUMBERS = (*BOUNDS, "multipleOf")
OF_ARRAYS = (
    *("items", "prefixItems", "unevaluatedItems", "contains"),
    *("minItems", "maxItems", "uniqueItems"),
)
OF_OBJECTS = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "required", "minProperties", "maxProperties"),
)
OF_ONE_TYPE = (*OF_STRINGS, *OF_NUMBERS, *OF_ARRAYS, *OF_OBJECTS)
# Values with which a keyword forbids nothing.
FREE: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("minLength", "minItems", "minProperties"), (0,)),
    **dict.fromkeys(("items", "unevaluatedItems"), (True, {})),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("properties", "patternProperties"), ({},)),
    **dict.fromkeys(("required", "prefixItems"), ([],)),
    **dict.fromkeys(("uniqueItems", "not"), (False,)),
    "propertyNames": (True, {}, {"type": "string"}),
}
MAX_MULTIPLE = 1_024
_MARKS = re.compile(r"\\.|[\[\]]|\(\?(<?)[=!]", re.DOTALL)  # in a pattern


def check_schema(root: object) -> None:
    """Raise ValueError naming the first place and keyword that xgrammar does not keep to."""
    overlaps = Overlaps(root)
    try:
        for place, schema in reached(root):
            for keyword, fault in _faults(schema, overlaps):
                raise ValueError(f"{join(place, keyword)}: {fault}")
    except RecursionError:
        raise ValueError("has references that lead too far") from None


def _faults(schema: Schema, overlaps: Overlaps) -> Iterator[Fault]:
    asked = [name for name in schema if not _is_free(name, schema)]
    yield from ((name, NOT_KEPT) for name in NEVER_KEPT if name in asked)
    if "if" in asked and ("then" in asked or "else" in asked):
        yield "if", NOT_KEPT
    alone = next((keyword for keyword in ALONE if keyword in schema), None)
    if alone is not None:
        yield from _faults_beside(alone, asked, schema, overlaps)
        yield from _faults_of_choices(schema, overlaps)
        return
    types = declared_types(schema) & overlaps.types_alone(schema)
    if types == ALL_TYPES and "type" not in schema:
        yield from ((name, f"{NOT_KEPT} without a type") for name in asked if name in OF_ONE_TYPE)
    yield from _faults_of_types(types, asked, schema)


def _is_free(keyword: str, schema: Schema) -> bool:
    value = schema[keyword]
    return any(value == free and type(value) is type(free) for free in FREE.get(keyword, ()))


def _faults_beside(
    alone: str, asked: list[str], schema: Schema, overlaps: Overlaps
) -> Iterator[Fault]:
    others = (*OF_ONE_TYPE, *ALONE)
    beside = f"{NOT_KEPT} beside {alone}"
    yield from ((name, beside) for name in asked if name in others and name != alone)
    if not overlaps.types_alone(schema) <= declared_types(schema):
        yield "type", beside


def _faults_of_choices(schema: Schema, overlaps: Overlaps) -> Iterator[Fault]:
    if "$ref" in schema and not is_local(schema["$ref"]):
        yield "$ref", "only # and #/ within the schema are kept to"
    for keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(keyword) == []:
            yield keyword, "must not be empty"
    all_of, one_of = schema.get("allOf"), schema.get("oneOf")
    if isinstance(all_of, list) and len(all_of) > 1:
        yield "allOf", "more than one schema is not kept to"
    if isinstance(one_of, list) and not overlaps.are_disjoint(one_of):
        yield "oneOf", f"{NOT_KEPT} where its schemas may overlap; ask for anyOf"


def _faults_of_types(types: Types, asked: list[str], schema: Schema) -> Iterator[Fault]:
    if schema.get("type") == []:
        yield "type", "must not be empty"
    if "string" in types:
        yield from _faults_of_strings(asked, schema)
    if "multipleOf" in asked and TYPES["number"] & types and not _is_kept_multiple(types, schema):
        yield "multipleOf", NOT_KEPT
    if "array" in types:
        yield from ((name, NOT_KEPT) for name in ("uniqueItems", "contains") if name in asked)
    if "object" in types:
        yield from _faults_of_objects(asked, schema)


def _is_kept_multiple(types: Types, schema: Schema) -> bool:
    multiple = schema["multipleOf"]
    is_whole = isinstance(multiple, int) and multiple <= MAX_MULTIPLE
    has_fractions = bool(types & TYPES["number"] - TYPES["integer"])
    return is_whole and not has_fractions and schema.keys().isdisjoint(BOUNDS)


def _faults_of_strings(asked: list[str], schema: Schema) -> Iterator[Fault]:
    if "pattern" not in asked:
        return
    yield from (("pattern", fault) for fault in _lookarounds(schema["pattern"]))
    lengths = ("minLength", "maxLength")
    yield from ((name, f"{NOT_KEPT} beside pattern") for name in lengths if name in asked)


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _lookarounds(pattern: object) -> Iterator[str]:
    is_in_brackets = False
    for mark in _MARKS.finditer(str(pattern)):
        if mark[0] in ("[", "]"):
            is_in_brackets = mark[0] == "["
        elif mark[1] is not None and not is_in_brackets:
            yield f"a {'lookbehind' if mark[1] else 'lookahead'} {NOT_KEPT}"


def _faults_of_objects(asked: list[str], schema: Schema) -> Iterator[Fault]:
    known = _mapping(schema.get("properties"))
    for name in required_of(schema):
        if name not in known:
            yield "required", f"{name} {NOT_KEPT}, which is not in properties"
    closing = [
        name
        for name in ("additionalProperties", "unevaluatedProperties")
        if schema.get(name) is False
    ]
    parts = ("propertyNames", "patternProperties", "properties", *closing)
    for one, other in combinations([name for name in parts if name in asked], 2):
        if one == "propertyNames" or other == "properties":
            yield other, f"{NOT_KEPT} beside {one}"
    patterns = _mapping(schema.get("patternProperties"))
    if len(patterns) > 1:
        yield "patternProperties", f"more than one pattern {NOT_KEPT}"
    for pattern in patterns:
        yield from (("patternProperties", fault) for fault in _lookarounds(pattern))
