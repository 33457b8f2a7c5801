"""Decoded JSON as a checked body, or a fault that names a place in it."""

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import Discriminator, Tag, ValidationError

from services.gateway.left_out.members import StrictBody
from services.kit.errors import InvalidRequestError

_KIND = "\0"  # begins the names by which pydantic tells kinds apart, so that no path has them
# Why what vLLM's server takes is refused, and what to ask for instead.
_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "prompt_logprobs": "not supported: ask /v1/completions for echo with logprobs",
        "truncate_prompt_tokens": "not supported: no prompt is cut unseen; /tokenize counts its "
        "tokens",
    }
)
_SUBJECT = re.compile(r"^[A-Z]\w* should ")  # "Input should be", "List should have"
_PLAIN_WORDS = (
    (re.compile(r"an? valid dictionary( or instance of \w+)?"), "an object"),
    (re.compile(r"a valid (?=[aeiou])"), "an "),
    (re.compile(r"a valid "), "a "),
    (re.compile(r" after validation"), ""),
)

BodyT = TypeVar("BodyT", bound=StrictBody)


def kind(name: str) -> Tag:
    """Return the mark of one of the kinds of object that `by_kind` chooses among."""
    return Tag(_KIND + name)


def by_kind(kind_of: Callable[[object], str | None], *, fault: str = "") -> Discriminator:
    """Return what chooses among kinds. `fault` is told of an object of no kind."""

    def tag(value: object) -> str | None:
        name = kind_of(value)
        return None if name is None else _KIND + name

    told = fault or None
    return Discriminator(tag, custom_error_type=told and "no_kind", custom_error_message=told)


def parse_body(body_class: type[BodyT], body: object, ignored: set[str] | None = None) -> BodyT:
    """Check a decoded JSON body. Raises InvalidRequestError naming the parameter at fault.

    What has no effect is left out and its name added to `ignored`, unless the body asks for
    `evenflow.strict`: then it is at fault.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    names = set() if ignored is None else ignored
    try:
        return body_class.model_validate(body, context=None if _is_strict(body) else names)
    except ValidationError as error:
        raise _named_fault(error) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def _is_strict(body: dict[str, Any]) -> bool:
    extension = body.get("evenflow")
    return isinstance(extension, dict) and extension.get("strict") is True


def _named_fault(error: ValidationError) -> InvalidRequestError:
    """Turn the first fault that pydantic found into an error that names the parameter."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = _path_of(fault["loc"])
    if fault["type"] == "extra_forbidden":
        reason = _REASONS.get(path, "this parameter is not supported")
        return InvalidRequestError(f"{path}: {reason}", field=path)
    if fault["type"] == "missing":
        return InvalidRequestError(f"{path}: required", field=path)
    return InvalidRequestError(f"{path}: {_reason(fault['msg'])}", field=path)


def _path_of(places: Iterable[int | str]) -> str:
    """Return the path in the body to where a fault is."""
    path = ""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
        elif not place.startswith(_KIND):
            path += f".{place}" if path else place
    return path


def _reason(message: str) -> str:
    """Return pydantic's message as a rule for a parameter: what it must be, or have."""
    rule = _SUBJECT.sub("must ", message.removeprefix("Value error, "))
    for theirs, ours in _PLAIN_WORDS:
        rule = theirs.sub(ours, rule)
    return rule
