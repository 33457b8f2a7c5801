"""What of a JSON schema is refused by name: proved by xgrammar, which takes what is forbidden."""

import json
from typing import Any

import pytest

pytest.importorskip("jsonschema")
pytest.importorskip("xgrammar")

import jsonschema
import xgrammar as xgr

from services.executor.prompts.json_schema.rules import check_schema
from services.executor.prompts.json_schema.walk import simplify
from tests.byte_tokenizer import describe_tokenizer

INT, TEXT = {"type": "integer"}, {"type": "string"}
A_AND_B = {"type": "object", "properties": {"a": INT, "b": INT}}
NAMED_A = {"type": "object", "propertyNames": {"pattern": "^a$"}}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}

# Schema, an answer that it forbids and xgrammar takes, and what is said.
NOT_KEPT: list[tuple[Any, str, str]] = [
    ({"pattern": "^a$"}, '"b"', "pattern: is not kept to without a type"),
    ({"minimum": 3}, "1", "minimum: is not kept to without a type"),
    ({"minItems": 2}, "[]", "minItems: is not kept to without a type"),
    ({"required": ["a"]}, "{}", "required: is not kept to without a type"),
    (
        {"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": TEXT}},
        '"bbb"',
        "maxLength: is not kept to beside $ref",
    ),
    (
        {"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": TEXT}},
        '"b"',
        "type: is not kept to beside $ref",
    ),
    ({"anyOf": [TEXT, INT], "maxLength": 1}, '"bb"', "maxLength: is not kept to beside anyOf"),
    ({"anyOf": [TEXT, INT], "type": "string"}, "1", "type: is not kept to beside anyOf"),
    (
        {**A_AND_B, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "{}",
        "properties: is not kept to beside anyOf",
    ),
    ({"const": "a", "type": "integer"}, '"a"', "type: is not kept to beside const"),
    ({"enum": ["a", 1], "type": "integer"}, '"a"', "type: is not kept to beside enum"),
    ({"enum": ["aa"], "maxLength": 1}, '"aa"', "maxLength: is not kept to beside enum"),
    ({"const": "a", "enum": ["b"]}, '"a"', "enum: is not kept to beside const"),
    ({"allOf": [TEXT], "maxLength": 1}, '"bb"', "maxLength: is not kept to beside allOf"),
    ({"allOf": [TEXT, {"enum": ["a"]}]}, "1", "allOf: more than one schema is not kept to"),
    (
        {"oneOf": [{"type": "number"}, INT]},
        "1",
        "oneOf: is not kept to where its schemas may overlap; ask for anyOf",
    ),
    (
        {"oneOf": [A_AND_B, {"type": "object", "properties": {"c": INT}}]},
        "{}",
        "oneOf: is not kept to where its schemas may overlap; ask for anyOf",
    ),
    ({"type": "string", "pattern": "^(?=.*1)..$"}, '"ab"', "pattern: a lookahead is not kept to"),
    ({"type": "string", "pattern": "^(?!a).$"}, '"a"', "pattern: a lookahead is not kept to"),
    (
        {"type": "string", "pattern": "^a$", "maxLength": 0},
        '"a"',
        "maxLength: is not kept to beside pattern",
    ),
    ({"type": "number", "multipleOf": 3}, "4", "multipleOf: is not kept to"),
    ({"type": "integer", "multipleOf": 2000}, "4", "multipleOf: is not kept to"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, "4", "multipleOf: is not kept to"),
    ({"type": "array", "items": INT, "uniqueItems": True}, "[1,1]", "uniqueItems: is not kept to"),
    ({"type": "array", "items": INT, "contains": {"const": 1}}, "[2]", "contains: is not kept to"),
    (
        {"type": "array", "items": INT, "contains": {"const": 1}, "maxContains": 1},
        "[1,1]",
        "contains: is not kept to",
    ),
    ({"not": TEXT}, '"a"', "not: is not kept to"),
    ({**TEXT, "if": {"const": "a"}, "then": {"const": "b"}}, '"a"', "if: is not kept to"),
    (
        {**A_AND_B, "dependentRequired": {"a": ["b"]}},
        '{"a":1}',
        "dependentRequired: is not kept to",
    ),
    (
        {**A_AND_B, "dependentSchemas": {"a": {"required": ["b"]}}},
        '{"a":1}',
        "dependentSchemas: is not kept to",
    ),
    (
        {**DRAFT_7, "anyOf": [A_AND_B], "dependencies": {"a": ["b"]}},
        '{"a":1}',
        "dependencies: is not kept to",
    ),
    (
        {"$ref": "#foo", "$defs": {"a": {"$anchor": "foo", **TEXT}}},
        "1",
        "$ref: only # and #/ within the schema are kept to",
    ),
    (
        {"$dynamicRef": "#foo", "$defs": {"a": {"$dynamicAnchor": "foo", **TEXT}}},
        "1",
        "$dynamicRef: is not kept to",
    ),
    ({"anyOf": []}, "", "anyOf: must not be empty"),
    ({"oneOf": []}, "", "oneOf: must not be empty"),
    ({"type": []}, "1", "type: must not be empty"),
    (
        {"type": "object", "properties": {"c": INT}, "propertyNames": {"pattern": "^a$"}},
        '{"c":1}',
        "properties: is not kept to beside propertyNames",
    ),
    (
        {**NAMED_A, "patternProperties": {"^b$": {}}},
        '{"b":1}',
        "patternProperties: is not kept to beside propertyNames",
    ),
    (
        {**NAMED_A, "additionalProperties": False},
        '{"a":1}',
        "additionalProperties: is not kept to beside propertyNames",
    ),
    (
        {**NAMED_A, "unevaluatedProperties": False},
        '{"a":1}',
        "unevaluatedProperties: is not kept to beside propertyNames",
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^a*$", "maxLength": 1}},
        '{"aa":1}',
        "propertyNames.maxLength: is not kept to beside pattern",
    ),
    (
        {"type": "object", "propertyNames": {"anyOf": [{"const": "a"}, {"pattern": "^b$"}]}},
        '{"c":1}',
        "propertyNames.type: is not kept to beside anyOf",
    ),
    (
        {"type": "object", "properties": {"a": TEXT}, "patternProperties": {"^.$": INT}},
        '{"a":1}',
        "properties: is not kept to beside patternProperties",
    ),
    (
        {"type": "object", "patternProperties": {"^b$": INT, "b": TEXT}},
        '{"b":1}',
        "patternProperties: more than one pattern is not kept to",
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^(?!a).$": INT},
            "additionalProperties": False,
        },
        '{"a":1}',
        "patternProperties: a lookahead is not kept to",
    ),
    (
        {**A_AND_B, "required": ["c"]},
        '{"a":1}',
        "required: c is not kept to, which is not in properties",
    ),
]
# What schemas say that programs write, and an answer that they forbid.
KEPT: list[tuple[Any, str, str]] = [
    ({"anyOf": [TEXT, {"type": "null"}], "default": None}, '"a"', "1"),
    ({"const": "a", "type": "string", "title": "Kind"}, '"a"', '"b"'),
    ({"enum": ["a", 2], "type": ["string", "integer"]}, "2", "3"),
    ({"enum": [1.5, 2], "type": "number"}, "1.5", "3"),
    (
        {
            "$defs": {"In": {**A_AND_B, "required": ["a"], "title": "In"}},
            "type": "object",
            "properties": {
                "one": {"$ref": "#/$defs/In", "description": "It."},
                "many": {"type": "array", "items": {"$ref": "#/$defs/In"}, "maxItems": 1},
            },
            "required": ["one"],
            "additionalProperties": False,
        },
        '{"one":{"a":1},"many":[{"a":2}]}',
        '{"one":{"b":1}}',
    ),
    ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": INT}, "default": 1}, "1", '"a"'),
    ({"type": "string", "minLength": 1, "maxLength": 2}, '"a"', '"abc"'),
    ({"type": "integer", "minimum": 1, "exclusiveMaximum": 3}, "2", "3"),
    ({"type": "integer", "multipleOf": 5}, "15", "14"),
    ({"type": "number", "exclusiveMinimum": 0}, "0.5", "0"),
    ({"type": ["array", "null"], "items": INT, "minItems": 1}, "null", "[]"),
    ({"type": "object", "additionalProperties": INT}, '{"a":1}', '{"a":"b"}'),
    (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INT},
        '{"a":1}',
        '{"a":"b"}',
    ),
    ({**NAMED_A, "additionalProperties": INT}, '{"a":1}', '{"b":1}'),
    ({"type": "object", "propertyNames": {"enum": ["a"]}}, '{"a":1}', '{"b":1}'),
    ({"type": "array", "prefixItems": [INT, TEXT], "items": False}, '[1,"a"]', '["a",1]'),
    ({"type": "string", "pattern": r"^[(?=]\(\?=$"}, '"((?="', '"a"'),
    ({"type": "string", "format": "uri", "minLength": 1, "maxLength": 3}, '"a"', '"abcd"'),
    ({"type": "string", "format": "email", "pattern": "^a$"}, '"a"', '"b@c.de"'),
    ({"oneOf": [TEXT, {"type": "null"}]}, "null", "1"),
    ({"oneOf": [{"const": 1, "title": "x"}, {"const": True}, {"enum": ["a"]}]}, "true", "2"),
    (
        {
            "discriminator": {"propertyName": "k", "mapping": {"a": "#/$defs/A", "b": "#/$defs/B"}},
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
            "$defs": {
                name.upper(): {
                    "type": "object",
                    "properties": {"k": {"const": name, "type": "string"}, "n": INT},
                    "required": ["k"],
                }
                for name in ("a", "b")
            },
        },
        '{"k":"b","n":1}',
        '{"k":"c"}',
    ),
    (
        {
            "oneOf": [
                {**A_AND_B, "required": ["a"]},
                {"type": "object", "properties": {"c": INT}, "additionalProperties": False},
            ]
        },
        '{"c":1}',
        '{"a":"x"}',
    ),
    # Called like keywords.
    (
        {"type": "object", "properties": {"not": INT, "pattern": {"const": "(?=a)"}}},
        '{"not":1,"pattern":"(?=a)"}',
        '{"not":"a"}',
    ),
    # Defined, and referred to nowhere.
    ({**TEXT, "$defs": {"a": {"not": {}}}}, '"a"', "1"),
]


