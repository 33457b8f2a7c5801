"""Forms in JSON as the engine is given them: white space between parts ends."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm")

import xgrammar as xgr
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag
from vllm.v1.structured_output.backend_xgrammar import STRING_SUPPORTED_FORMATS

from services.executor.prompts.json_forms import fault_of_tools, kept_form, without_annotations
from services.executor.prompts.json_schema.walk import KNOWN_FORMATS
from services.executor.prompts.sampling import grammar_of, is_of_any_object
from tests.byte_tokenizer import describe_tokenizer

NUMBERS = {"type": "array", "items": {"type": "integer"}}
ARGUMENTS = {"type": "object", "properties": {"n": NUMBERS}, "required": ["n"]}


def can_begin(form: StructuredOutputsParams, text: str) -> bool:
    """Return whether an answer to a form, as the engine compiles it, may begin with a text."""
    info = xgr.TokenizerInfo.deserialize_json(describe_tokenizer())
    compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    matcher = xgr.GrammarMatcher(compiler.compile_structural_tag(form.structural_tag))
    return bool(matcher.accept_string(text))


def tool_form(model: str, parameters: Any) -> StructuredOutputsParams:
    """Return vLLM's form of a call of the tool `f` with these parameters."""
    function = {"name": "f", "strict": True, "parameters": parameters}
    tool = ChatCompletionToolsParam.model_validate({"type": "function", "function": function})
    tag = get_model_structural_tag(
        model=model, tools=[tool], tool_choice="required", reasoning=False
    )
    return StructuredOutputsParams(structural_tag=json.dumps(tag.model_dump()))


@pytest.mark.parametrize(
    ("form", "before"),
    [
        (StructuredOutputsParams(json=json.dumps(NUMBERS)), "["),
        (StructuredOutputsParams(json=NUMBERS), "[1,"),
        (StructuredOutputsParams(json_object=True), '{"a":['),
        (StructuredOutputsParams(json_object=True), "{"),
        (tool_form("hermes", ARGUMENTS), '<tool_call>\n{"name": "f", "arguments": {"n":'),
        (
            tool_form("qwen_3_coder", ARGUMENTS),
            "<tool_call>\n<function=f>\n<parameter=n>\n[",
        ),
    ],
)
def test_between_two_parts_is_one_character_of_white_space_at_most(
    form: StructuredOutputsParams, before: str
) -> None:
    kept = kept_form(form, is_compact=False)

    for blank in (" ", "\n"):
        assert can_begin(kept, before + blank)
        assert not can_begin(kept, before + 2 * blank)


def test_texts_have_as_much_white_space_as_they_like() -> None:
    form = StructuredOutputsParams(json='{"type": "string"}')
    call = tool_form("qwen_3_coder", {**ARGUMENTS, "properties": {"n": {"type": "string"}}})

    assert can_begin(kept_form(form, is_compact=False), '"a    b')
    begun = "<tool_call>\n<function=f>\n<parameter=n>\n    def f():\n        pass\n"
    assert can_begin(kept_form(call, is_compact=False), begun)


def test_an_engine_that_writes_no_white_space_is_asked_for_json() -> None:
    form = StructuredOutputsParams(json=json.dumps({"type": "string", "format": "path"}))
    any_object = StructuredOutputsParams(json_object=True)

    assert kept_form(form, is_compact=True) == StructuredOutputsParams(json='{"type": "string"}')
    assert kept_form(any_object, is_compact=True) == any_object


def test_what_is_no_json_is_left_as_it_is() -> None:
    form = StructuredOutputsParams(regex="a+")

    assert kept_form(form, is_compact=False) is form
    assert without_annotations(form) is form
    assert without_annotations(None) is None


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputsParams(json={"type": "object", "properties": {"a": {"not": {}}}}),
        tool_form("hermes", {"type": "object", "properties": {"a": {"not": {}}}}),
    ],
)
def test_what_a_schema_cannot_have_is_named_in_each_form(form: StructuredOutputsParams) -> None:
    with pytest.raises(ValueError, match=r"^properties\.a\.not: is not kept to$"):
        kept_form(form, is_compact=False)


def test_what_a_call_cannot_keep_to_is_named_with_its_tool() -> None:
    kept, free, bad = (
        ChatCompletionToolsParam.model_validate(
            {
                "type": "function",
                "function": {"name": name, "strict": strict, "parameters": {"not": {}, **schema}},
            }
        )
        for name, strict, schema in (
            ("kept", True, {"not": False}),
            ("free", False, {}),
            ("bad", True, {}),
        )
    )

    assert fault_of_tools([kept, free, bad]) == "bad.not: is not kept to"
    assert fault_of_tools([kept, free]) == ""


def test_the_form_of_any_object_needs_no_check_and_others_do() -> None:
    any_object = kept_form(StructuredOutputsParams(json_object=True), is_compact=False)
    numbers = kept_form(StructuredOutputsParams(json=NUMBERS), is_compact=False)

    of_any_object = grammar_of(SamplingParams(structured_outputs=any_object))
    of_numbers = grammar_of(SamplingParams(structured_outputs=numbers))

    assert of_any_object is not None
    assert is_of_any_object(of_any_object)
    assert is_of_any_object(("json_object", ""))
    assert of_numbers == ("structural_tag", numbers.structural_tag)
    assert not is_of_any_object(of_numbers)


def test_formats_are_known_that_vllm_knows() -> None:
    assert KNOWN_FORMATS == STRING_SUPPORTED_FORMATS


def test_annotations_do_not_keep_a_form_from_standing_beside_calls() -> None:
    form = StructuredOutputsParams(json='{"type": "string", "format": "password", "minLength": 1}')

    assert without_annotations(form) == StructuredOutputsParams(
        json='{"type": "string", "minLength": 1}'
    )
