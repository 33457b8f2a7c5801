"""The parts that bodies of the OpenAI API are made of: how each is written in JSON."""

import json
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema

from services.gateway import types
from services.gateway.left_out.members import LenientBody, StrictBody, ignored, note
from services.gateway.left_out.stand_ins import joined, stand_in
from services.gateway.openai import rules
from services.generation import sampling_params as limits
from services.generation.conversation import RESERVED_VARIABLES
from services.generation.prompts import Prompt, TextPrompt, TokenPrompt
from services.kit.errors import InvalidRequestError


class OrText:
    """Annotates what may also be written as a text, which a validator turns into it."""

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}


def _stop_strings(value: object) -> object:
    """Take one string for a list of one."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError("must be a non-empty string or a list of them")
    if len(strings) > limits.MAX_STOP_STRINGS:
        raise ValueError(f"must hold at most {limits.MAX_STOP_STRINGS} strings")
    return tuple(strings)


MAX_SALT_CHARACTERS = 256
MAX_TOLD_CHARACTERS = 64  # of a name that a client made up

CONTENT = "messages.content."
# By the type of a part: the member that has its text. A refusal is what an assistant said.
TEXT_MEMBERS = MappingProxyType({"text": "text", "refusal": "refusal"})


def _joined_text(value: object, info: ValidationInfo) -> object:
    """Take a list of parts for the text that they form."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    return joined(_text_of(part, info) for part in value)


def _text_of(part: object, info: ValidationInfo) -> str:
    """Return the text of a part of a message, or the line that stands for it."""
    if not isinstance(part, dict):
        raise ValueError("a part must be an object")
    if line := stand_in(part, info, CONTENT):
        return line
    member = TEXT_MEMBERS.get(str(part.get("type")))
    if member is None:
        raise ValueError('only parts of type "text" are supported')
    if not isinstance(part.get(member), str):
        raise ValueError(f'a {part["type"]} part has "type" and a string "{member}"')
    for name in part.keys() - {"type", member}:
        if part[name] is not None:
            _leave_out(info, name)
    return str(part[member])


def _leave_out(info: ValidationInfo, name: str) -> None:
    names = ignored(info)
    if names is None:
        raise ValueError(f'a part has no "{name[:MAX_TOLD_CHARACTERS]}"')
    note(names, CONTENT, name)


def _prompts(value: object) -> object:
    """Take a text or a list of token ids, or a list of them, for one prompt or several."""
    is_several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if is_several else [value]
    assert isinstance(prompts, list)
    if len(prompts) > types.MAX_ANSWERS:
        raise ValueError(f"must hold at most {types.MAX_ANSWERS} prompts")
    return tuple(map(_prompt, prompts))


def _prompt(value: object) -> Prompt:
    if isinstance(value, str) and value:
        return TextPrompt(value)
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        if min(value) < 0 or max(value) > limits.MAX_TOKEN_ID:
            raise ValueError("a token id is out of range")
        return TokenPrompt(tuple(value))
    raise ValueError(
        "must be a non-empty string or a non-empty list of token ids, or a list of them"
    )


def _at_most_max_tokens(value: object) -> object:
    """Lower a whole number that no context is as long as: the context's own limit cuts it again."""
    is_huge = isinstance(value, int | float) and value > limits.MAX_TOKENS and value % 1 == 0
    return limits.MAX_TOKENS if is_huge else value


def _token_biases(value: object) -> object:
    """Take the ids, which JSON writes as strings, for numbers."""
    if not isinstance(value, dict) or len(value) > limits.MAX_BIASED_TOKENS:
        raise ValueError(f"must be an object of at most {limits.MAX_BIASED_TOKENS} token ids")
    biases: dict[int, float] = {}
    for id, bias in value.items():
        if not (id.isascii() and id.isdecimal() and len(id) <= 10):
            raise ValueError(f'"{id[:20]}" is not a token id')
        if type(bias) not in (int, float):
            raise ValueError("each value must be a number")
        biases[int(id)] = bias
    return biases


_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": limits.MAX_TOKEN_ID}
_ONE_PROMPT = [
    {"type": "string", "minLength": 1},
    {"type": "array", "items": _ID_SCHEMA, "minItems": 1},
]
_PROMPTS = {"items": {"anyOf": _ONE_PROMPT}, "minItems": 1, "maxItems": types.MAX_ANSWERS}
_PROMPT_SCHEMA = {"anyOf": [*_ONE_PROMPT, {"type": "array", **_PROMPTS}]}
_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {
        "type": "number",
        "minimum": -limits.MAX_LOGIT_BIAS,
        "maximum": limits.MAX_LOGIT_BIAS,
    },
    "maxProperties": limits.MAX_BIASED_TOKENS,
}
_STOP = {"type": "string", "minLength": 1, "maxLength": limits.MAX_STOP_CHARACTERS}
_STOPS = {"type": "array", "items": _STOP, "maxItems": limits.MAX_STOP_STRINGS}
_STRINGS_SCHEMA = {"anyOf": [_STOP, _STOPS]}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_TEXT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}
_FORM_SCHEMA = {
    "type": "string",
    "minLength": 1,
    "maxLength": limits.MAX_FORM_CHARACTERS,
    "pattern": r"\S",
}
_CHOICES_SCHEMA = {
    "type": "array",
    "items": {"type": "string", "minLength": 1},
    "minItems": 1,
    "maxItems": limits.MAX_CHOICE_TEXTS,
}