def fault_of(schema: Any) -> str:
    """Return why a schema is refused; empty: it is not."""
    simplified = json.loads(json.dumps(schema))
    simplify(simplified)
    try:
        check_schema(simplified)
    except ValueError as error:
        return str(error)
    return ""


def takes(schema: Any, answer: str) -> bool:
    """Return whether xgrammar lets an answer be written and end."""
    text = json.dumps(
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    )
    info = xgr.TokenizerInfo.deserialize_json(describe_tokenizer())
    compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    matcher = xgr.GrammarMatcher(compiler.compile_structural_tag(text))
    return bool(matcher.accept_string(answer) and matcher.accept_token(info.stop_token_ids[0]))


def allows(schema: Any, answer: str) -> bool:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator.check_schema(schema)
        return bool(answer) and validator(schema).is_valid(json.loads(answer))
    except jsonschema.SchemaError:
        return False  # as what has no members: no answer keeps to it


@pytest.mark.parametrize(("schema", "forbidden", "fault"), NOT_KEPT)
def test_what_xgrammar_does_not_keep_to_is_refused_by_name(
    schema: Any, forbidden: str, fault: str
) -> None:
    assert takes(schema, forbidden)
    assert not allows(schema, forbidden)

    for place, whole in (("", schema), *nested(schema)):
        assert fault_of(whole) == place + fault


