"""Forms in JSON as the engine's grammars keep to them."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from vllm.sampling_params import StructuredOutputsParams, check_json_nesting

from services.executor.prompts.json_schema.rules import check_schema
from services.executor.prompts.json_schema.walk import simplify

MAX_WHITESPACE = 1  # characters between two parts: a model may write nothing else where all go


def kept_form(form: StructuredOutputsParams, *, is_compact: bool) -> StructuredOutputsParams:
    """Return a form with little white space between parts, which only vLLM's structural tags can
    ask for, and without annotations. ValueError names what a grammar would not keep to.

    `is_compact`: the engine lets forms in JSON have no white space, and asks for no tag.
    """
    if form.json is None and not form.json_object and form.structural_tag is None:
        return form
    tag = _tag_of(form)
    for schema_format in _schema_formats(tag):
        simplify(schema_format["json_schema"])
        check_schema(schema_format["json_schema"])
        schema_format["max_whitespace_cnt"] = MAX_WHITESPACE
    if is_compact and form.structural_tag is None:
        return form if form.json_object else replace(form, json=json.dumps(_schema_in(tag)))
    return replace(form, json=None, json_object=None, structural_tag=json.dumps(tag))


def without_annotations(form: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
    """Return a form as vLLM takes it beside calls of tools."""
    if form is None or form.json is None:
        return form
    schema = _schema_of(form)
    simplify(schema)
    return replace(form, json=json.dumps(schema))


def fault_of_tools(tools: Iterable[Any]) -> str:
    """Return what calls of vLLM's tools cannot keep to, with the tool's name; empty: nothing."""
    for function in (tool.function for tool in tools if tool.function.strict):
        schema = json.loads(json.dumps(function.parameters))
        simplify(schema)
        try:
            check_schema(schema)
        except ValueError as error:
            return f"{function.name}.{error}"
    return ""


def _tag_of(form: StructuredOutputsParams) -> dict[str, Any]:
    if form.structural_tag is not None:
        tag: dict[str, Any] = json.loads(form.structural_tag)
        return tag
    schema = {"type": "object"} if form.json_object else _schema_of(form)
    return {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}


def _schema_in(tag: dict[str, Any]) -> object:
    return tag["format"]["json_schema"]


def _schema_of(form: StructuredOutputsParams) -> Any:
    """Return the schema, not shared with `form`."""
    check_json_nesting(form.json)
    text = form.json if isinstance(form.json, str) else json.dumps(form.json)
    return json.loads(text)


def _schema_formats(part: object) -> Iterator[dict[str, Any]]:
    """Yield what holds a schema within a structural tag."""
    if isinstance(part, dict) and "json_schema" in part:
        yield part
    elif isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _schema_formats(inner)


ANY_OBJECT_TAG = kept_form(
    StructuredOutputsParams(json_object=True), is_compact=False
).structural_tag