Stop = Annotated[tuple[str, ...], BeforeValidator(_stop_strings), WithJsonSchema(_STRINGS_SCHEMA)]
Text = Annotated[str, BeforeValidator(_joined_text), WithJsonSchema(_TEXT_SCHEMA)]
Prompts = Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
MaxTokens = Annotated[int, Field(ge=1), BeforeValidator(_at_most_max_tokens)]
MaxTokensOrNone = Annotated[int, Field(ge=0), BeforeValidator(_at_most_max_tokens)]
TokenId = Annotated[int, Field(ge=0, le=limits.MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(max_length=limits.MAX_STOP_TOKEN_IDS)]
TokenBiases = Annotated[Any, BeforeValidator(_token_biases), WithJsonSchema(_BIAS_SCHEMA)]
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=limits.MAX_BAD_WORD_CHARACTERS)]],
    Field(max_length=limits.MAX_BAD_WORDS),
]
AllowedTokenIds = Annotated[
    list[TokenId], Field(min_length=1, max_length=limits.MAX_ALLOWED_TOKENS)
]
CacheSalt = Annotated[str, Field(max_length=MAX_SALT_CHARACTERS, pattern=r"^[^\r\n]*$")]
FormText = Annotated[str | None, WithJsonSchema(_FORM_SCHEMA)]
Choices = Annotated[list[str] | None, WithJsonSchema(_CHOICES_SCHEMA)]
Penalty = Annotated[
    float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY, allow_inf_nan=False)
]
NumLogprobs = Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)]
TemplateVariables = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"propertyNames": {"not": {"enum": sorted(RESERVED_VARIABLES)}}}),
]


def json_text(value: dict[str, Any], name: str) -> str:
    """Return an object as JSON text, empty for an empty one. Raises InvalidRequestError naming
    the parameter `name` if it is nested too deeply.
    """
    try:
        return json.dumps(value, ensure_ascii=False) if value else ""
    except RecursionError:
        raise InvalidRequestError(f"{name}: nested too deeply", field=name) from None


JSON_OBJECT = limits.StructuredOutputs(form=limits.AnswerForm.JSON_OBJECT)


def schema_outputs(schema: dict[str, Any], name: str) -> limits.StructuredOutputs:
    """Hold answers to a JSON schema. Raises InvalidRequestError as `json_text` does."""
    text = json_text(schema, name) or "{}"
    return limits.StructuredOutputs(form=limits.AnswerForm.JSON_SCHEMA, text=text)


class StreamOptions(LenientBody):
    place = "stream_options."

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's, of each answer so far, with include_usage only


class JsonSchema(StrictBody):
    """`strict` is taken and always so: what is drawn keeps to the schema."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(StrictBody):
    model_config = ConfigDict(
        json_schema_extra=rules.if_is(
            "type",
            "json_schema",
            then={"required": ["json_schema"]},
            otherwise=rules.absent("json_schema"),
        )
    )

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema goes with type "json_schema", and only with it')
        return self

    def outputs(self) -> limits.StructuredOutputs | None:
        """Return what the answer must look like; None for anything."""
        if self.json_schema is not None:
            return schema_outputs(self.json_schema.schema_, "response_format")
        return JSON_OBJECT if self.type == "json_object" else None


def _nothing() -> None:
    """Be a default that the schema does not tell: a null would have no type of its own there."""


class StructuredOutputsBody(StrictBody):
    """vLLM's extension, less what `response_format` says."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    regex: FormText = Field(default_factory=_nothing)
    choice: Choices = Field(default_factory=_nothing)
    grammar: FormText = Field(default_factory=_nothing)

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputsBody":
        if len(self.model_fields_set) != 1:
            raise ValueError("must have one of regex, choice and grammar")
        return self

    def outputs(self) -> limits.StructuredOutputs:
        """Return what the answer must look like."""
        (name,) = self.model_fields_set
        form = limits.AnswerForm(name)
        if form is limits.AnswerForm.CHOICE:
            return limits.StructuredOutputs(form=form, choices=tuple(self.choice or ()))
        return limits.StructuredOutputs(form=form, text=getattr(self, name))