def nested(schema: Any) -> list[tuple[str, Any]]:
    """Return the schema in other places, where no reference leads elsewhere then."""
    if "$defs" in schema:
        return []
    inside = {"type": "object", "properties": {"x": schema}}
    listed = {"anyOf": [{"type": "null"}, {"type": "array", "items": schema}]}
    referred = {"$ref": "#/$defs/X", "$defs": {"X": inside}}
    return [
        ("properties.x.", inside),
        ("anyOf.1.items.", listed),
        ("$defs.X.properties.x.", referred),
    ]


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), KEPT)
def test_what_xgrammar_keeps_to_is_taken(schema: Any, allowed: str, forbidden: str) -> None:
    simplified = json.loads(json.dumps(schema))
    simplify(simplified)
    check_schema(simplified)

    assert allows(schema, allowed)
    assert not allows(schema, forbidden)
    assert takes(simplified, allowed)
    assert not takes(simplified, forbidden)


@pytest.mark.parametrize("name", ["binary", "password", "path", "uuid4", "base64", "json-string"])
def test_formats_that_are_no_grammars_are_left_out(name: str) -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": name}}}

    simplify(schema)

    assert schema == {"type": "object", "properties": {"format": {"type": "string"}}}


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("a(?<=a)", "pattern: a lookbehind is not kept to"),
        ("a(?<!a)", "pattern: a lookbehind is not kept to"),
        (r"\\(?=a)", "pattern: a lookahead is not kept to"),
        (r"[\]](?!a)", "pattern: a lookahead is not kept to"),
        (r"\(?=a", ""),
        (r"[\](?=[(?!]", ""),
        ("(?:a)(?<name>b)", ""),
        ("[" * 60_000, ""),  # at once: in steps that grow with its length alone
        ("[\\" * 30_000, ""),
    ],
)
def test_only_what_looks_around_is_taken_for_it(pattern: str, fault: str) -> None:
    assert fault_of({"type": "string", "pattern": pattern}) == fault


def test_schemas_that_refer_to_one_another_without_end_are_looked_at_once() -> None:
    many = [{"$ref": f"#/$defs/{n}"} for n in range(100)]
    ring = {str(n): {"anyOf": many} for n in range(100)}
    assert fault_of({"anyOf": many, "$defs": ring}) == ""
    assert fault_of({"oneOf": many, "$defs": ring}) == "has references that lead too far"
    chain = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}]} for n in range(5_000)}
    long = {"type": "string", "anyOf": [{"$ref": "#/$defs/0"}], "$defs": chain}
    assert fault_of(long) == "has references that lead too far"


@pytest.mark.parametrize(
    "schema",
    [
        *(True, 7, [], None, {"required": 3}, {"type": "object", "required": [[]]}),
        *({"properties": []}, {"type": "object", "patternProperties": 1}, {"enum": 3}),
        *({"$ref": 1}, {"oneOf": 1}, {"type": {"a": 1}}, {"format": []}, {"pattern": 1}),
        *({"type": "integer", "multipleOf": "a"}, {"type": "string", "pattern": []}),
        {"type": ["string", ["a"]]},
    ],
)
def test_what_is_no_schema_is_refused_by_name_or_left_to_xgrammar(schema: Any) -> None:
    fault = fault_of(schema)

    assert fault == "" or ": " in fault
